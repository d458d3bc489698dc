"""A2 and the wire: whatever bytes come in, one clear error goes out, and the next request is right."""

from __future__ import annotations

import ast
import pkgutil
import secrets
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.cluster import status_of
from faults.lab.drive import ME, drive, refusal
from faults.lab.fleet import Fleet, further_node
from faults.lab.requests import right
from faults.lab.workload import prompt
from kvrelay.core.errors import ServeError
from kvrelay.kv_transfer import notice, wire
from kvrelay.kv_transfer.ticket import destination_digest
from kvrelay.kv_transfer.transport import agent_name
from kvrelay.proto import v1
from kvrelay.proto.convert import incarnation_from_pb
from kvrelay.proto.v1 import common_pb2, handoff_pb2
from repo import sources

# What a caller may hear about bytes that make no sense; a bug would be UNKNOWN or INTERNAL.
EXPECTED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
}
_LIMITS = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))

numbers = st.one_of(st.sampled_from([0, 1, 2, (1 << 31) - 1, (1 << 32) - 1]), st.integers(0, (1 << 32) - 1))
long_numbers = st.one_of(st.sampled_from([0, 1, (1 << 63) - 1, (1 << 64) - 1]), st.integers(0, (1 << 64) - 1))
blobs = st.one_of(st.binary(max_size=64), st.sampled_from([b"", b"\xff" * 1024, b"\0" * 4, b"\0\0\0\x80"]))
reals = st.floats(width=64)
texts = st.text(max_size=20)


def messages(kind: Any, depth: int = 3) -> st.SearchStrategy[Any]:
    """Return messages of a kind with any values in any fields."""

    @st.composite
    def build(draw: st.DrawFn) -> Any:
        made = kind()
        for field in kind.DESCRIPTOR.fields:
            if not draw(st.booleans()):
                continue
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            if is_map:
                continue
            value = _value(field, depth, draw)
            if value is None:
                continue
            if field.is_repeated:
                getattr(made, field.name).extend([value])
            elif field.message_type is not None:
                getattr(made, field.name).CopyFrom(value)
            else:
                setattr(made, field.name, value)
        return made

    return build()


def _value(field: Any, depth: int, draw: st.DrawFn) -> Any:
    if field.message_type is not None:
        return draw(messages(field.message_type._concrete_class, depth - 1)) if depth else None
    of_type = {
        field.TYPE_STRING: texts, field.TYPE_BYTES: blobs, field.TYPE_BOOL: st.booleans(), field.TYPE_DOUBLE: reals,
        field.TYPE_FLOAT: st.floats(width=32), field.TYPE_UINT32: numbers, field.TYPE_UINT64: long_numbers,
        field.TYPE_FIXED64: long_numbers, field.TYPE_INT32: st.integers(-(1 << 31), (1 << 31) - 1),
        field.TYPE_ENUM: st.sampled_from([one.number for one in field.enum_type.values] if field.enum_type else [0]),
    }  # fmt: skip
    return draw(of_type[field.type])


def clear(call: Any) -> None:
    """Let a call end; whatever it says must be expected."""
    try:
        result = call()
        if hasattr(result, "__next__"):
            list(result)
    except grpc.RpcError as err:
        code, text = status_of(err)
        # gRPC itself answers bytes that are no message at all, before our code sees them.
        unreadable = code is grpc.StatusCode.UNKNOWN and "Error parsing message" in text
        assert code in EXPECTED or unreadable, f"{code}: {text}"


def _services() -> Iterator[Any]:
    """Yield the descriptor of every service that the product has."""
    for found in pkgutil.iter_modules(v1.__path__):
        if found.name.endswith("_pb2"):
            yield from import_module(f"{v1.__name__}.{found.name}").DESCRIPTOR.services_by_name.values()


METHODS = {(service.name, method.name): method for service in _services() for method in service.methods}
# Any message to these ends the node; they have a test with nodes of their own.
DRAINS = {("DecodeNode", "Drain"), ("PrefillNode", "Drain")}


