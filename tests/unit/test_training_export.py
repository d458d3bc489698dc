"""The file that training exports means the same network to us, to the training script and to transformers."""

import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvrelay.cli.manual import python_manual
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.embedded_path import embedded_checkpoint
from kvrelay.model.prefill_step import prefill_forward

sys.path.insert(0, str(Path(__file__).parents[2] / "model" / "training"))

from export import export, load_published
from network import Network
from shape import SMOKE

CPU = torch.device("cpu")


def our_logits(folder: Path, ids: list[int]) -> Tensor:
    """Return logits [T, vocab] of the serving path: latents in pages, one chunk."""
    model = load_model(folder, dtype="float32", device=CPU)
    pool = LatentPool(model.layout(block_tokens=64), 1 + len(ids) // 64, CPU)
    hidden = prefill_forward(model, pool, torch.tensor(ids), slots=torch.arange(len(ids)), start=0, ntk_tokens=len(ids))
    return model.logits(hidden)


def transformers_logits(folder: Path, ids: list[int]) -> Tensor:
    transformers = pytest.importorskip("transformers", reason="transformers is in the dev extra")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network no weight of which is trivial, written by the training script."""
    torch.manual_seed(0)
    network = Network(SMOKE)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif "embed" in name:
                parameter.mul_(20)
        for router in network.routers():
            router.e_score_correction_bias.copy_(0.1 * torch.randn_like(router.e_score_correction_bias))
    folder = tmp_path_factory.mktemp("exported")
    export(network, folder, bos=0, eos=1)
    return folder


def some_ids(count: int) -> list[int]:
    return torch.randint(4, SMOKE.vocab_size, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def test_the_exported_file_gives_the_same_logits_in_training_and_in_serving(exported: Path) -> None:
    ids = some_ids(SMOKE.train_window_tokens + 44)  # beyond the training window: YaRN counts

    with torch.no_grad():
        theirs = load_published(exported)(torch.tensor([ids]), yarn=True)[0]

    assert theirs.std() > 0.3
    torch.testing.assert_close(our_logits(exported, ids), theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.full
def test_the_exported_file_gives_the_same_logits_in_transformers(exported: Path) -> None:
    ids = some_ids(SMOKE.train_window_tokens + 44)
    torch.testing.assert_close(our_logits(exported, ids), transformers_logits(exported, ids), atol=2e-4, rtol=1e-4)


@pytest.mark.full
def test_the_embedded_checkpoint_gives_the_same_logits_in_transformers() -> None:
    folder = embedded_checkpoint()
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    ids = tokenizer.encode(python_manual()[200_000:204_000]).ids[:1000]
    ours, theirs = our_logits(folder, ids), transformers_logits(folder, ids)
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
