"""Device memory of the CUDA driver that processes of one host share, by handles of 64 bytes.

Calls act on the context that is current in this thread.
"""

from __future__ import annotations

import ctypes

from quire.platform.cuda import call_driver

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * HANDLE_BYTES)]


def allocate(size: int) -> int:
    """Return the address of so many zeroed bytes, which stay until the process ends."""
    address = ctypes.c_uint64()
    call_driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    call_driver("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
    call_driver("cuCtxSynchronize")
    return address.value


def export_handle(address: int) -> bytes:
    """Return what another process opens the memory by."""
    handle = _Handle()
    call_driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle.data)


def open_handle(data: bytes) -> int:
    """Return the address, in this process, of memory of another. Raises ConfigError."""
    assert len(data) == HANDLE_BYTES, len(data)
    address, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(data)
    call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
    return address.value