@pytest.mark.parametrize(("service", "method"), sorted(METHODS.keys() - DRAINS))
def test_a2_no_message_makes_a_server_fail_otherwise_than_clearly(fleet: Fleet, service: str, method: str) -> None:
    """A2. Every method of every service: raw bytes, and messages with any values in them."""
    endpoints = {record.node.name: record.endpoint for record in fleet.nodes()}
    endpoint = {"DecodeNode": endpoints["decode-0"], "PrefillNode": endpoints["prefill-0"]}.get(service, fleet.endpoint)
    if service == "BlockSource":
        endpoint = endpoints["prefill-1"]
    throw_at(endpoint, METHODS[service, method])
    right(fleet, 900, num_tokens=40)


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("service", "model_of"), [("DecodeNode", "decode-0"), ("PrefillNode", "prefill-0")])
def test_a2_a_drain_with_anything_in_it_ends_a_node_in_order_and_nobody_else_notices(
    fleet: Fleet, service: str, model_of: str
) -> None:
    """A2. Unreadable bytes change nothing; a drain with fields that nobody knows is one; later calls are too late."""
    with further_node(fleet, model_of, "node-x") as added:
        endpoint = next(record.endpoint for record in fleet.nodes() if record.node.name == "node-x")
        path = f"/kvrelay.v1.{service}/Drain"
        channel: Any
        with grpc.insecure_channel(endpoint) as channel:
            clear(lambda: channel.unary_unary(path)(b"\xff\xff", timeout=5))
            assert added.poll() is None
            channel.unary_unary(path)(bytes.fromhex("ba3e0461626364"), timeout=5)  # field 999, four bytes
        throw_at(endpoint, METHODS[service, "Drain"])
        assert added.wait(30) == 0
    right(fleet, 901, num_tokens=40)


def throw_at(endpoint: str, described: Any) -> None:
    """Send a method raw bytes, and messages with any values in them."""
    kind = described.input_type._concrete_class
    path = f"/{described.containing_service.full_name}/{described.name}"
    channel: Any  # raw bytes go through a channel untyped
    with grpc.insecure_channel(endpoint) as channel:

        @given(raw=st.one_of(st.binary(max_size=200), messages(kind).map(lambda made: made.SerializeToString())))
        @_LIMITS
        def throw(raw: bytes) -> None:
            if described.client_streaming:
                clear(lambda: channel.stream_stream(path)(iter([raw, raw]), timeout=5))
            elif described.server_streaming:
                clear(lambda: channel.unary_stream(path)(raw, timeout=2))
            else:
                clear(lambda: channel.unary_unary(path)(raw, timeout=5))

        throw()


@given(raw=st.binary(max_size=200))
def test_a2_a_notice_is_read_whole_or_refused(raw: bytes) -> None:
    """A2."""
    try:
        read = notice.decode(raw)
    except ServeError:
        return
    assert notice.encode(read) == raw


@given(made=messages(handoff_pb2.RankManifest))
def test_a2_a_manifest_is_read_whole_or_refused(made: handoff_pb2.RankManifest) -> None:
    """A2."""
    try:
        read = wire.manifest_from_pb(made, row_bytes=1)
    except ServeError:
        return
    assert len(read.parts) == len(made.parts)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"logprobs": (1 << 32) - 1}, "logprobs is 4294967295; at most 20"),
        ({"temperature": 1e300}, "temperature is 1e+300"),
        ({"stop_token_ids": [1] * 600}, "600 entries; at most 512"),
        ({"max_tokens": (1 << 32) - 1}, "4294967295 to generate"),
    ],
)
@pytest.mark.sabotage("nodes_trust_their_callers")
def test_a2_counts_of_a_direct_caller_are_bounded_by_the_nodes_themselves(
    fleet: Fleet, sampling: dict[str, Any], words: str
) -> None:
    """A2. Value and limit are named, and nothing is held."""
    wanted = common_pb2.Sampling(**{"max_tokens": 4, **sampling})
    with drive(fleet, prompt(920, 100)) as one:
        code, text = refusal(lambda: one.reserve(sampling=wanted))
        assert (code, words in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), text
        if "max_tokens" not in sampling:  # which prefill does not use: it is decode's room
            code, text = refusal(lambda: one.start_prefill(handoff_pb2.Ticket(), sampling=wanted))
            assert (code, words in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), text
    fleet.assert_settled()


