"""How a further rank of a ring has blocks fetched: with a server of its own, which the nodes that write here call."""

from __future__ import annotations

from kvrelay.core.address import advertised
from kvrelay.kv_transfer import hub_servicer
from kvrelay.prefill_node.pulls import Pulls
from kvrelay.prefill_node.settings import PrefillSettings
from kvrelay.proto.server import Server, node_security, serve
from kvrelay.proto.tls import Tls
from kvrelay.proto.v1 import decode_pb2

_STOP_GRACE_S = 1.0


class FollowerPulls:
    """A rank's `Pulls` and its server. Created by `start`."""

    def __init__(self, pulls: Pulls, server: Server) -> None:
        self._pulls = pulls
        self._server = server

    @classmethod
    async def start(cls, settings: PrefillSettings, pulls: Pulls) -> FollowerPulls:
        """Listen where the node does, on any free port.

        Raises:
            SettingsError: it cannot listen there.
        """
        tls = Tls.load(ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key)
        server = await serve(
            listen=f"{settings.listen.rpartition(':')[0]}:0",
            add_services=lambda grpc_server: hub_servicer.add_to_server(pulls.hub, grpc_server),
            services=[decode_pb2.DESCRIPTOR.services_by_name["DecodeNode"]],
            max_message_bytes=settings.max_message_bytes,
            **node_security(tls, lambda reason: pulls.counters.add(f"calls_refused_{reason}_total")),
        )
        host, port = settings.advertise.rpartition(":")[0], server.endpoint.rpartition(":")[2]
        told = f"{host}:{port}" if host else ""
        pulls.start(advertised(bound=server.endpoint, advertise=told, index_url=settings.index_url))
        await server.set_serving(True)
        return cls(pulls, server)

    async def stop(self) -> None:
        self._pulls.stop()
        await self._server.stop(_STOP_GRACE_S)
