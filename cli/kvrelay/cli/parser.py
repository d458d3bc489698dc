"""The command line as data: every command and option, and nothing that runs them.

A test compares this with a golden file, so that the command line changes on purpose only. The options of the role
commands (router, prefill, decode) are the fields of their settings classes.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from typing import Any

from kvrelay.cli.bench_device_options import add_device_benches
from kvrelay.cli.bench_options import add_simulations
from kvrelay.cli.defaults import ENDPOINT
from kvrelay.cli.eval_options import add_eval
from kvrelay.cli.identity_options import add_identity
from kvrelay.cli.option_types import endpoint, positive, positive_seconds, positives, start_id
from kvrelay.cli.scale_options import add_scale_advice

# Role commands: what serves them. They parse their own options, which are also environment variables.
ROLES = {
    "router": "kvrelay.router.app:main",
    "prefill": "kvrelay.cli.node_process:prefill",
    "decode": "kvrelay.cli.node_process:decode",
}
_ROLE_HELP = {
    "router": "one router: what clients talk to",
    "prefill": "one prefill node: a ring of ranks",
    "decode": "one decode node",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; each command sets `run` to the "module:function" that takes the parsed options."""
    parser = _Parser(prog="kvrelay", description="Serve MLA language models with prefill and decode on separate pools.")
    parser.add_argument("--version", action="version", version=f"kvrelay {version('kvrelay')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(commands.add_parser("up", help="a whole cluster on this machine"))
    for role, text in _ROLE_HELP.items():
        commands.add_parser(role, help=text, add_help=False)
    _add_generate(commands.add_parser("generate", help="send one prompt and stream the answer"))
    _add_nodes(commands.add_parser("nodes", help="what runs where"))
    _add_top(commands.add_parser("top", help="live view of a router and its nodes"))
    _add_drain(commands.add_parser("drain", help="take a node out without losing a request"))
    _add_role(commands.add_parser("role", help="let a node of one rank go on in the other role"))
    _add_fence(commands.add_parser("fence", help="say that a node is dead, so that pages kept from it come back"))
    _add_explain(commands.add_parser("explain", help="why a request went where it went"))
    _add_health(commands.add_parser("health", help="whether a server is ready; for probes"))
    add_scale_advice(commands.add_parser("scale-advice", help="how many nodes of each role the load needs"))
    _add_certs(commands.add_parser("certs", help="a CA and certificates of your own, for trying out TLS"))
    _add_bench(commands.add_parser("bench", help="measure, side by side"))
    add_eval(commands.add_parser("eval", help="how well the model predicts text and recalls facts"))
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or action.default == ""
        return action.help if silent else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """The form of every command; sub-commands take the class of their parent."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Formatter, **kwargs})


def _add_up(up: argparse.ArgumentParser) -> None:
    up.add_argument("--model", metavar="DIR", help="checkpoint folder; without it a small embedded model")
    up.add_argument("--prefill", type=positive, metavar="N", help="prefill nodes; default: one per ring size given")
    up.add_argument(
        "--ring-size", type=positives, default="2", metavar="R", help="ranks of a prefill node; 1,3 = sizes in turn"
    )
    up.add_argument("--decode", type=positive, default=1, metavar="M", help="decode nodes")
    up.add_argument("--listen", default=ENDPOINT, metavar="HOST:PORT", help="where clients connect; port 0 = any free")
    up.add_argument("--index", default="embedded", metavar="embedded|redis://...", help="server of the prefix index")
    up.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="auto = float32 on CPUs, the checkpoint's on GPUs",
    )
    up.add_argument(
        "--latent-format",
        choices=["model", "fp8"],
        help="numbers of latent rows: model = dtype (default), fp8 = e4m3 with scales",
    )
    up.add_argument("--chunk-tokens", type=positive, metavar="N", help="prompt tokens per prefill step")
    up.add_argument("--max-model-len", type=positive, metavar="N", help="longest prompt plus output")
    up.set_defaults(run="kvrelay.cli.up:run")


def _add_generate(generate: argparse.ArgumentParser) -> None:
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("text", nargs="?", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", metavar="F", help="file with the prompt; - = standard input")
    prompt.add_argument("--token-ids", metavar="F", help="file with a JSON list of token ids; - = standard input")
    generate.add_argument("--chat", action="store_true", help="the prompt is a user's message of a chat")
    generate.add_argument("--system", metavar="TEXT", help="system message before it; implies --chat")
    generate.add_argument("--endpoint", type=endpoint, default=ENDPOINT, metavar="HOST:PORT", help="the router")
    generate.add_argument("--max-tokens", type=int, default=128, metavar="N",
                          help="most tokens to generate; 0 = up to the context limit")  # fmt: skip
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 = always the likeliest token")
    generate.add_argument(
        "--top-p", type=float, metavar="P", help="keep the likeliest tokens of this total probability"
    )
    generate.add_argument("--seed", type=int, metavar="S", help="same seed, same text; without it one is drawn")
    generate.add_argument("--logprobs", type=int, metavar="N", help="log-probabilities, and the N likeliest (--json)")
    generate.add_argument("--prompt-logprobs", action="store_true", help="those of the prompt's tokens (--json)")
    generate.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end tokens")
    generate.add_argument("--timeout-s", type=positive_seconds, metavar="S", help="time limit of the request")
    generate.add_argument("--json", action="store_true", help="print one JSON object per event")
    add_identity(generate)
    generate.set_defaults(run="kvrelay.cli.generate:run")


def _add_nodes(nodes: argparse.ArgumentParser) -> None:
    nodes.add_argument("--endpoint", type=endpoint, default=ENDPOINT, metavar="HOST:PORT", help="the router")
    nodes.add_argument("--json", action="store_true", help="print one JSON object per node")
    add_identity(nodes)
    nodes.set_defaults(run="kvrelay.cli.fleet:run_nodes")


def _add_top(top: argparse.ArgumentParser) -> None:
    top.add_argument("--endpoint", type=endpoint, default=ENDPOINT, metavar="HOST:PORT", help="the router")
    top.add_argument("--interval-s", type=positive_seconds, default=1.0, metavar="S", help="time between two looks")
    top.add_argument("--frames", type=positive, metavar="N", help="end after so many tables; without it, when stopped")
    add_identity(top)
    top.set_defaults(run="kvrelay.cli.top:run")


def _add_drain(drain: argparse.ArgumentParser) -> None:
    drain.add_argument("node", metavar="NODE", help="name, as `kvrelay nodes` shows it")
    drain.add_argument("--endpoint", type=endpoint, default=ENDPOINT, metavar="HOST:PORT", help="the router")
    add_identity(drain)
    drain.set_defaults(run="kvrelay.cli.fleet:run_drain")


def _add_role(role: argparse.ArgumentParser) -> None:
    role.add_argument("node", metavar="NODE", help="name, as `kvrelay nodes` shows it")
    role.add_argument("role", choices=["prefill", "decode"], help="what it shall be")
    role.add_argument("--endpoint", type=endpoint, default=ENDPOINT, metavar="HOST:PORT", help="the router")
    add_identity(role)
    role.set_defaults(run="kvrelay.cli.fleet:run_role")


def _add_fence(fence: argparse.ArgumentParser) -> None:
    fence.add_argument("node", metavar="NODE", help="name of the dead node; make sure that its process is gone")
    fence.add_argument("--start-id", type=start_id, default=0, metavar="HEX", help="this life of it only")
    fence.add_argument("--endpoint", type=endpoint, default=ENDPOINT, metavar="HOST:PORT", help="the router")
    add_identity(fence)
    fence.set_defaults(run="kvrelay.cli.fleet:run_fence")


def _add_explain(explain: argparse.ArgumentParser) -> None:
    explain.add_argument("request", metavar="REQUEST", help="its id, as `kvrelay generate --json` shows it")
    explain.add_argument(
        "--endpoint", type=endpoint, default=ENDPOINT, metavar="HOST:PORT", help="the router that placed it"
    )
    explain.add_argument("--json", action="store_true", help="print one JSON object")
    add_identity(explain)
    explain.set_defaults(run="kvrelay.cli.explain:run")


def _add_health(health: argparse.ArgumentParser) -> None:
    health.add_argument(
        "endpoint", nargs="?", type=endpoint, default=ENDPOINT, metavar="HOST:PORT", help="a router or a node"
    )
    health.add_argument("--service", default="", metavar="NAME", help="one service of it; without, the whole server")
    health.add_argument(
        "--timeout-s", type=positive_seconds, default=3.0, metavar="S", help="longest wait for an answer"
    )
    add_identity(health)
    health.set_defaults(run="kvrelay.cli.health:run")


def _add_certs(certs: argparse.ArgumentParser) -> None:
    certs.add_argument("folder", metavar="DIR", help="folder for the files; made when it is not there")
    certs.add_argument("--days", type=positive, default=365, metavar="N", help="how long they are valid")
    certs.set_defaults(run="kvrelay.cli.certs:run")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, text in (
        ("handoff", "time to the first and second token, split cluster over one process"),
        ("stream", "time between tokens at the client over the model's step time"),
    ):
        kind = kinds.add_parser(name, help=text)
        kind.add_argument("--model", metavar="DIR", help="checkpoint folder; without it the embedded model")
        kind.add_argument("--prompt-tokens", type=positive, default=4000, metavar="N", help="length of each prompt")
        kind.add_argument("--pairs", type=positive, default=20, metavar="N", help="interleaved pairs")
        kind.add_argument("--out", metavar="DIR", help="folder for the result file; without it nothing is written")
        kind.set_defaults(run=f"kvrelay.bench.{name}:run")
    cpu = kinds.add_parser("cpu", help="prefill and decode on CPU cores, beside plain transformers")
    cpu.add_argument("--model", metavar="DIR", help="checkpoint folder; without it the embedded model")
    cpu.add_argument("--prompt-tokens", type=positive, default=8192, metavar="N", help="length of each prompt")
    cpu.add_argument("--output-tokens", type=positive, default=32, metavar="N", help="tokens after it")
    cpu.add_argument("--rounds", type=positive, default=5, metavar="N", help="pairs of runs")
    cpu.add_argument("--threads", type=positive, default=2, metavar="N", help="intra-op threads of both")
    cpu.add_argument("--out", metavar="DIR", help="folder for the result file; without it nothing is written")
    cpu.set_defaults(run="kvrelay.bench.cpu:run")
    add_device_benches(kinds)
    add_simulations(kinds)
