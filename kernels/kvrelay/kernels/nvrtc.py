"""CUDA C++ compiled at start by NVRTC, and launched, through NVIDIA's own bindings (torch's CUDA builds bring them)."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvrelay.core.errors import NoKernelError
from kvrelay.kernels.optional import import_refuses

log = logging.getLogger(__name__)

TensorMap = ctypes.c_ubyte * 128  # CUtensorMap


@functools.cache
def nvrtc_refuses() -> str | None:
    """Return None, or the reason why nothing can be compiled here."""
    if (why := import_refuses("cuda.bindings.nvrtc", "cuda-bindings")) is not None:
        return why
    from cuda.bindings import nvrtc  # noqa: PLC0415 - optional

    try:
        _checked(nvrtc.nvrtcVersion())  # loads the compiler, a library of its own
    except (NoKernelError, OSError, RuntimeError) as err:
        return f"NVRTC does not load: {err}"
    return None


def build_refuses(kernel: str, build: Callable[[], object]) -> str | None:
    """Return None, or why a source becomes no kernel, as where NVRTC is newer than the driver; that is a warning too.

    Args:
        kernel: its name, for the log.
        build: calls `compile_kernel`, and keeps what it returns.
    """
    try:
        build()
    except (NoKernelError, OSError, RuntimeError) as err:
        log.warning("the %s cannot be built: %s", kernel, err)
        return f"cannot be built: {err}"
    return None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function on one device."""

    handle: Any  # CUfunction
    shared_bytes: int

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        arguments: ctypes.Structure,
        *,
        stream: int | None = None,
        starts_early: bool = False,
    ) -> None:
        """Launch it; `arguments` is the kernel's only parameter, by value.

        Args:
            stream: CUDA's handle; torch's current one when it is None.
            starts_early: its blocks may begin while the kernel in front still runs; see `triton_wait`.

        Raises:
            NoKernelError: what the driver said.
        """
        from cuda.bindings import driver  # noqa: PLC0415 - optional

        if stream is None:
            stream = torch.cuda.current_stream().cuda_stream
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        shape = (*grid, 1, threads, 1, 1)
        if not starts_early:
            _checked(
                driver.cuLaunchKernel(self.handle, *shape, self.shared_bytes, stream, ctypes.addressof(pointers), 0)
            )
            return
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY, config.blockDimZ = shape
        config.sharedMemBytes = self.shared_bytes
        config.hStream = stream
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
        _checked(driver.cuLaunchKernelEx(config, self.handle, ctypes.addressof(pointers), 0))


def compile_kernel(
    source: Path, name: str, defines: Mapping[str, int], *, device: torch.device, shared_bytes: int
) -> Kernel:
    """Compile a file for `device` and return its extern "C" function `name`; takes a second or some.

    Raises:
        NoKernelError: with the compiler's log, or what the driver said.
    """
    from cuda.bindings import driver  # noqa: PLC0415 - optional

    major, minor = torch.cuda.get_device_capability(device)
    # "a": with what later architectures may not have, such as the products of warpgroups.
    image, _ = compile_image(source, f"sm_{major}{minor}a", defines)
    torch.cuda.synchronize(device)  # makes the device's context this thread's
    library = _checked(driver.cuLibraryLoadData(image, [], [], 0, [], [], 0))
    kernel = _checked(driver.cuLibraryGetKernel(library, name.encode()))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    index = torch.cuda.current_device() if device.index is None else device.index
    _checked(driver.cuKernelSetAttribute(limit, shared_bytes, kernel, _checked(driver.cuDeviceGet(index))))
    return Kernel(driver.CUfunction(int(kernel)), shared_bytes)


def compile_image(source: Path, architecture: str, defines: Mapping[str, int]) -> tuple[bytes, str]:
    """Return the machine code for an architecture ("sm_90a") and the compiler's log, with registers; needs no device.

    Headers (*.cuh) are those beside `source`.
    """
    from cuda.bindings import nvrtc  # noqa: PLC0415 - optional

    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--ptxas-options=-v"]
    options += [f"-D{key}={value}" for key, value in defines.items()]
    headers = sorted(source.parent.glob("*.cuh"))
    texts, names = [header.read_bytes() for header in headers], [header.name.encode() for header in headers]
    program = _checked(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), len(headers), texts, names))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        written = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, written))
        text = written.rstrip(b"\0").decode(errors="replace")
        if int(status):
            raise NoKernelError({"nvrtc": f"{status}: {text}"})
        image = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, image))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(image), text


@functools.lru_cache(maxsize=1024)  # an address means the same rows as long as a layer of a pool lives there
def tensor_map(address: int, num_rows: int, row_width: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Return a driver's description of bf16 rows for copies of boxes of 64 x 64, swizzled in rows of 128 bytes."""
    from cuda.bindings import driver  # noqa: PLC0415 - optional

    made = _checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            address,
            [driver.cuuint64_t(row_width), driver.cuuint64_t(num_rows)],
            [driver.cuuint64_t(2 * row_width)],
            [driver.cuuint32_t(64), driver.cuuint32_t(64)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(made.getPtr(), ctypes.sizeof(TensorMap)))


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what a call of the bindings gave behind its status."""
    status, *values = result
    if int(status):
        raise NoKernelError({"cuda": str(status)})
    return values[0] if values else None
