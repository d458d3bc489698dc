"""Where the device's time goes in one prefill and in decode steps: a table per kernel, written to a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from kvrelay.bench.step import Bench

_STEPS = 5
SORTED_BY = "self_cuda_time_total"


def write(bench: Bench, file: Path, *, prompt_tokens: int) -> None:
    """Profile two prompts (the first warms up) and a few steps at the smallest and largest batch."""
    batches = sorted({bench.options.batch[0], bench.options.batch[-1]})
    context = bench.options.context[0]
    parts = []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prefill:
        bench.time_to_first_token(prompt_tokens, 1)
    parts.append((f"prefill of {prompt_tokens} tokens", prefill))
    for batch in batches:
        bench.time_between_tokens(batch, context, _STEPS)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as steps:
            bench.time_between_tokens(batch, context, _STEPS)
        parts.append((f"decode steps, batch {batch}, context {context}", steps))
    file.parent.mkdir(parents=True, exist_ok=True)
    tables = [
        f"{title}\n" + one.key_averages().table(sort_by=SORTED_BY, row_limit=40, max_name_column_width=90)
        for title, one in parts
    ]
    file.write_text("\n\n".join(tables))
