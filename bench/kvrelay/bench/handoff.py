"""`kvrelay bench handoff`: what splitting costs until the second token.

Time to the first token (TTFT) and to the second (TT2), at the client of a split cluster, over the same engine in one
process. The hand-off shows in TT2: the first token comes from prefill, the second needs every latent on decode.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvrelay.bench import report
from kvrelay.bench.pairs import measure

NUM_TOKENS = 3


def run(options: argparse.Namespace) -> int:
    """Measure, print the ratios and write the result file when asked to."""
    pairs = list(
        measure(options.model, prompt_tokens=options.prompt_tokens, num_tokens=NUM_TOKENS, num_pairs=options.pairs)
    )
    result: dict[str, Any] = {
        "prompt_tokens": options.prompt_tokens,
        "pairs": len(pairs),
        "dtype": "float32",
        "ring_size": 1,
        "threads_per_process": 1,
        "ttft": report.paired([split.at_s[0] for split, _ in pairs], [alone.at_s[0] for _, alone in pairs]),
        "second_token": report.paired([split.at_s[1] for split, _ in pairs], [alone.at_s[1] for _, alone in pairs]),
    }
    print(json.dumps(result, indent=2))
    if options.out:
        print(report.write(Path(options.out), device="cpu", bench="handoff", result=result))
    return 0
