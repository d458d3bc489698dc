"""`kvrelay bench load`: requests against a real router at times that do not depend on its answers.

Arrivals are random with --rate per second, or those of a trace. The prompts of a trace are made up, but blocks that are
equal in the trace are equal in the prompts, so prefixes are shared as they were. Lengths are scaled to what the model
takes. Without --endpoint a cluster of this machine is started for it. A request is in time when its first token came
within --ttft-s and at most 1% of its gaps (or one) were longer than --tbt-s; refused requests are not in time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from kvrelay.bench import local_cluster, open_loop, report
from kvrelay.bench.live import Client, Outcome
from kvrelay.bench.placement import quantile
from kvrelay.bench.prompts import Prompt, from_trace, made_up
from kvrelay.bench.trace import read
from kvrelay.core.errors import SettingsError
from kvrelay.core.text_file import read_text
from kvrelay.proto.tls import Tls
from kvrelay.router.admission import TARGETS, Slo

_MAX_SLOW_GAPS = 0.01


def run(options: argparse.Namespace) -> int:
    """Send the load, print a JSON object, write the result file when asked to."""
    with ExitStack() as stack:
        endpoint = options.endpoint
        if not endpoint:
            up = ["--prefill", str(options.prefill), "--decode", str(options.decode), "--ring-size", "1"]
            up += ["--model", options.model] if options.model else []
            endpoint = stack.enter_context(local_cluster.running(up)).endpoint
        tls = Tls.load(ca=options.tls_ca, cert=options.tls_cert, key=options.tls_key)
        token = read_text(options.token_file, SettingsError).strip() if options.token_file else ""
        outcomes, took_s, prompts = uvloop.run(_send(options, endpoint, tls=tls, token=token))
    targets = TARGETS[Slo(options.slo)]
    ttft_s, tbt_s = options.ttft_s or targets.wait_s, options.tbt_s or targets.between_tokens_s
    result = {
        "trace": Path(options.trace).name if options.trace else None,
        "slo": options.slo,
        "ttft_target_s": ttft_s,
        "tbt_target_s": tbt_s,
        "offered_per_s": round(len(prompts) / max(prompts[-1].at_s, 1e-9), 3),
        **summary(outcomes, took_s=took_s, ttft_s=ttft_s, tbt_s=tbt_s),
    }
    if options.out:
        print(report.write(Path(options.out), device="cpu", bench="load", result=result))
    print(json.dumps(result))
    return 0


async def _send(
    options: argparse.Namespace, endpoint: str, *, tls: Tls | None, token: str
) -> tuple[list[Outcome], float, Sequence[Prompt]]:
    async with Client.connected(endpoint, tls=tls, token=token) as client:
        limits = await client.limits()
        prompts = _prompts(options, vocab_size=limits.vocab_size, longest=limits.max_model_len)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        outcomes = await open_loop.run(
            [one.at_s for one in prompts],
            lambda number, due_s: client.generate(
                prompts[number], due_s=due_s, slo=Slo(options.slo), timeout_s=options.timeout_s
            ),
        )
        return outcomes, loop.time() - began_s, prompts


def _prompts(options: argparse.Namespace, *, vocab_size: int, longest: int) -> Sequence[Prompt]:
    if not options.trace:
        return made_up(
            open_loop.poisson(options.rate or 1.0, options.requests / (options.rate or 1.0), seed=options.seed),
            prompt_tokens=options.prompt_tokens,
            shared_tokens=options.shared_tokens,
            output_tokens=options.output_tokens,
            vocab_size=vocab_size,
            seed=options.seed,
        )
    trace = read(Path(options.trace), seed=options.seed)
    first_s = trace.arrivals[0].at_s
    trace = replace(
        trace, arrivals=tuple(replace(one, at_s=one.at_s - first_s) for one in trace.arrivals[: options.requests])
    )
    if options.rate:
        factor = len(trace.arrivals) / options.rate / max(trace.arrivals[-1].at_s, 1e-9)
        trace = replace(trace, arrivals=tuple(replace(one, at_s=one.at_s * factor) for one in trace.arrivals))
    return from_trace(
        trace, vocab_size=vocab_size, longest=longest, most_output_tokens=options.output_tokens, seed=options.seed
    )


def summary(outcomes: Sequence[Outcome], *, took_s: float, ttft_s: float, tbt_s: float) -> dict[str, Any]:
    """Return the figures of one run."""
    finished = [one for one in outcomes if one.status == "OK"]
    ttfts_s = [one.ttft_s for one in finished]
    gaps_s = [gap for one in finished for gap in one.gaps_s]
    in_time = sum(is_in_time(one, ttft_s=ttft_s, tbt_s=tbt_s) for one in finished)
    prompt_tokens = sum(one.prompt_tokens for one in finished)
    return {
        "requests": len(outcomes),
        "took_s": round(took_s, 3),
        "ended": dict(Counter(one.status for one in outcomes)),
        "refusals_with_hint": sum(one.retry_after_s is not None for one in outcomes),
        "in_time": round(in_time / len(outcomes), 4),
        "goodput_per_s": round(in_time / took_s, 3),
        "output_tokens_per_s": round(sum(len(one.gaps_s) + 1 for one in finished) / took_s, 2),
        **{f"ttft_p{share}_s": round(quantile(ttfts_s, share / 100), 4) for share in (50, 90, 99)},
        **{f"tbt_p{share}_s": round(quantile(gaps_s, share / 100), 5) for share in (50, 99)},
        "cached_share": round(sum(one.cached_tokens for one in finished) / max(1, prompt_tokens), 4),
        "index": dict(Counter(one.confidence for one in finished)),
    }


def is_in_time(one: Outcome, *, ttft_s: float, tbt_s: float) -> bool:
    slow = sum(gap > tbt_s for gap in one.gaps_s)
    return one.ttft_s <= ttft_s and slow <= max(1.0, _MAX_SLOW_GAPS * len(one.gaps_s))
