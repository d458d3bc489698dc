"""Clusters that several modules share: tests of equal specs follow each other, and one cluster serves them all."""

from __future__ import annotations

from pathlib import Path

from cluster.cluster import Spec
from kvrelay.model.embedded_path import embedded_checkpoint
from oracle_data import oracle_folder

RING_OF_TWO = Spec(oracle_folder("v3_noaux"), ring_size="2", chunk_tokens=100, pool_pages=600)
EMBEDDED = Spec(Path(embedded_checkpoint()), ring_size="1,2", chunk_tokens=200, pool_pages=256)
EVERY_LINE_LOGGED = Spec(
    model=oracle_folder("v3_noaux"),
    environ={
        f"KVRELAY_{role}_{name}": value
        for role in ("ROUTER", "PREFILL", "DECODE")
        for name, value in (("LOG_FORMAT", "json"), ("LOG_LEVEL", "debug"))
    },
)
