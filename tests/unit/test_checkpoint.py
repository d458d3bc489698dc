"""Loading checkpoints: what is read, and one clear error for everything that is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvrelay.bench.random_model import V2_LITE
from kvrelay.cli import fit
from kvrelay.core.errors import ModelLoadError
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model, model_id
from kvrelay.model.checkpoint_files import dequantise
from kvrelay.model.config import load_config
from kvrelay.model.embedded_path import embedded_checkpoint
from kvrelay.model.prefill_step import prefill_forward
from kvrelay.model.tensors import loaded_bytes
from kvrelay.model.transformer import Model
from oracle_data import oracle_folder

CPU = torch.device("cpu")


def a_copy(tmp_path: Path, name: str = "v3_noaux") -> Path:
    """Return a writable copy of an oracle checkpoint."""
    folder = tmp_path / name
    folder.mkdir()
    for file in oracle_folder(name).iterdir():
        if not file.name.startswith("oracle"):
            shutil.copyfile(file, folder / file.name)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path, dtype: str = "float32") -> Model:
    return load_model(folder, dtype=dtype, device=CPU)


def refusal_of(folder: Path) -> str:
    """Return why a checkpoint is refused: by who loads it, and in the same words by who only looks."""
    with pytest.raises(ModelLoadError) as loading:
        load(folder)
    with pytest.raises(ModelLoadError) as looking:
        fit.check(str(folder), dtype="float32", num_processes=1)
    assert str(looking.value) == str(loading.value)
    return str(loading.value)


def logits_of(model: Model, ids: list[int]) -> Tensor:
    pool = LatentPool(model.layout(block_tokens=64), 1 + len(ids) // 64, CPU)
    hidden = prefill_forward(model, pool, torch.tensor(ids), slots=torch.arange(len(ids)), start=0, ntk_tokens=len(ids))
    return model.logits(hidden)


def test_the_embedded_checkpoint_loads_and_its_logits_are_finite() -> None:
    model = load(embedded_checkpoint())

    assert logits_of(model, [1, 2, 3, 4, 5]).isfinite().all()


LAYER_1 = "model.layers.1.self_attn.kv_b_proj.weight"


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors[LAYER_1]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.sinks"] = torch.zeros(4)


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors[LAYER_1] = tensors[LAYER_1][:-1].contiguous()


def to_integers(tensors: dict[str, Tensor]) -> None:
    tensors[LAYER_1] = tensors[LAYER_1].to(torch.int8)


def to_float8(tensors: dict[str, Tensor]) -> None:
    tensors[LAYER_1] = tensors[LAYER_1].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (drop, ["lacks the tensor", LAYER_1]),
        (add, ["model.safetensors", "model.layers.1.self_attn.sinks", "no place"]),
        (reshape, ["model.safetensors", LAYER_1, "[127, 32]", "[128, 32]"]),
        (to_integers, ["model.safetensors", LAYER_1, "I8"]),
        (to_float8, ["model.safetensors", LAYER_1, "F8_E4M3"]),
    ],
)
def test_a_wrong_tensor_is_refused_by_file_and_name(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], None], parts: list[str]
) -> None:
    folder = a_copy(tmp_path)
    edit_tensors(folder, edit)

    why = refusal_of(folder)

    assert all(part in why for part in parts), why


@pytest.mark.parametrize("kept_bytes", [0, 5, 1000, 200_000])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, kept_bytes: int) -> None:
    folder = a_copy(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])

    assert "model.safetensors: is damaged or truncated" in refusal_of(folder)


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    folder = a_copy(tmp_path, "v3_sharded")
    (folder / "model-00003-of-00004.safetensors").unlink()

    assert "model-00003-of-00004.safetensors: is missing" in refusal_of(folder)


def test_a_tensor_that_the_index_promises_and_the_shard_lacks_is_refused(tmp_path: Path) -> None:
    folder = a_copy(tmp_path, "v3_sharded")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = "model-00002-of-00004.safetensors"
    index.write_text(json.dumps(content))

    with pytest.raises(ModelLoadError, match=r"model-00002-of-00004\.safetensors: lacks model\.extra\.weight"):
        load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd"])
def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path, name: str) -> None:
    folder = a_copy(tmp_path, "v3_sharded")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))

    with pytest.raises(ModelLoadError, match="not a file of this folder"):
        load(folder)


def test_a_folder_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read"):
        load(tmp_path)

    folder = a_copy(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"holds neither"):
        load(folder)


def test_a_model_that_does_not_fit_is_refused_with_the_bytes_needed_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_copy(tmp_path)
    needed = loaded_bytes(load_config(folder), 4)
    free = psutil.virtual_memory()._replace(available=needed - 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)

    with pytest.raises(ModelLoadError, match=f"need {needed} bytes on cpu, {needed - 1} bytes are free"):
        load(folder)


def test_loaded_bytes_counts_what_is_loaded(tmp_path: Path) -> None:
    folder = a_copy(tmp_path)
    config = load_config(folder)
    numbers = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())

    assert loaded_bytes(config, 4) == 4 * numbers
    assert 2 * numbers < loaded_bytes(config, 2) < 2.1 * numbers  # routers stay fp32


def test_a_gpu_has_some_weights_twice() -> None:
    def gib(device_type: str) -> float:
        return loaded_bytes(V2_LITE, 2, device_type=device_type) / 2**30

    # 27 layers expand rows of 576 numbers to 16 heads of 320; 26 have shared experts of 2,816 by 2,048.
    assert gib("cuda") - gib("cpu") == pytest.approx((27 * 16 * 320 * 576 + 26 * 2816 * 2048) * 2 / 2**30)
    assert gib("cuda") < 1.02 * gib("cpu")


def test_layers_beyond_the_model_and_derived_buffers_are_skipped(tmp_path: Path) -> None:
    folder = a_copy(tmp_path)
    before = logits_of(load(folder), [5, 6, 7])
    edit_config(folder, num_nextn_predict_layers=1)

    def extend(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    edit_tensors(folder, extend)

    assert torch.equal(logits_of(load(folder), [5, 6, 7]), before)


def test_several_files_without_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    folder = a_copy(tmp_path, "v3_sharded")
    with_index = logits_of(load(folder), [9, 8, 7])
    (folder / "model.safetensors.index.json").unlink()

    assert torch.equal(logits_of(load(folder), [9, 8, 7]), with_index)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8 numbers and their scales, one loop per block: the definition."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // 128), -(-columns // 128))
    numbers = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128].float()
            scales[i, j] = block.abs().max() / 448
            numbers[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] = (block / scales[i, j]).to(torch.float8_e4m3fn)
    return numbers, scales


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (5, 129)])
def test_block_scaled_float8_is_restored(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 2, shape[1])

    restored = dequantise(*quantised(weight))

    assert (restored - weight).abs().max() <= weight.abs().max() / 16  # three mantissa bits
    expected_first = quantised(weight)[0][:128, :128].float() * quantised(weight)[1][0, 0]
    assert torch.equal(restored[:128, :128], expected_first)


def test_a_float8_checkpoint_equals_its_dequantised_twin(tmp_path: Path) -> None:
    folder = a_copy(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    linear = [name for name in tensors if "_proj" in name and tensors[name].dim() == 2]
    twin, small = dict(tensors), dict(tensors)
    for name in linear:
        numbers, scales = quantised(tensors[name])
        small[name], small[f"{name}_scale_inv"] = numbers, scales
        twin[name] = dequantise(numbers, scales)
    save_file(twin, folder / "model.safetensors")
    expected = logits_of(load(folder), [3, 1, 4, 1, 5])

    save_file(small, folder / "model.safetensors")
    edit_config(
        folder,
        quantization_config={
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
        },
    )  # fmt: skip

    assert torch.equal(logits_of(load(folder), [3, 1, 4, 1, 5]), expected)
    edit_tensors(folder, lambda tensors: tensors.pop(f"{LAYER_1}_scale_inv"))
    with pytest.raises(ModelLoadError, match=r"kv_b_proj\.weight_scale_inv are missing"):
        load(folder)


def test_the_digest_names_config_and_weights_but_not_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = a_copy(tmp_path / "a"), a_copy(tmp_path / "b")
    name = model_id(first)
    assert name == model_id(second)

    edit_config(second, rope_theta=20000.0)
    assert model_id(second) != name

    edit_tensors(first, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert model_id(first) != name
