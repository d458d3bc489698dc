"""`kvrelay bench stream`: what the way from the decode node to the client adds to each token.

Mean time between tokens at the client of a split cluster, over the time of the model's step: the same engine's time
between tokens in one process, at the same lengths.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvrelay.bench import report
from kvrelay.bench.pairs import measure

NUM_TOKENS = 64


def run(options: argparse.Namespace) -> int:
    """Measure, print the ratio and write the result file when asked to."""
    pairs = list(
        measure(options.model, prompt_tokens=options.prompt_tokens, num_tokens=NUM_TOKENS, num_pairs=options.pairs)
    )
    result: dict[str, Any] = {
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": NUM_TOKENS,
        "pairs": len(pairs),
        "dtype": "float32",
        "threads_per_process": 1,
        "between_tokens": report.paired(
            [split.between_s for split, _ in pairs], [alone.between_s for _, alone in pairs]
        ),
    }
    print(json.dumps(result, indent=2))
    if options.out:
        print(report.write(Path(options.out), device="cpu", bench="stream", result=result))
    return 0
