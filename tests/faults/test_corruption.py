"""C1-C8: no text from bytes that are not the ones that were meant."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import fields, replace

import grpc
import pytest

import handoff_writer
from cluster.cluster import wait_until
from faults.lab.drive import drive, refusal
from faults.lab.fleet import Fleet
from faults.lab.requests import TOKENS, right
from faults.lab.workload import prompt
from handoff_lab import PATIENT_S, Reader, reader, until
from kvrelay.core.clock import monotonic
from kvrelay.core.errors import LayoutMismatchError
from kvrelay.core.layout import PageLayout
from kvrelay.core.shard import Span
from kvrelay.core.types import Counters, Incarnation, SampledToken
from kvrelay.kv_transfer import session_events as ev
from kvrelay.kv_transfer.landing import Expected, Landings
from kvrelay.kv_transfer.notice import Notice, NoticeKey, encode
from kvrelay.kv_transfer.session import ReaderSession
from kvrelay.kv_transfer.session_table import State
from kvrelay.kv_transfer.values import Manifest, Part, Request
from kvrelay.proto.v1 import common_pb2
from session_lab import (
    DEADLINE_S,
    FENCE_S,
    FINGERPRINT,
    LEASE_S,
    NUM_LAYERS,
    REQUEST,
    TOKEN,
    WRITER,
    attach,
    reservation,
)
from transport_party import KINDS

NUM_PAGES = 20_000  # 92 MB: the writer is stopped in their midst
_TCP = next(kind for kind in KINDS if "tcp" in kind)


def _fill(decode: Reader) -> None:
    decode.memory.view[:] = b"\x5a" * len(decode.memory.view)


@pytest.mark.sabotage("no_fence")
async def test_c1_pages_of_an_aborted_hand_off_serve_nobody_while_an_old_write_can_land(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C1. Real NIXL over TCP: the writer is stopped after it posted, the hand-off aborted, the pages filled by their
    next owner, the writer continued. Without the fence the next owner's bytes change.
    """
    for name, value in KINDS[_TCP].items():
        monkeypatch.setenv(name, value)
    async with reader(_TCP, num_pages=NUM_PAGES) as decode:
        decode.on_free = lambda epoch: _fill(decode)
        ticket = decode.reserve(
            "r", writer=Incarnation.new("prefill"), prompt_tokens=NUM_PAGES * 8, timeout_s=PATIENT_S, lease_s=PATIENT_S
        )
        writer = handoff_writer.start(_TCP, ticket, num_pages=NUM_PAGES)
        assert writer.stdout is not None
        try:
            assert await asyncio.to_thread(writer.stdout.readline) == "posting\n"
            os.kill(writer.pid, signal.SIGSTOP)
            decode.hub.abort(Request("r", 1), "redone elsewhere")
            await asyncio.sleep(0.5)
            assert decode.freed == []  # no fence, no pages
            os.kill(writer.pid, signal.SIGCONT)
            await until(lambda: decode.freed)
            await asyncio.sleep(0.5)
        finally:
            writer.kill()
            writer.wait()
        assert decode.memory.view == b"\x5a" * len(decode.memory.view)


@pytest.mark.parametrize(
    ("kind", "counter"),
    [
        ("corrupt", "parts_corrupt_total"),
        ("overtake", "parts_corrupt_total"),
        ("mislabel", "notices_stale_total"),
        pytest.param("truncate", "parts_corrupt_total", marks=pytest.mark.full),
        pytest.param("garble", "notices_garbled_total", marks=pytest.mark.full),
        pytest.param("wrong_rank", "notices_stale_total", marks=pytest.mark.full),
    ],
)
@pytest.mark.sabotage("nothing_verified")
def test_c2_c8_a_part_that_is_not_right_is_found_before_the_first_step(fleet: Fleet, kind: str, counter: str) -> None:
    """C2, C8. Wrong bytes, too few, none yet (the seal overtakes its data), another epoch's, another rank's."""
    before, retries = fleet.counter(counter, role="decode"), fleet.retries()
    fleet.serve_on("prefill-0")
    fleet.arm("prefill-0", "part", kind, skip=2, count=1)
    right(fleet, 300 + sum(map(ord, kind)))
    assert fleet.counter(counter, role="decode") > before
    assert fleet.retries() > retries


@pytest.mark.sabotage("nothing_verified")
def test_c2_c8_a_part_that_is_dropped_is_missed_in_seconds(fleet: Fleet) -> None:
    """C2, C8. The writer believes it done; nothing of it came."""
    retries = fleet.retries()
    fleet.serve_on("prefill-0")
    fleet.arm("prefill-0", "part", "drop", skip=2, count=1)
    right(fleet, 310)
    assert fleet.retries() > retries


@pytest.mark.parametrize(("kind", "count"), [("duplicate", 2), ("delay", 1)])
@pytest.mark.sabotage("parts_in_order_only")
def test_c2_parts_that_come_twice_or_in_another_order_change_nothing(fleet: Fleet, kind: str, count: int) -> None:
    """C2. Duplicated, reordered: no attempt fails."""
    retries = fleet.retries()
    fleet.serve_on("prefill-0")
    # Where decode has most of the prompt already there are four parts: of two late ones nobody would overtake either.
    fleet.arm("prefill-0", "part", kind, skip=2, count=count, seconds=1.0)
    right(fleet, 320 + len(kind))
    assert fleet.remote.hits("prefill-0").get(f"part:{kind}")
    assert fleet.retries() == retries


