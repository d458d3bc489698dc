"""`kvrelay bench kernels`: each kernel of a GPU beside what the device can do and beside the kernels of others."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from kvrelay.bench import device_rates, report
from kvrelay.bench.kernel_decode import Case, against_flashmla, in_words, packed_against_whole
from kvrelay.bench.kernel_moves import moves
from kvrelay.bench.kernel_prefill import block
from kvrelay.core.errors import SettingsError

BANDWIDTH = [Case(batch=64, tokens=tokens, heads=16) for tokens in (4096, 16_384, 32_768, 131_072)]
AGAINST = [Case(batch=32, tokens=8192, heads=heads) for heads in (16, 64, 128)]
AGAINST += [Case(batch=32, tokens=32_768, heads=16)]
LONG = [Case(batch=1, tokens=tokens, heads=16) for tokens in (131_072, 1 << 20)]
PACKED = Case(batch=16, tokens=131_072, heads=16)
PREFILL = [(8192, True), (8192, False), (32_768, True), (32_768, False)]


@torch.inference_mode()
def run(options: argparse.Namespace) -> int:
    """Measure, print the figures and write the result file when asked to."""
    if not torch.cuda.is_available():
        raise SettingsError("this bench measures kernels of a GPU, and no CUDA device is here")
    device = torch.device("cuda")
    rates = device_rates.measure(device, torch.bfloat16)
    copy, matmul, repetitions = rates.copy_bytes_per_s, rates.matmul_flop_per_s, options.repetitions
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "driver": _driver(),
        "copy_bytes_per_s": round(copy),
        "matmul_flop_per_s": round(matmul),
    }
    if "decode" in options.only:
        result["decode"] = []
        for case in (*BANDWIDTH, *AGAINST, *LONG):
            found = against_flashmla(case, device, copy_bytes_per_s=copy, repetitions=repetitions)
            _note(in_words(found))
            result["decode"].append(found)
            _let_go()
        _note("8-bit rows")
        result["decode_fp8"] = packed_against_whole(PACKED, device, repetitions=repetitions)
        _let_go()
    result["prefill"] = []
    for tokens, causal in PREFILL if "prefill" in options.only else ():
        _note(f"prefill {tokens}")
        result["prefill"].append(
            block(tokens, device, causal=causal, matmul_flop_per_s=matmul, repetitions=repetitions)
        )
        _let_go()
    if "moves" in options.only:
        result["moves"] = moves(device, copy_bytes_per_s=copy, repetitions=repetitions)
    print(json.dumps(result, indent=2) if options.full else json.dumps(_short(result)))
    if options.out:
        name = device_rates.short_name(device)
        print(report.write(Path(options.out), device=name, bench="kernels", result=result))
    return 0


def _short(result: Any) -> Any:
    """Return the result without the single repetitions."""
    if isinstance(result, dict):
        return {key: _short(value) for key, value in result.items() if key != "repetitions_us"}
    return [_short(value) for value in result] if isinstance(result, list) else result


def _note(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _let_go() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)  # noqa: S603 - fixed arguments
    return found.stdout.split("\n", maxsplit=1)[0]
