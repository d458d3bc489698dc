"""Every failure that kvrelay expects, as one tree.

    ServeError
    ├── InvalidRequestError      the client's mistake; nobody can serve this request
    ├── UnknownModelError        the client named a model that is not served
    ├── UnknownRequestError      nothing is known of this request (any more)
    ├── QuotaError               the tenant has as much as it may have; says when to ask again
    ├── CapacityError            no room now; another node or a later moment may have it
    ├── UnavailableError         a node or service cannot be reached or is leaving
    │   └── OverloadedError      too much is waiting; says when to ask again
    ├── DeadlineError            the request's time is over
    ├── RequestCancelledError           the client or the other leg went away
    ├── StaleMessageError        a message of an older epoch, attempt or incarnation
    ├── LayoutMismatchError      two nodes disagree about the bytes of a page
    ├── TransferError            the transport failed
    ├── CorruptTransferError     bytes that landed are not the bytes that were sent
    ├── RingError                a ring lost a rank or left together
    ├── ModelLoadError           a checkpoint is missing, damaged or unsupported
    ├── SettingsError            a setting is wrong or unknown
    └── NoKernelError            no kernel backend accepts this problem

Anything else that escapes is a bug: it is logged with its traceback and reaches the client as UNKNOWN.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class Status(Enum):
    """The gRPC status codes that kvrelay uses, by number (core imports no gRPC)."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15


class ServeError(Exception):
    """Base of all expected failures; status and retry are properties of the type."""

    status: ClassVar[Status] = Status.INTERNAL
    retry_elsewhere: ClassVar[bool] = False  # may the router try another node?


class InvalidRequestError(ServeError):
    status = Status.INVALID_ARGUMENT


class UnknownModelError(ServeError):
    status = Status.NOT_FOUND


class UnknownRequestError(ServeError):
    status = Status.NOT_FOUND


class QuotaError(ServeError):
    """The tenant's own limit, whatever room there is; the message names it, `retry_after_s` says when to ask again."""

    status = Status.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CapacityError(ServeError):
    status = Status.RESOURCE_EXHAUSTED
    retry_elsewhere = True


class UnavailableError(ServeError):
    status = Status.UNAVAILABLE
    retry_elsewhere = True


class OverloadedError(UnavailableError):
    """Refused at the door, before any work was done; `retry_after_s` says when to ask again."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(ServeError):
    status = Status.DEADLINE_EXCEEDED


class RequestCancelledError(ServeError):
    status = Status.CANCELLED


class StaleMessageError(ServeError):
    status = Status.FAILED_PRECONDITION


class LayoutMismatchError(ServeError):
    status = Status.FAILED_PRECONDITION
    retry_elsewhere = True


class TransferError(ServeError):
    status = Status.UNAVAILABLE
    retry_elsewhere = True


class CorruptTransferError(ServeError):
    status = Status.DATA_LOSS
    retry_elsewhere = True


class RingError(ServeError):
    status = Status.UNAVAILABLE
    retry_elsewhere = True


class ModelLoadError(ServeError):
    status = Status.FAILED_PRECONDITION


class SettingsError(ServeError):
    status = Status.FAILED_PRECONDITION


class NoKernelError(ServeError):
    """No backend took the problem; the message lists each backend's reason."""

    def __init__(self, refusals: dict[str, str]) -> None:
        super().__init__("no kernel: " + "; ".join(f"{name}: {why}" for name, why in refusals.items()))
        self.refusals = refusals
