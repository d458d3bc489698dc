"""Reading tensors out of one or many safetensors files, with errors that name the file and the tensor.

Whether files are what a config says can be checked where no torch is; only `take` needs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from safetensors import SafetensorError, safe_open

from kvrelay.core.errors import ModelLoadError
from kvrelay.model.config import FP8_BLOCK, ModelConfig
from kvrelay.model.config_reader import read_json_object
from kvrelay.model.tensors import Shape, expected_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
PLAIN_DTYPES = {"F32", "BF16", "F16"}
FP8_DTYPE = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"
# Buffers that older exports carry; they follow from the config.
DERIVED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def files_of(folder: Path) -> list[Path]:
    """Return the weight files: those the index names, or all *.safetensors of a folder without one.

    Raises:
        ModelLoadError: there is none, the index is damaged, or a file that it names is missing.
    """
    index = folder / INDEX_NAME
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelLoadError(f"{folder}: holds neither *.safetensors nor {INDEX_NAME}")
        return files
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(f"{index}: names {name!r}, which is not a file of this folder")
        if not (folder / name).is_file():
            raise ModelLoadError(f"{folder / name}: is missing; {INDEX_NAME} names it")
    return [folder / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelLoadError(f"{index}: weight_map is not an object of tensor name to file name")
    return names


class CheckpointFiles:
    """The open weight files of one folder, checked against the config; a context manager."""

    def __init__(self, folder: Path, config: ModelConfig, *, framework: Literal["pt", "np"] = "pt") -> None:
        """Open all files and compare their tensors' names, shapes and types with the config's.

        Args:
            framework: which library the files' reader loads; "np" is enough for checking, `take` needs "pt".

        Raises:
            ModelLoadError: a file is missing or truncated, or a tensor missing, unexpected, or of a wrong shape or
                type; names the file and the tensor.
        """
        self._folder = folder
        self._config = config
        self._framework = framework
        self._stack = ExitStack()
        self._file_of: dict[str, tuple[Path, Any]] = {}
        try:
            for path in files_of(folder):
                self._open(path)
            self._check_index()
            self._check_names()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one tensor as `dtype` in host memory; float8 weights are multiplied by their blocks' scales."""
        path, file = self._file_of[name]
        try:
            tensor: Tensor = file.get_tensor(name)
            if file.get_slice(name).get_dtype() == FP8_DTYPE:
                scale_name = name + SCALE_SUFFIX
                scales: Tensor = self._file_of[scale_name][1].get_tensor(scale_name)
                return dequantise(tensor, scales).to(dtype)
        except SafetensorError as err:
            raise ModelLoadError(f"{path}: {name} cannot be read: {err}") from err
        return tensor.to(dtype, copy=True)  # off the mapped file, whose pages may go away

    def _open(self, path: Path) -> None:
        try:
            path.open("rb").close()  # what the library says of a file that cannot be opened holds its path once more
        except OSError as err:
            raise ModelLoadError(f"{path}: cannot be read: {err.strerror}") from err
        try:
            file = self._stack.enter_context(safe_open(path, framework=self._framework))
            names = list(file.keys())
        except (SafetensorError, OSError) as err:
            raise ModelLoadError(f"{path}: is damaged or truncated: {err}") from err
        for name in names:
            if name in self._file_of:
                raise ModelLoadError(f"{path}: holds {name}, which is also in {self._file_of[name][0].name}")
            self._file_of[name] = path, file

    def _check_index(self) -> None:
        index = self._folder / INDEX_NAME
        if not index.exists():
            return
        for name, file_name in _weight_map(index).items():
            if name not in self._file_of:
                raise ModelLoadError(f"{self._folder / file_name}: lacks {name}, which {INDEX_NAME} puts there")

    def _check_names(self) -> None:
        expected = expected_tensors(self._config)
        for name, shape in expected.items():
            if name not in self._file_of:
                raise ModelLoadError(f"{self._folder}: lacks the tensor {name} of shape {list(shape)}")
            self._check_tensor(name, shape)
        for name in self._unexpected(expected):
            path = self._file_of[name][0]
            raise ModelLoadError(f"{path}: holds {name}, which has no place in the model that config.json describes")

    def _check_tensor(self, name: str, shape: Shape) -> None:
        path, file = self._file_of[name]
        found = file.get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise ModelLoadError(f"{path}: {name} has shape {found.get_shape()}, config.json implies {list(shape)}")
        dtype = found.get_dtype()
        if dtype in PLAIN_DTYPES:
            return
        if dtype != FP8_DTYPE or not self._config.fp8_blocks or len(shape) != 2:
            raise ModelLoadError(f"{path}: {name} has type {dtype}, which is not supported here")
        scale_name = name + SCALE_SUFFIX
        if scale_name not in self._file_of:
            raise ModelLoadError(f"{path}: {name} has type {dtype}, but its scales {scale_name} are missing")
        scale_path, scale_file = self._file_of[scale_name]
        scales = scale_file.get_slice(scale_name)
        blocks = [-(-size // block) for size, block in zip(shape, FP8_BLOCK, strict=True)]
        if scales.get_shape() != blocks or scales.get_dtype() not in PLAIN_DTYPES:
            raise ModelLoadError(
                f"{scale_path}: {scale_name} is {scales.get_dtype()} {scales.get_shape()}, "
                f"not one float for each of {blocks} blocks"
            )

    def _unexpected(self, expected: dict[str, Shape]) -> Iterator[str]:
        for name in self._file_of:
            layer = LAYER.match(name)
            if (
                name in expected
                or (layer and int(layer[1]) >= self._config.num_layers)  # guesses further tokens; not used
                or (self._config.tie_word_embeddings and name == "lm_head.weight")
                or (self._config.fp8_blocks and name.removesuffix(SCALE_SUFFIX) in expected)
                or DERIVED.search(name)
            ):
                continue
            yield name


def dequantise(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 [out, in] weight of float8 numbers with a scale per 128 x 128 block; edge blocks are smaller."""
    rows, columns = weight.shape
    scales = scales.float().repeat_interleave(FP8_BLOCK[0], 0)[:rows].repeat_interleave(FP8_BLOCK[1], 1)[:, :columns]
    return weight.float() * scales
