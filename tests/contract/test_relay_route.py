"""Over which transport a prefill node relays: logged, exported, in its record, and warned of when it is TCP."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from urllib.request import urlopen

from contract.prefill_process import Client, decode_peer, nodes_of, prefill_node
from contract.prefill_requests import MODEL, a_ref, events_of, some_prompt
from kvrelay.index.server import EmbeddedServer, _free_port
from kvrelay.proto.v1 import fleet_pb2
from oracle_data import FOLDER

NUM_TOKENS = 500


async def relayed(
    index: EmbeddedServer, folder: Path, *options: str, variables: dict[str, str]
) -> tuple[fleet_pb2.Link, str, str]:
    """Return the link that a node publishes after one hand-off, its log, and its metrics."""
    metrics = f"127.0.0.1:{_free_port()}"
    name, path = f"prefill-{len(variables)}-{len(options)}", folder / "log"
    options = ("--log-level", "info", "--heartbeat-s", "0.2", "--metrics-listen", metrics, *options)
    with path.open("w") as log:
        started = prefill_node(
            FOLDER / MODEL, *options, ring_size=1, index_url=index.url, name=name, variables=variables, log=log
        )
        with started as node:
            client = Client(node)
            async with decode_peer(FOLDER / MODEL) as peer:
                ref, prompt = a_ref(), some_prompt(NUM_TOKENS)
                ticket, _ = peer.reserve(ref, node, NUM_TOKENS)
                await events_of(client.prefill(ref, prompt, ticket=ticket))
                link = await _link_of(index, name)
                text = await asyncio.to_thread(lambda: urlopen(f"http://{metrics}/metrics").read().decode())
            await client.close()
    return link, path.read_text(), text


async def _link_of(index: EmbeddedServer, name: str) -> fleet_pb2.Link:
    async with asyncio.timeout(10):
        while True:
            record = next((one for one in nodes_of(index.url) if one.node.name == name), None)
            if record is not None and record.links:
                return record.links[0]
            await asyncio.sleep(0.1)


def exported(text: str) -> dict[str, float]:
    """Return whether each route in the metrics is expected."""
    found = re.findall(r'kvrelay_relay_route_expected\{.*route="([^"]+)".*\} (\S+)', text)
    return {route: float(value) for route, value in found}


async def test_tcp_on_one_host_is_warned_of_and_shown(index: EmbeddedServer, tmp_path: Path) -> None:
    link, log, text = await relayed(index, tmp_path, variables={"UCX_TLS": "tcp"})

    assert link.route.startswith("tcp/")
    assert link.is_unexpected
    warned = [line for line in log.splitlines() if " W " in line]
    assert any("even to itself" in line for line in warned), log
    assert any("expected is anything but TCP" in line and "decode-for-tests" in line for line in warned), log
    assert exported(text) == {link.route: 0.0}
    assert re.search(r'kvrelay_relay_routes_unexpected_total\{role="prefill"\} 1.0', text), text


async def test_tcp_that_is_expected_is_only_shown(index: EmbeddedServer, tmp_path: Path) -> None:
    link, log, text = await relayed(index, tmp_path, "--expected-transports", "tcp", variables={"UCX_TLS": "tcp"})

    assert link.route.startswith("tcp/")
    assert not link.is_unexpected
    assert " W " not in log
    assert exported(text) == {link.route: 1.0}


async def test_another_transport_than_the_expected_one_is_warned_of(index: EmbeddedServer, tmp_path: Path) -> None:
    link, log, text = await relayed(index, tmp_path, "--expected-transports", "rc,cuda_ipc", variables={})

    assert link.is_unexpected
    assert f"go over {link.route}; expected is rc, cuda_ipc" in log
    assert exported(text) == {link.route: 0.0}
