"""A node of one rank goes on in its other role under load: same process, same pool, same weights, nothing lost."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from cluster.cluster import status_of, vocab_size, wait_until
from kvrelay.cli.main import main
from kvrelay.core import prefix_hash
from kvrelay.proto.convert import pack_ids
from kvrelay.proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, fleet_pb2, handoff_pb2
from operations.deployment import MODEL
from operations.load import Load
from operations.processes import Processes, processes
from oracle_data import oracle_folder, recording

pytestmark = pytest.mark.timeout(240)
NODE = ("--pool-pages", "256", "--max-model-len", "2048", "--dtype", "float32")
SWITCHES_S, SERVES_S = 30.0, 40.0
ROLE_OF = {"prefill": fleet_pb2.NODE_ROLE_PREFILL, "decode": fleet_pb2.NODE_ROLE_DECODE}
NODE_THAT_SWITCHES = "decode-0"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    options = {"prefill": (*NODE, "--chunk-tokens", "256"), "decode": NODE}
    with processes(oracle_folder(MODEL), tmp_path_factory.mktemp("logs"), options) as started:
        started.scale("decode", 2)
        yield started


def record_of(deployment: Processes, name: str, role: str) -> fleet_pb2.NodeRecord:
    """Wait until a node serves in a role; return its record."""
    found: list[fleet_pb2.NodeRecord] = []

    def serves() -> bool:
        found[:] = [one for one in deployment.client.nodes() if one.node.name == name and one.role == ROLE_OF[role]]
        return bool(found) and not found[0].draining

    wait_until(serves, SWITCHES_S, deployment.logs)
    return found[0]


def switch(deployment: Processes, name: str, role: str) -> fleet_pb2.NodeRecord:
    """Give a node another role by the command for operators; return its record when it has taken it."""
    router = deployment.address(deployment.members("router")[0])
    assert main(["role", name, role, "--endpoint", router]) == 0
    return record_of(deployment, name, role)


def address_of(deployment: Processes, record: fleet_pb2.NodeRecord) -> handoff_pb2.TransportAddress:
    """Return where a decode node lets its pages be written; the reservation made for it is given up."""
    request = common_pb2.RequestRef(request_id="who-are-you", attempt=record.total_pages)
    writer = next(one.node for one in deployment.client.nodes() if one.role == ROLE_OF["prefill"])
    with grpc.insecure_channel(record.endpoint) as channel:
        stub = decode_pb2_grpc.DecodeNodeStub(channel)
        reply = stub.Reserve(
            decode_pb2.ReserveRequest(
                request=request, holder=common_pb2.Incarnation(name="test", start_id=1), node=record.node,
                writer=writer, ring_size=1, packed_ids=pack_ids([1, 2, 3]),
                sampling=common_pb2.Sampling(max_tokens=2), layout_fingerprint=record.layout_fingerprint,
                prefix_seed=prefix_hash.seed(fingerprint=record.layout_fingerprint), timeout_ms=5000,
            )
        )  # fmt: skip
        stub.Abort(common_pb2.AbortRequest(request=request, reason="only asked for the address"))
    return reply.ticket.address


def test_a_decode_node_prefills_and_decodes_again_in_one_process(deployment: Processes) -> None:
    pid = deployment.process(NODE_THAT_SWITCHES).pid
    before = record_of(deployment, NODE_THAT_SWITCHES, "decode")
    address, told = address_of(deployment, before), recording(MODEL, 333)
    with Load(deployment.client, clients=6, vocab_size=vocab_size(oracle_folder(MODEL))) as load:
        wait_until(lambda: load.decode_nodes[NODE_THAT_SWITCHES] > 0, SERVES_S, deployment.logs)

        as_prefill = switch(deployment, NODE_THAT_SWITCHES, "prefill")
        wait_until(lambda: load.prefill_nodes[NODE_THAT_SWITCHES] > 2, SERVES_S, lambda: str(load.failures))
        assert deployment.client.generate(told.prompt, max_tokens=24).token_ids == told.greedy

        as_decode = switch(deployment, NODE_THAT_SWITCHES, "decode")
        deployment.scale("decode", 1)  # or placement might go on with the other, of the two the faster by a hair
        decoded = load.decode_nodes[NODE_THAT_SWITCHES]
        wait_until(lambda: load.decode_nodes[NODE_THAT_SWITCHES] > decoded + 2, SERVES_S, lambda: str(load.failures))
        assert deployment.client.generate(told.prompt, max_tokens=24).token_ids == told.greedy

    assert not load.failures, load.failures[:5]
    assert before.node == as_prefill.node == as_decode.node  # name and life
    assert before.total_pages == as_prefill.total_pages == as_decode.total_pages
    deployment.client.assert_settled()
    assert address_of(deployment, as_decode) == address  # pool, fence cells and what the agent has registered
    deployment.client.assert_settled()
    assert deployment.process(NODE_THAT_SWITCHES).pid == pid
    assert deployment.process(NODE_THAT_SWITCHES).is_running()


def test_a_node_that_has_the_role_already_says_so(deployment: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    router = deployment.address(deployment.members("router")[0])

    assert main(["role", "decode-0", "decode", "--endpoint", router]) == 1
    assert "decode-0 is a decode node already" in capsys.readouterr().err


def test_an_unknown_name_is_refused_and_nobody_drains(deployment: Processes) -> None:
    request = fleet_pb2.DrainNodeRequest(name="no-such-node", next_role=ROLE_OF["prefill"])
    with pytest.raises(grpc.RpcError) as failed:
        deployment.client.fleet.DrainNode(request)
    assert status_of(failed.value)[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert not any(record.draining for record in deployment.client.nodes())
