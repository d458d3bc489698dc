"""What a decode node refuses, and what it says then."""

from __future__ import annotations

import grpc
import numpy as np

from contract.prefill_process import silent_decode_node
from decode_lab import (
    BLOCK_TOKENS,
    GREEDY,
    ORACLE,
    Lab,
    refused,
    running,
    says_retry,
    until,
)
from kvrelay.core import prefix_hash
from kvrelay.core.types import Incarnation
from kvrelay.model.transformer import Model
from kvrelay.proto import convert
from kvrelay.proto.v1 import blocks_pb2, common_pb2, handoff_pb2
from oracle_data import recording


async def test_reserve_refuses_what_cannot_be(lab: Lab) -> None:
    prompt = recording(ORACLE, 64).prompt
    other = Incarnation("decode", 1)
    for changed, code, text, retry in (
        ({"node": convert.incarnation_to_pb(other)}, grpc.StatusCode.UNAVAILABLE, "not decode@", True),
        ({"layout_fingerprint": b"x" * 16}, grpc.StatusCode.FAILED_PRECONDITION, "layout 7878", True),
        ({"packed_ids": b""}, grpc.StatusCode.INVALID_ARGUMENT, "empty", False),
        ({"packed_ids": b"abc"}, grpc.StatusCode.INVALID_ARGUMENT, "multiple of 4", False),
        ({"packed_ids": convert.pack_ids([1, 70_000])}, grpc.StatusCode.INVALID_ARGUMENT, "70000", False),
        ({"ring_size": 1000}, grpc.StatusCode.INVALID_ARGUMENT, "1000", False),
        ({"packed_ids": convert.pack_ids([1] * 2048)}, grpc.StatusCode.INVALID_ARGUMENT, "limit of 2048", False),
    ):
        err = await refused(lab.stub.Reserve(lab.request(prompt, GREEDY, **changed)))
        assert (err.code(), says_retry(err)) == (code, retry), changed
        assert text in str(err.details())
    assert (await lab.settled()).pinned_pages == 0


async def test_a_request_id_that_a_log_would_have_to_carry_is_bounded(lab: Lab) -> None:
    ref = common_pb2.RequestRef(request_id="x" * 1000, attempt=1)
    ticket = handoff_pb2.Ticket(request=ref)
    for call in (
        lab.stub.Reserve(lab.request([1, 2], GREEDY, request=ref)),
        lab.blocks.Push(blocks_pb2.PushRequest(ticket=ticket)),
        lab.stub.Abort(common_pb2.AbortRequest(request=ref)),
    ):
        err = await refused(call)
        assert (err.code(), "1000 bytes" in str(err.details())) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_push_holds_blocks_no_longer_than_a_request_may_take(model: Model, index_url: str) -> None:
    async with running(model, index_url, max_request_s=60.0) as lab:
        ticket = handoff_pb2.Ticket(request=common_pb2.RequestRef(request_id="r", attempt=1), timeout_ms=61_000)
        err = await refused(lab.blocks.Push(blocks_pb2.PushRequest(ticket=ticket)))
        assert err.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "61 s; at most 60" in str(err.details())


async def test_more_pushes_than_requests_are_refused(model: Model, index_url: str) -> None:
    async with running(model, index_url, max_requests=2) as lab, silent_decode_node() as nowhere:
        prompt = recording(ORACLE, 333).prompt
        await lab.generate(prompt, GREEDY)
        ourselves = convert.incarnation_to_pb(lab.server.node.incarnation)
        ticket = await lab.reserve(prompt[:BLOCK_TOKENS], GREEDY, writer=ourselves)
        ticket.decode_endpoint = nowhere
        blocks = prefix_hash.chain(lab.seed, np.asarray(prompt[:BLOCK_TOKENS], np.int32), block_tokens=BLOCK_TOKENS)
        push = blocks_pb2.PushRequest(ticket=ticket, block_hashes=blocks)
        running_ones = [lab.blocks.Push(push) for _ in range(2)]
        await until(lambda: lab.server._pusher.num_active == 2)

        err = await refused(lab.blocks.Push(push))

        assert (err.code(), says_retry(err)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        assert "2 pushes run here, the limit is 2" in str(err.details())
        for one in running_ones:
            one.cancel()
        await lab.stub.Abort(common_pb2.AbortRequest(request=ticket.request))
        await lab.settled()


async def test_too_large_for_the_node_is_invalid_and_no_room_now_is_exhausted(model: Model, index_url: str) -> None:
    async with running(model, index_url, num_pages=10) as lab:
        err = await refused(lab.stub.Reserve(lab.request([1] * 640, GREEDY)))
        assert err.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "11 pages" in str(err.details())
        await lab.reserve([1] * 320, GREEDY)
        err = await refused(lab.stub.Reserve(lab.request([1] * 320, GREEDY)))
        assert (err.code(), says_retry(err)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        assert "6 pages wanted, 4 of 10 free, 0 evictable" in str(err.details())


async def test_more_requests_than_the_limit_are_refused(model: Model, index_url: str) -> None:
    async with running(model, index_url, max_requests=2) as lab:
        for _ in range(2):
            await lab.reserve([1, 2], GREEDY)
        err = await refused(lab.stub.Reserve(lab.request([1, 2], GREEDY)))
        assert err.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_attempt_is_reserved_once(lab: Lab) -> None:
    request = lab.request([1, 2, 3], GREEDY)
    await lab.stub.Reserve(request)
    assert (await refused(lab.stub.Reserve(request))).code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_abort_that_overtakes_its_reserve_wins(lab: Lab) -> None:
    request = lab.request([1, 2, 3], GREEDY)
    await lab.stub.Abort(common_pb2.AbortRequest(request=request.request))
    assert (await refused(lab.stub.Reserve(request))).code() is grpc.StatusCode.FAILED_PRECONDITION
    await lab.settled()
