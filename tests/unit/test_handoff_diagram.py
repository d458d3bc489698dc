"""The committed diagrams are the tables."""

from __future__ import annotations

from kvrelay.kv_transfer.diagram import updated
from repo import ROOT


def test_the_committed_diagrams_are_up_to_date() -> None:
    text = (ROOT / "docs" / "handoff.md").read_text()

    assert updated(text) == text
    assert "receiving --> sealed: PartLanded, ManifestIn" in text
