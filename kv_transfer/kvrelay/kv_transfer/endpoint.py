"""The two ends of a hand-off, as node apps use them."""

from kvrelay.kv_transfer.hub_values import AdmittedHandoff, HubCallbacks, HubStats
from kvrelay.kv_transfer.local import Limits, LocalPool
from kvrelay.kv_transfer.outcome import Failed, Outcome, Settled
from kvrelay.kv_transfer.reader_hub import ReaderHub
from kvrelay.kv_transfer.writer_endpoint import WriterEndpoint

__all__ = [
    "AdmittedHandoff",
    "Failed",
    "HubCallbacks",
    "HubStats",
    "Limits",
    "LocalPool",
    "Outcome",
    "ReaderHub",
    "Settled",
    "WriterEndpoint",
]
