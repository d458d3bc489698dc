"""Several notices in one."""

from __future__ import annotations

import pytest

from kvrelay.kv_transfer.notice_bundle import bundle, unbundle


@pytest.mark.parametrize("notices", [[b"n"], [b""], [b"a", b"", b"ccc"], [bytes([at]) * 72 for at in range(64)]])
def test_notices_come_out_as_they_went_in(notices: list[bytes]) -> None:
    assert unbundle(bundle(notices)) == notices


def test_one_notice_stays_as_it_is() -> None:
    assert bundle([b"KVRLabc"]) == b"KVRLabc"


def test_what_is_no_whole_bundle_is_taken_for_a_notice() -> None:
    whole = bundle([b"abc", b"def"])
    damaged = [whole[:size] for size in range(len(whole))] + [whole + b"x", b"KVRB\xff\xff", b"KVRL" + whole[4:]]

    assert [unbundle(raw) for raw in damaged] == [[raw] for raw in damaged]