@pytest.mark.sabotage("nodes_trust_their_callers")
def test_a2_a_request_id_that_nodes_would_have_to_remember_is_bounded(fleet: Fleet) -> None:
    """A2. By Reserve, Prefill and Abort, of both kinds of node."""
    with drive(fleet, prompt(921, 100)) as one:
        one.ref = common_pb2.RequestRef(request_id="x" * 1000, attempt=1)
        calls = (
            one.reserve,
            lambda: one.start_prefill(handoff_pb2.Ticket()),
            lambda: one.abort(one.decode),
            lambda: one.abort(one.prefill),
        )
        for call in calls:
            code, text = refusal(call)
            assert (code, "1000 bytes" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), text


def _digest_of(ticket: handoff_pb2.Ticket) -> bytes:
    pages = [run.first_page + i for run in ticket.pages for i in range(run.num_pages)]
    return destination_digest(
        ring_size=ticket.ring_size, prompt_tokens=ticket.prompt_tokens, resident_tokens=ticket.resident_tokens,
        fence_slot=ticket.fence_slot, pages=pages,
    )  # fmt: skip


@pytest.mark.sabotage("tokens_unchecked")
def test_a_ticket_is_good_for_its_request_epoch_and_writer_only_and_once(fleet: Fleet) -> None:
    with drive(fleet, prompt(910, 100)) as one:
        ticket = one.reserve()
        name = agent_name(incarnation_from_pb(ticket.writer), 0)
        address = handoff_pb2.TransportAddress(transport="nixl", agent_name=name)
        hello = handoff_pb2.AttachHello(
            epoch=ticket.epoch, request=ticket.request, writer=ticket.writer, rank=0,
            one_time_token=ticket.one_time_token, layout_fingerprint=ticket.layout_fingerprint, address=address,
            destination_digest=_digest_of(ticket),
        )  # fmt: skip

        def attach(**changed: Any) -> tuple[grpc.StatusCode, str]:
            said = handoff_pb2.AttachHello()
            said.CopyFrom(hello)
            for name, value in changed.items():
                if isinstance(value, bytes):
                    setattr(said, name, value)
                else:
                    getattr(said, name).CopyFrom(value)
            return refusal(lambda: one.decode.Attach(iter([handoff_pb2.WriterEvent(hello=said)]), timeout=5))

        wrong: dict[str, Any] = {
            "one_time_token": secrets.token_bytes(16),
            "destination_digest": secrets.token_bytes(16),
            "request": common_pb2.RequestRef(request_id=ticket.request.request_id, attempt=2),
            "epoch": common_pb2.Epoch(decode=ticket.epoch.decode, counter=ticket.epoch.counter + 1),
        }
        for name, value in wrong.items():
            code, text = attach(**{name: value})
            assert code is grpc.StatusCode.FAILED_PRECONDITION, f"{name}: {text}"
        other = handoff_pb2.TransportAddress(transport="nixl", agent_name=agent_name(incarnation_from_pb(ME), 0))
        code, text = attach(writer=ME, address=other)
        assert code is grpc.StatusCode.FAILED_PRECONDITION, f"writer: {text}"
        one.abort(one.decode)
        assert attach()[0] is grpc.StatusCode.FAILED_PRECONDITION
    fleet.assert_settled()


def test_nothing_that_runs_code_is_read_from_the_wire() -> None:
    """No pickle and nothing like it, in any file of the product."""
    forbidden = {
        "pickle",
        "cPickle",
        "dill",
        "marshal",
        "shelve",
        "cloudpickle",
        "broadcast_object_list",
        "get_serialized_descs",
    }
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                {alias.name.split(".")[0] for alias in node.names}
                if isinstance(node, ast.Import | ast.ImportFrom)
                else set()
            )
            if isinstance(node, ast.ImportFrom):
                names.add((node.module or "").split(".")[0])
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            if names & forbidden:
                found.append(f"{path.name}: {names & forbidden}")
    assert found == []
