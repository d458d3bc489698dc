"""The kernel that writes scattered pieces: every byte in its place, and nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvrelay.kernels.cuda_write import MOST_PIECE_BYTES, Writer, cut_long, write_refuses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda", 0)
PAGE = 73_728


def written(pieces: np.ndarray[tuple[int, int], np.dtype[np.int64]], *, num_blocks: int) -> tuple[torch.Tensor, ...]:
    """Return what a memory holds after the kernel has written pieces of a random one, and what it should hold."""
    if (why := write_refuses(DEVICE)) is not None:
        pytest.skip(why)
    sizes = [int(pieces[:, side].max()) + int(pieces[:, 2].max()) for side in (0, 1)]
    here = torch.randint(0, 256, (sizes[0],), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    expected, there = torch.zeros(sizes[1], dtype=torch.uint8), torch.zeros(sizes[1], dtype=torch.uint8, device=DEVICE)
    for source, target, num_bytes in pieces.tolist():
        expected[target : target + num_bytes] = here[source : source + num_bytes]
    cut = cut_long(pieces)
    table, on_device = torch.from_numpy(cut.copy()).pin_memory(), here.to(DEVICE)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
    Writer(DEVICE).write(
        on_device.data_ptr(), there.data_ptr(), table.data_ptr(), num_pieces=len(cut),
        longest_bytes=int(cut[:, 2].max()), num_blocks=num_blocks, stream=stream.cuda_stream,
    )  # fmt: skip
    stream.synchronize()
    return there.cpu(), expected


@pytest.mark.parametrize("num_blocks", [1, 3, 132])
def test_pieces_of_any_size_are_written_where_they_belong_and_nothing_beside_them(num_blocks: int) -> None:
    longest = 2 * MOST_PIECE_BYTES + 240
    pieces = np.array([  # a page, rows, sixteen bytes, none, and one that is cut in three
        (PAGE, 2 * PAGE, PAGE), (3 * PAGE, 800, PAGE), (1152, 90_000, 1152), (60_000, 222_000, 16), (0, 400, 0),
        (4 * PAGE, 4 * PAGE, longest),
    ])  # fmt: skip

    found, expected = written(pieces, num_blocks=num_blocks)

    assert torch.equal(found, expected)


@pytest.mark.parametrize("num_blocks", [24, 132])
@pytest.mark.parametrize("page_bytes", [PAGE, 41_984])
def test_many_pages_are_written_in_any_order(num_blocks: int, page_bytes: int) -> None:
    generator = torch.Generator().manual_seed(2)
    sources, targets = (torch.randperm(1500, generator=generator).numpy() * page_bytes for _ in range(2))
    pieces = np.stack((sources, targets, np.full(1500, page_bytes)), axis=1)

    found, expected = written(pieces, num_blocks=num_blocks)

    assert torch.equal(found, expected)
