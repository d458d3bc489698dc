"""The router process: puts the parts together, serves until it is asked to stop, and drains."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import uvloop
from grpc import aio

from kvrelay.core import freed_memory, otel, pace, telemetry
from kvrelay.core.address import advertised
from kvrelay.core.health import ProgressWatch
from kvrelay.core.lifecycle import StopSignals, announce_ready, die, end_process, new_incarnation, set_up_logging
from kvrelay.core.settings import load
from kvrelay.core.supervise import keep, watch_loop, watch_threads
from kvrelay.index.lookup import PrefixIndex
from kvrelay.index.mirror import IndexMirror
from kvrelay.index.reader import PrefixReader
from kvrelay.index.registry import NodeRegistry
from kvrelay.index.router_loads import RouterLoads
from kvrelay.proto import convert, server
from kvrelay.proto.server import Security
from kvrelay.proto.tls import Tls
from kvrelay.proto.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc
from kvrelay.router.attempt import Background, Shared
from kvrelay.router.fleet import FleetView
from kvrelay.router.fleet_servicer import FleetServicer
from kvrelay.router.index_metrics import MirrorMetrics
from kvrelay.router.leases import LeaseKeeper
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.model_files import read_model_files
from kvrelay.router.orchestrate import Orchestrator
from kvrelay.router.placer import IndexPlacer
from kvrelay.router.replicas import Replicas
from kvrelay.router.servicer import InferenceServicer
from kvrelay.router.settings import RouterSettings
from kvrelay.router.tenants import ClientCheck, Tokens

log = logging.getLogger(__name__)


class Router:
    """All parts of a router, in one process. Created by `start`."""

    def __init__(self, settings: RouterSettings) -> None:
        """
        Raises:
            ModelLoadError, SettingsError: the model folder or a setting is wrong.
        """
        files = read_model_files(Path(settings.model), name=settings.served_name)
        self._tls = Tls.load(ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key)
        self._tokens = Tokens.load(settings.token_file)
        self.id = new_incarnation(settings.name, "router")
        self._settings = settings
        self._registry = NodeRegistry(settings.index_url, settings.fleet)
        self.index = PrefixIndex(
            IndexMirror(settings.index_url, settings.fleet, max_blocks=settings.mirror_blocks),
            PrefixReader(settings.index_url, settings.fleet),
        )
        self._background = Background()
        self.fleet = FleetView(
            self._registry,
            refresh_s=settings.registry_refresh_s,
            put_aside_s=settings.put_aside_s,
            max_message_bytes=settings.max_message_bytes,
            max_request_s=settings.max_request_s,
            tls=self._tls,
            on_change=self._report,
        )
        self._leases = LeaseKeeper(
            self.id, lease_s=settings.lease_s, max_message_bytes=settings.max_message_bytes, tls=self._tls
        )
        self._progress = ProgressWatch({"lease": self._leases.stuck_s}, limit_s=settings.stuck_after_s)
        self._watch: asyncio.Task[None] | None = None
        self._placer = placer = IndexPlacer(
            self.fleet,
            self.index,
            long_prompt_tokens=settings.long_prompt_tokens,
            max_waiting=settings.max_waiting,
            ahead_per_node=settings.ahead_per_node if self._tokens and self._tokens.num_tenants > 1 else None,
            others=lambda: self.replicas.others(),  # noqa: PLW0108 - made below
            on_placed=lambda: self.replicas.hurry(),  # noqa: PLW0108
        )
        self.replicas = Replicas(RouterLoads(settings.index_url, settings.fleet, self.id), own=placer.own_loads)
        shared = Shared(self.id, self.fleet, self._leases, self._background)
        orchestrator = Orchestrator(shared, placer, settings.max_retries)
        self.metrics = RouterMetrics()
        self.inference = InferenceServicer(settings, files, self.fleet, placer, orchestrator, self.metrics)
        self.metrics.watch(records=self.fleet.records, num_active=lambda: self.inference.num_active)
        self.metrics.registry.register(MirrorMetrics(self.index.mirror))
        self._metrics_endpoint: telemetry.MetricsEndpoint | None = None
        self._server: server.Server | None = None
        self._health: asyncio.Task[None] | None = None  # held so that it is not collected while it runs
        self._leaving = False
        self._missing: str | None = "nothing is known of the fleet yet"

    async def start(self) -> str:
        """Begin to serve and return the bound address; health says SERVING once a request would succeed."""
        self._server = await server.serve(
            listen=self._settings.listen,
            add_services=self._add_services,
            services=(
                inference_pb2.DESCRIPTOR.services_by_name["Inference"],
                fleet_pb2.DESCRIPTOR.services_by_name["Fleet"],
            ),
            max_message_bytes=self._settings.max_message_bytes,
            **self._security(),
        )
        self._metrics_endpoint = telemetry.serve(self._settings.metrics_listen, self.metrics.registry)
        self._leases.start()
        await self.index.start()
        await self.replicas.start()
        await self.fleet.start()
        self._watch = keep(self._progress.run(self._on_progress_change), name="progress watch")
        return advertised(
            bound=self._server.endpoint, advertise=self._settings.advertise, index_url=self._settings.index_url
        )

    async def drained(self) -> None:
        """Say that this router leaves, then refuse what still comes, and let what runs end within the drain time."""
        assert self._server is not None, "not started"
        self._leaving = True
        await self._server.set_serving(False)
        await asyncio.sleep(self._settings.lame_duck_s)  # until clients that watch the health have moved on
        self.inference.close()
        await self.inference.quiet(drain_s=self._settings.drain_s)
        await self._background.wait()

    async def stop(self) -> None:
        """End the server, with what still runs, and let go of everything."""
        assert self._server is not None, "not started"
        await self._server.stop(0)
        await self.release()

    async def release(self) -> None:
        """Let go of everything but the server."""
        await self._background.wait()
        if self._watch is not None:
            self._watch.cancel()
        await self.fleet.stop()
        await asyncio.to_thread(self._leases.stop)
        if self._metrics_endpoint is not None:
            await asyncio.to_thread(self._metrics_endpoint.stop)
        await self._registry.close()
        await self.index.stop()
        await self.replicas.stop()

    def _security(self) -> Security:
        """Return who may call and how; without TLS, anybody in plain text."""
        if self._tls is None:
            return {}
        return server.tls_security(
            self._tls,
            ClientCheck(self._tokens),
            on_refused=self.metrics.refused,
            require_client_cert=self._settings.require_client_cert,
        )

    def _add_services(self, grpc_server: aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(self.inference, grpc_server)
        fleet_pb2_grpc.add_FleetServicer_to_server(
            FleetServicer(self.fleet, self._placer.decisions, self._placer.preview, self._traffic), grpc_server
        )

    def _traffic(self) -> fleet_pb2.TrafficReply:
        reply = self.metrics.traffic()
        reply.router.CopyFrom(convert.incarnation_to_pb(self.id))
        reply.active_requests = self.inference.num_active
        return reply

    async def _on_progress_change(self) -> None:
        self._report()

    def _report(self) -> None:
        stuck = "a thread of this router makes no progress" if self._progress.stuck else None
        self._placer.prepare()  # so that no request waits for it
        missing = stuck or self.fleet.service().missing
        if missing == self._missing or self._leaving:
            return
        self._missing = missing
        log.info("serving" if missing is None else f"not serving: {missing}")
        assert self._server is not None, "the fleet is read after the server is there"
        self._health = keep(self._server.set_serving(missing is None), name="health")


async def serve(settings: RouterSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    watch_loop(asyncio.get_running_loop(), die)
    stop = StopSignals(asyncio.get_running_loop())
    router = Router(settings)
    otel.export(settings.trace_exporter, service=router.id.name)
    endpoint = await router.start()
    pace.settle()
    announce_ready(endpoint=endpoint, name=router.id.name)
    await stop.wait()
    log.info("stopping, %d requests to finish", router.inference.num_active)
    await router.drained()
    await router.release()
    # A gRPC server that shuts down answers a call that comes just then with CANCELLED, which no client repeats. When a
    # process just ends, its connections close: the client sees UNAVAILABLE, and its retry policy sends it elsewhere.
    end_process(0)


def main(argv: Sequence[str]) -> int:
    """Run a router with the options of its command line."""
    freed_memory.keep()
    settings = load(RouterSettings, list(argv), prog="kvrelay router")
    set_up_logging(settings.log_level, settings.log_format)
    watch_threads(die)
    uvloop.run(serve(settings))
    return 0
