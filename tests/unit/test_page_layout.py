"""The byte map of a page and its fingerprint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvrelay.core.layout import PageLayout
from kvrelay.kernels import quant

LAYOUT = PageLayout(num_layers=3, latent_width=32, rope_width=8, dtype="float32", model_id="m", block_tokens=64)


def test_neighbouring_pages_of_a_layer_are_neighbours_in_memory() -> None:
    first = LAYOUT.offset_bytes(layer=1, page=4, row=0, num_pages=10)

    assert LAYOUT.offset_bytes(layer=1, page=5, row=0, num_pages=10) == first + LAYOUT.page_bytes
    assert LAYOUT.offset_bytes(layer=1, page=4, row=63, num_pages=10) == first + 63 * LAYOUT.row_bytes
    assert LAYOUT.offset_bytes(layer=2, page=0, row=0, num_pages=10) == 20 * LAYOUT.page_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 4},
        {"latent_width": 16},
        {"rope_width": 16},
        {"dtype": "bfloat16"},
        {"model_id": "other"},
        {"page_tokens": 32},
        {"block_tokens": 128},
        {"version": 2},
        {"latent_format": "fp8"},
    ],
)
def test_c5_every_field_changes_the_fingerprint(change: dict[str, int | str]) -> None:
    assert replace(LAYOUT, **change).fingerprint != LAYOUT.fingerprint  # type: ignore[arg-type]


def test_a_layout_is_named_as_by_builds_that_know_one_format_only() -> None:
    assert LAYOUT.fingerprint.hex() == "f66770c60b42a9ad2a4634577d251d92"


def test_wrong_layouts_are_refused_by_value() -> None:
    with pytest.raises(ValueError, match="float64"):
        replace(LAYOUT, dtype="float64")
    with pytest.raises(ValueError, match="100"):
        replace(LAYOUT, block_tokens=100)
    with pytest.raises(ValueError, match="int4"):
        replace(LAYOUT, latent_format="int4")


@pytest.mark.parametrize(("latent", "rope"), [(24, 8), (40, 6), (128, 32), (512, 64), (1024, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_fp8_have_the_bytes_of_the_kernels(latent: int, rope: int, dtype: str) -> None:
    layout = replace(LAYOUT, latent_width=latent, rope_width=rope, dtype=dtype, latent_format="fp8")

    assert layout.row_bytes == quant.quantise(torch.zeros(1, latent + rope), latent_width=latent).shape[1]
    assert layout.page_bytes == 64 * layout.row_bytes
    assert layout.page_bytes % 8 == 0


@pytest.mark.parametrize(
    ("width", "limit"), [(30, "not a multiple of 4"), (130, "128 times a power of two"), (384, "128 times a power")]
)
def test_a_width_that_has_no_rows_of_fp8_is_refused_with_the_limit(width: int, limit: str) -> None:
    with pytest.raises(ValueError, match=f"fp8: a latent width of {width}.*{limit}"):
        replace(LAYOUT, latent_width=width, latent_format="fp8")
