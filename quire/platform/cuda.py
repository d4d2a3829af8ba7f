"""CUDA devices: reports those that this process may use, by the driver itself, without torch.

A device is named by its index among the visible ones; 0 is the one that an engine of one rank uses.

libcuda and NVML through ctypes answer in milliseconds what torch would answer after seconds of
import, so an impossible option is refused at once. torch finds a context opened here later (ctypes
releases the GIL). Nothing happens at import.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from quire.errors import ConfigError
from quire.platform.base import DeviceMemory

name = "cuda"

_SM_COUNT, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute
_SHARED_BYTES, _L2_BYTES = 97, 38
_P2P_NVLINK = 2  # nvmlGpuP2PCapsIndex_t


@dataclass(frozen=True, slots=True)
class CudaDeviceProperties:
    """One of the devices that CUDA_VISIBLE_DEVICES leaves visible."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    total_bytes: int
    free_bytes: int
    shared_memory_per_block: int  # limit of shared memory for one block
    l2_bytes: int
    device_count: int  # visible devices
    uuid: str


@dataclass(frozen=True, slots=True)
class _NoCudaDevice:
    """The reason why there is no device."""

    reason: str


def has_driver() -> bool:
    """Whether this machine has a driver, which is not opened."""
    return Path("/dev/nvidiactl").exists()


def available() -> bool:
    """Whether this process could run on a CUDA device: driver, device, and a torch built for it."""
    return isinstance(_probe_device(0), CudaDeviceProperties)


def device_properties(index: int = 0) -> CudaDeviceProperties:
    """The device, with the memory free at the first call. Raises: ConfigError if there is none."""
    found = _probe_device(index)
    if isinstance(found, _NoCudaDevice):
        raise ConfigError(f"device='cuda': {found.reason}; use device='cpu'")
    return found


def memory(index: int = 0) -> DeviceMemory:
    """Total and free bytes now. Cheap: no context is made."""
    found = device_properties(index)
    free = _free_by_nvml(found.uuid)
    return DeviceMemory(found.total_bytes, found.free_bytes if free is None else free)


def open_context(index: int = 0) -> None:
    """Create or find the context that torch will use: a second of driver time, without the GIL."""
    device_properties(index)
    driver = _driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call_driver(driver, "cuDeviceGet", ctypes.byref(device), index)
    _call_driver(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)