@pytest.mark.sabotage("all_notices_are_ours")
def test_c3_a_notice_of_an_older_attempt_is_counted_and_changes_nothing() -> None:
    """C3. The slot is in use again while an old completion is on its way."""
    landed: list[ev.PartLanded] = []
    counters = Counters()
    landings = Landings(counters, monotonic)
    now = NoticeKey(decode_start_id=1, counter=6, request_hash=3, attempt=2)
    landings.expect(now, Expected(("writer/0",), lambda part: True, landed.extend))
    for old in (
        replace(now, attempt=1),
        replace(now, counter=5),
        replace(now, decode_start_id=9),
        replace(now, request_hash=4),
    ):
        landings.take([("writer/0", encode(Notice(old, 0, Part(0, 0, Span(0, 8), 1))))])
        landings.work(budget_s=1)
    assert landed == []
    assert counters.values["notices_stale_total"] == 4


@pytest.mark.sabotage("ranks_mixed_up")
def test_c4_parts_of_two_ranks_with_the_same_number_are_two_parts() -> None:
    """C4. Part numbers count per rank; nothing is keyed by them alone."""
    session = ReaderSession(
        reservation(ring_size=2, prompt_tokens=16),
        deadline_s=DEADLINE_S,
        lease_until_s=LEASE_S,
        fence_timeout_s=FENCE_S,
    )
    parts = {
        rank: tuple(Part(layer, layer, Span(8 * rank, 8 * rank + 8), 1) for layer in range(NUM_LAYERS))
        for rank in (0, 1)
    }
    for rank in (0, 1):
        session.handle(attach(rank), now_s=0)
    for rank, own in parts.items():
        for part in own:
            session.handle(ev.PartLanded(rank, part, True, 0.0, 0.0), now_s=0)
        session.handle(ev.ManifestIn(Manifest(rank, own, None if rank else SampledToken(1), 0)), now_s=0)
    assert session.state is State.SEALED


@pytest.mark.sabotage("one_layout_for_all")
def test_c5_any_difference_in_layout_is_refused_at_the_handshake() -> None:
    """C5. Each field of a layout is in its fingerprint, and Attach refuses another fingerprint."""
    ours = PageLayout(num_layers=3, latent_width=32, rope_width=16, dtype="float32", model_id="m")
    other = {
        "num_layers": 4, "latent_width": 64, "rope_width": 8, "dtype": "bfloat16", "model_id": "n",
        "page_tokens": 32, "block_tokens": 128, "version": 2, "latent_format": "fp8",
    }  # fmt: skip
    assert set(other) == {field.name for field in fields(PageLayout)}
    for name, value in other.items():
        theirs = replace(ours, **{name: value})  # type: ignore[arg-type]
        held = replace(reservation(), fingerprint=ours.fingerprint)
        session = ReaderSession(held, deadline_s=DEADLINE_S, lease_until_s=LEASE_S, fence_timeout_s=FENCE_S)
        with pytest.raises(LayoutMismatchError):
            session.handle(ev.Attach(0, WRITER, REQUEST, TOKEN, theirs.fingerprint), now_s=0)
        assert session.state is State.RESERVED
    assert ours.fingerprint != FINGERPRINT


@pytest.mark.sabotage("nothing_verified")
def test_c6_blocks_of_a_failed_hand_off_are_nowhere(fleet: Fleet) -> None:
    """C6. The attempt that failed on a decode node leaves it nothing to reuse."""
    fleet.arm("prefill-0", "part", "corrupt", skip=2, count=1)
    with drive(fleet, prompt(330, TOKENS)) as one:
        assert refusal(lambda: one.start_prefill(one.reserve()))[0] is not grpc.StatusCode.OK
        wait_until(lambda: one.decode_stats().active_requests == 0, 5)
        one.ref = common_pb2.RequestRef(request_id="once more", attempt=1)
        assert one.reserve().resident_tokens == 0
        one.abort(one.decode)
    fleet.assert_settled()


@pytest.mark.sabotage("one_layout_for_all")
def test_c7_a_row_is_all_there_is_of_a_token() -> None:
    """C7. The scales of a quantised row are in the row, so a part that landed has them; a dtype outside the list is
    refused, and another dtype or format is another fingerprint.
    """
    with pytest.raises(ValueError, match="float8"):
        PageLayout(num_layers=1, latent_width=8, rope_width=8, dtype="float8_e4m3fn", model_id="m")
    layout = PageLayout(num_layers=1, latent_width=8, rope_width=8, dtype="float32", model_id="m")
    assert layout.page_bytes == layout.page_tokens * 16 * 4
    assert replace(layout, dtype="float16").fingerprint != layout.fingerprint
    packed = replace(layout, latent_format="fp8")
    assert packed.page_bytes == layout.page_tokens * (8 + 4 + 2 * 8)
    assert packed.fingerprint != layout.fingerprint
