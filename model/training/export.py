"""Writes a trained network as a Hugging Face folder (bfloat16 safetensors, published parameter names)."""

import json
from pathlib import Path

import torch
from network import Network
from safetensors.torch import load_file, save_file
from shape import hf_config, shape_of
from torch import Tensor

_STACKED = {"experts_gate": "gate_proj", "experts_up": "up_proj", "experts_down": "down_proj"}


def published_state(network: Network) -> dict[str, Tensor]:
    """Return name -> tensor as DeepSeek publishes them: one matrix per expert, no lm_head (tied)."""
    state: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        # The router's bias is compared with score differences far below bfloat16's step.
        value = tensor.detach().cpu().to(torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16)
        parent, _, leaf = name.rpartition(".")
        if leaf in _STACKED:
            for index, matrix in enumerate(value):
                state[f"model.{parent}.experts.{index}.{_STACKED[leaf]}.weight"] = matrix.contiguous()
        else:
            state[f"model.{name}"] = value.contiguous()
    return state


def export(network: Network, folder: Path, *, bos: int, eos: int) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(network.shape, bos=bos, eos=eos)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": bos, "eos_token_id": eos, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_file(published_state(network), folder / "model.safetensors", metadata={"format": "pt"})


def load_published(folder: Path) -> Network:
    """Return the network of a folder that export() wrote, in fp32."""
    shape = shape_of(json.loads((folder / "config.json").read_text()))
    network = Network(shape)
    stored = load_file(folder / "model.safetensors")
    own: dict[str, Tensor] = {}
    for name in network.state_dict():
        parent, _, leaf = name.rpartition(".")
        if leaf in _STACKED:
            parts = [
                stored[f"model.{parent}.experts.{i}.{_STACKED[leaf]}.weight"] for i in range(shape.n_routed_experts)
            ]
            own[name] = torch.stack(parts).float()
        else:
            own[name] = stored[f"model.{name}"].float()
    network.load_state_dict(own)
    return network.eval()
