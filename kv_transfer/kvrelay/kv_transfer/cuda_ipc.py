"""CUDA's own way to share memory of `cudaMalloc` between processes of a host: the few calls of the driver for it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

from kvrelay.core.errors import TransferError

HANDLE_BYTES = 64
UUID_BYTES = 16
_ENABLE_PEER_ACCESS = c_uint(1)  # the only flag there is


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


def export_memory(address: int, device_id: int) -> tuple[bytes, int]:
    """Return a handle of the allocation that an address lies in, and the address's offset from where that begins.

    Raises:
        TransferError: the driver refuses, as for memory that is not of `cudaMalloc`.
    """
    base, size, handle = c_uint64(), c_size_t(), _Handle()
    with _current(device_id) as driver:
        _check(driver.cuMemGetAddressRange_v2(byref(base), byref(size), c_uint64(address)), "find the allocation")
        _check(driver.cuIpcGetMemHandle(byref(handle), base), "share the pool")
    return bytes(handle), address - base.value


def device_uuid(device_id: int) -> bytes:
    """Return 16 bytes that name a device in all processes of a host, whatever number it has there.

    Raises:
        TransferError: the driver does not say.
    """
    uuid = ctypes.create_string_buffer(UUID_BYTES)
    device, driver = c_int(), _driver()
    _check(driver.cuDeviceGet(byref(device), c_int(device_id)), "find the device")
    _check(driver.cuDeviceGetUuid_v2(uuid, device), "name the device")
    return uuid.raw


def open_memory(handle: bytes, device_id: int) -> tuple[int, int]:
    """Map the memory of another process so that kernels on a device reach it; return its address and bytes.

    Raises:
        TransferError: the driver refuses: no peer access between the devices, a device that is not visible here, no
            common namespace of processes, an exporter that has gone.
    """
    base, start, size = c_uint64(), c_uint64(), c_size_t()
    with _current(device_id) as driver:
        opened = driver.cuIpcOpenMemHandle_v2(byref(base), _Handle.from_buffer_copy(handle), _ENABLE_PEER_ACCESS)
        _check(opened, "map the pool")
        found = driver.cuMemGetAddressRange_v2(byref(start), byref(size), base)
        if found:
            driver.cuIpcCloseMemHandle(base)
        _check(found, "find the mapping")
    return base.value, start.value + size.value - base.value


def close_memory(base: int, device_id: int) -> None:
    """Take out memory that `open_memory` mapped; nothing may still use it.

    Raises:
        TransferError: the driver refuses.
    """
    with _current(device_id) as driver:
        _check(driver.cuIpcCloseMemHandle(c_uint64(base)), "unmap a pool")


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as err:
        raise TransferError(f"CUDA's driver cannot be loaded: {err}") from err
    driver.cuIpcOpenMemHandle_v2.argtypes = (c_void_p, _Handle, c_uint)  # the handle goes by value
    return driver


@contextmanager
def _current(device_id: int) -> Iterator[Any]:
    """Make the device's primary context, the one of torch, that of the calling thread for a while."""
    driver, device, context, before = _driver(), c_int(), c_void_p(), c_void_p()
    _check(driver.cuDeviceGet(byref(device), c_int(device_id)), "find the device")
    _check(driver.cuDevicePrimaryCtxRetain(byref(context), device), "use the device")
    try:
        _check(driver.cuCtxPushCurrent_v2(context), "use the device")
        try:
            yield driver
        finally:
            driver.cuCtxPopCurrent_v2(byref(before))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


def _check(status: int, what: str) -> None:
    if status:
        name = c_char_p()
        _driver().cuGetErrorName(c_int(status), byref(name))
        raise TransferError(f"CUDA cannot {what}: {(name.value or b'error').decode()} ({status})")
