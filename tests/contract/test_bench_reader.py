"""The process that a bench relays to: what it holds, and that its death is said."""

from __future__ import annotations

import pytest
import torch

from kvrelay.bench.reader_process import ReaderProcess
from kvrelay.core.errors import TransferError
from kvrelay.core.layout import PageLayout


def test_the_reading_process_says_what_it_holds_and_its_death_is_an_error_of_the_transfer() -> None:
    pytest.importorskip("nixl_cu13")
    layout = PageLayout(num_layers=2, latent_width=32, rope_width=8, dtype="float32", model_id="m")
    reader = ReaderProcess(layout, 2, torch.device("cpu"))

    assert reader.address.pool_pages == 2
    assert reader.layer_sums(layout.page_tokens) == [0.0, 0.0]

    reader._process.kill()
    reader._process.join()
    with pytest.raises(TransferError, match="ended before it sent its sums"):
        reader.layer_sums(1)
    reader.close()