def memory_by_process(index: int = 0) -> list[tuple[int, int]]:
    """(process id, bytes) of each process that holds memory of the device, if NVML reports it."""
    found = _probe_device(index)
    handle = None if isinstance(found, _NoCudaDevice) else _nvml_device(found.uuid)
    if handle is None:
        return []
    nvml, device = handle
    count = ctypes.c_uint(64)
    entries = (_NvmlProcess * 64)()
    query = getattr(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", None)
    if query is None or query(device, ctypes.byref(count), entries) != 0:
        return []
    unknown = ctypes.c_ulonglong(-1).value
    return [(e.pid, e.used) for e in entries[: count.value] if e.used != unknown]


def own_memory_bytes(index: int = 0) -> int | None:
    """Device bytes of this process, the context included; None if they are unknown.

    In a container NVML may use another process id than the process itself.
    """
    return dict(memory_by_process(index)).get(os.getpid())


def have_peer_access(indexes: Sequence[int]) -> bool:
    """Whether each of these devices can read and write the memory of each other one."""
    driver, answer = _driver(), ctypes.c_int()
    for one, other in permutations(indexes, 2):
        pair = []
        for index in (one, other):
            device = ctypes.c_int()
            _call_driver(driver, "cuDeviceGet", ctypes.byref(device), index)
            pair.append(device)
        _call_driver(driver, "cuDeviceCanAccessPeer", ctypes.byref(answer), *pair)
        if not answer.value:
            return False
    return True


def find_link(one: int, other: int) -> str:
    """Return how two devices are connected: "NVLink", "PCIe", or "unknown"."""
    first, second = (_nvml_device(device_properties(index).uuid) for index in (one, other))
    if first is None or second is None:
        return "unknown"
    status, query = ctypes.c_uint(), getattr(first[0], "nvmlDeviceGetP2PStatus", None)
    if query is None or query(first[1], second[1], _P2P_NVLINK, ctypes.byref(status)) != 0:
        return "unknown"
    return "PCIe" if status.value else "NVLink"


def call_driver(function: str, *args: object) -> None:
    """Call a function of the driver. Raises: ConfigError if it fails."""
    _call_driver(_driver(), function, *args)


class _NvmlMemory(ctypes.Structure):
    _fields_ = [(field, ctypes.c_ulonglong) for field in ("total", "free", "used")]


class _NvmlProcess(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute", ctypes.c_uint),
    ]


@functools.cache
def _probe_device(index: int) -> CudaDeviceProperties | _NoCudaDevice:
    """Probed once: devices do not change under a process. free_bytes is that of the probe."""
    if _torch_is_for_cpu():
        return _NoCudaDevice("this torch is a build for the CPU")
    try:
        driver = _driver()
    except OSError:
        return _NoCudaDevice("there is no CUDA driver (libcuda) on this machine")
    status = int(driver.cuInit(0))
    if status != 0:
        return _NoCudaDevice(f"the CUDA driver refuses to start ({_error_name(driver, status)})")
    count, device = ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value < 1:
        return _NoCudaDevice("no CUDA device is visible (CUDA_VISIBLE_DEVICES may hide it)")
    if index >= count.value:
        return _NoCudaDevice(f"device {index} is not one of the {count.value} that are visible")
    _call_driver(driver, "cuDeviceGet", ctypes.byref(device), index)
    return _read_properties(driver, device, count.value)


def _read_properties(driver: ctypes.CDLL, device: ctypes.c_int, count: int) -> CudaDeviceProperties:
    text, total, uuid = ctypes.create_string_buffer(128), ctypes.c_size_t(), (ctypes.c_ubyte * 16)()
    _call_driver(driver, "cuDeviceGetName", text, 128, device)
    _call_driver(driver, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    _call_driver(driver, "cuDeviceGetUuid", uuid, device)
    digits = bytes(uuid).hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    known = "-".join(parts)
    free = _free_by_nvml(known)
    return CudaDeviceProperties(
        name=text.value.decode(),
        capability=(_attribute(driver, device, _MAJOR), _attribute(driver, device, _MINOR)),
        sm_count=_attribute(driver, device, _SM_COUNT),
        total_bytes=total.value,
        free_bytes=total.value if free is None else min(free, total.value),
        shared_memory_per_block=_attribute(driver, device, _SHARED_BYTES),
        l2_bytes=_attribute(driver, device, _L2_BYTES),
        device_count=count,
        uuid=known,
    )


def _torch_is_for_cpu() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _call_driver(driver: ctypes.CDLL, function: str, *args: object) -> None:
    status = int(getattr(driver, function)(*args))
    if status != 0:
        raise ConfigError(
            f"device='cuda': the CUDA driver fails in {function} ({_error_name(driver, status)})"
        )


def _error_name(driver: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    if driver.cuGetErrorName(status, ctypes.byref(text)) != 0 or text.value is None:
        return f"error {status}"
    return text.value.decode()


def _attribute(driver: ctypes.CDLL, device: ctypes.c_int, which: int) -> int:
    value = ctypes.c_int()
    _call_driver(driver, "cuDeviceGetAttribute", ctypes.byref(value), which, device)
    return value.value


def _free_by_nvml(uuid: str) -> int | None:
    """Free bytes by NVML, which needs no context and so takes no memory. None: unknown to NVML."""
    handle = _nvml_device(uuid)
    if handle is None:
        return None
    nvml, device = handle
    found = _NvmlMemory()
    if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(found)) != 0:
        return None
    return int(found.free)


@functools.cache
def _nvml_device(uuid: str) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """NVML counts devices in another order than CUDA, so the device is found by its UUID."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    for prefix in ("GPU-", "MIG-"):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByUUID((prefix + uuid).encode(), ctypes.byref(device)) == 0:
            return nvml, device
    return None
