"""`kvrelay up`: a whole cluster on this machine, as processes of its own."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from pathlib import Path

from kvrelay.cli import fit, role_settings
from kvrelay.cli.children import Command
from kvrelay.cli.index_keeper import IndexKeeper
from kvrelay.cli.readiness import wait_until_serving
from kvrelay.cli.supervisor import Supervisor
from kvrelay.core.address import is_address
from kvrelay.core.clock import monotonic
from kvrelay.core.errors import SettingsError
from kvrelay.core.lifecycle import StopSignals
from kvrelay.model.embedded_path import embedded_checkpoint

STOP_ORDER = ("router", "prefill", "decode")  # nobody loses a peer that it still needs


@dataclass(frozen=True, slots=True)
class UpPlan:
    """What to start, from the options alone."""

    model: str
    ring_sizes: tuple[int, ...]  # one prefill node each
    num_decode: int
    listen: str
    index: str  # "embedded" or a redis:// address
    dtype: str
    node_options: tuple[str, ...]  # of prefill and decode nodes
    prefill_options: tuple[str, ...]

    @property
    def num_computing(self) -> int:
        """Processes that hold the weights and compute."""
        return sum(self.ring_sizes) + self.num_decode

    def threads(self, num_cores: int) -> int:
        """Intra-op threads per computing process, so that together they fit the cores."""
        return max(1, num_cores // self.num_computing)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; return 0 after a drain, 1 when the cluster cannot go on."""
    plan = plan_of(options)
    role_settings.check(commands_of(plan, index_url=plan.index, num_cores=1, run_folder=Path()))
    _refuse_taken_address(plan.listen)
    num_gpus = fit.check(plan.model, dtype=plan.dtype, num_processes=plan.num_computing)
    return asyncio.run(_serve(plan, Path(tempfile.mkdtemp(prefix="kvrelay-")), num_gpus))


def plan_of(options: argparse.Namespace) -> UpPlan:
    """Return what the options ask for.

    Raises:
        SettingsError: --index is neither `embedded` nor a Redis address, --listen is no host:port, or there are more
            ring sizes than prefill nodes.
    """
    if options.index != "embedded" and not options.index.startswith(("redis://", "rediss://", "unix://")):
        raise SettingsError(f"--index {options.index!r} is neither 'embedded' nor a redis:// address")
    if not is_address(options.listen):
        raise SettingsError(f"--listen {options.listen!r} is not host:port")
    num_prefill = options.prefill or len(options.ring_size)
    if num_prefill < len(options.ring_size):
        sizes = ",".join(map(str, options.ring_size))
        raise SettingsError(
            f"--ring-size {sizes!r} names {len(options.ring_size)} rings, --prefill {num_prefill} nodes"
        )
    node_options = ["--max-model-len", str(options.max_model_len)] if options.max_model_len else []
    if options.latent_format:
        node_options += ["--latent-format", options.latent_format]
    return UpPlan(
        model=str(Path(options.model).resolve() if options.model else embedded_checkpoint()),
        ring_sizes=tuple(islice(cycle(options.ring_size), num_prefill)),
        num_decode=options.decode,
        listen=options.listen,
        index=options.index,
        dtype=options.dtype,
        node_options=tuple(node_options),
        prefill_options=("--chunk-tokens", str(options.chunk_tokens)) if options.chunk_tokens else (),
    )


def commands_of(plan: UpPlan, *, index_url: str, num_cores: int, run_folder: Path, num_gpus: int = 0) -> list[Command]:
    """Return the processes to start. Node names are unique per machine when the index is shared with others.

    Nodes of one process take the GPUs in turn; a ring of several takes the first ones, one per rank.
    """
    suffix = "" if plan.index == "embedded" else f"-{socket.gethostname()}-{os.getpid()}"
    # The only router of such a cluster leaves first, and knows of a drain before the node does: no time to tell others.
    alone = ["--lame-duck-s", "0"] if plan.index == "embedded" else []
    node = ["--model", plan.model, "--dtype", plan.dtype, "--threads", str(plan.threads(num_cores)), *plan.node_options]

    def command(role: str, number: int | None, options: list[str], gpu: int | None = None) -> Command:
        name = role + ("" if number is None else f"-{number}") + suffix
        defaults = {}
        if gpu is not None and num_gpus > 1:
            defaults[f"KVRELAY_{role.upper()}_DEVICE"] = f"cuda:{gpu % num_gpus}"
        options = ["--name", name, "--index-url", index_url, *alone, *options]
        return Command(name, role, options, run_folder / f"{name}.log", defaults)

    ends = list(accumulate(plan.ring_sizes))
    prefill = [
        command(
            "prefill", number, ["--ring-size", str(size), *node, *plan.prefill_options], end - 1 if size == 1 else None
        )
        for number, (size, end) in enumerate(zip(plan.ring_sizes, ends, strict=True))
    ]
    decode = [command("decode", number, node, ends[-1] + number) for number in range(plan.num_decode)]
    return [command("router", None, ["--listen", plan.listen, "--model", plan.model]), *prefill, *decode]


async def _serve(plan: UpPlan, run_folder: Path, num_gpus: int) -> int:
    say, stop = _speaker(), StopSignals(asyncio.get_running_loop())
    num_cores = len(os.sched_getaffinity(0))
    say(
        f"1 router, prefill rings of {', '.join(map(str, plan.ring_sizes))}, {plan.num_decode} decode; "
        f"{plan.threads(num_cores)} intra-op threads each on {num_cores} cores; logs in {run_folder}"
    )
    index = IndexKeeper(plan.index, say)
    supervisor = Supervisor(say)
    try:
        await index.start()
        commands = commands_of(plan, index_url=index.url, num_cores=num_cores, run_folder=run_folder, num_gpus=num_gpus)
        work = asyncio.create_task(_run(supervisor, commands, say))
        asked = asyncio.create_task(stop.wait())
        await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            return await work  # raises what went wrong
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        say("draining; a second signal stops at once")
        await supervisor.stop(STOP_ORDER)
        say("stopped")
        return 0
    finally:
        await supervisor.kill_all()
        await index.stop()


async def _run(supervisor: Supervisor, commands: list[Command], say: Callable[[str], None]) -> int:
    endpoints = await supervisor.start(commands, on_ready=lambda name, where: say(f"{name} ready at {where}"))
    for command in commands:
        if command.role == "router":  # a restarted router must be where clients look for it
            command.options += ["--listen", endpoints[command.name]]
            endpoint = endpoints[command.name]
    nodes = {command.name for command in commands if command.role != "router"}
    await wait_until_serving(endpoint, nodes)
    print(f"ready {endpoint}", flush=True)
    say(f"{await supervisor.failed}; stopping")
    return 1


def _refuse_taken_address(listen: str) -> None:
    host, _, port = listen.rpartition(":")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does; a listener still refuses us
            probe.bind(address)
    except OSError as err:
        raise SettingsError(f"cannot listen on {listen}: {err.strerror or err}") from err


def _speaker() -> Callable[[str], None]:
    began_s = monotonic()

    def say(text: str) -> None:
        print(f"[{monotonic() - began_s:6.1f} s] {text}", file=sys.stderr, flush=True)

    return say
