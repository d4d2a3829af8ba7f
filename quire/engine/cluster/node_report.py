"""Node report: what one machine of a cluster has, as plain values, and whether it reaches others.

`quire doctor` compares the reports of all machines (quire.engine.cluster.node_check). Nothing here
imports torch or opens a CUDA context.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

from quire import env
from quire.distributed.node_address import Endpoint, endpoint_of, listen, own_address, unreachable
from quire.errors import ConfigError
from quire.platform import cpu, cuda

PACKAGES = ("quire-llm", "torch", "triton", "ray")
"""Packages that must have one version on all nodes."""
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
SHARED_MEMORY = Path("/dev/shm")
RDMA_DEVICES = Path("/sys/class/infiniband")
MODEL_FILES = ("*.json", "*.safetensors", "*.gguf", "*.bin", "*.model")
DEFAULT_ROUTE = "198.51.100.1"
"""An address of no machine: the route to it is the default one. Nothing is sent there."""
CONNECT_LIMIT_S = 10.0
"""Time in which a node must reach another."""


class NodeReport(msgspec.Struct, frozen=True):
    """One machine."""

    host: str
    address: str  # as others should reach it
    port: int  # at which it listens during the check; 0: it cannot listen at its address
    interfaces: dict[str, tuple[str, ...]]  # name -> addresses, of those that are up
    versions: dict[str, str]  # of packages and Python; without those that are not installed
    gpus: int
    gpu_name: str  # or why there is none
    gpu_bytes: int
    gpu_free_bytes: int
    shared_memory_bytes: int  # free
    host_free_bytes: int
    rdma: tuple[str, ...]  # devices
    variables: dict[str, str]  # those that choose networks
    model: dict[str, str] | None = None  # file -> size and digest; None: there is no such folder
    ray_address: str | None = None  # as Ray knows the node

    @property
    def name(self) -> str:
        return f"{self.host} ({self.address})"


class NodeProbe:
    """Reports on this machine, and connects to others. The caller must close() it."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def report(
        self, model: str | None, head: str = DEFAULT_ROUTE, ray_address: str | None = None
    ) -> NodeReport:
        """Return the report; listen until close(). model: a folder. head: its address."""
        address = env.host_address() or ray_address or own_address(head, None)
        with contextlib.suppress(ConfigError):  # no interface has this address: a finding
            self._listener = listen(address, 0, what="QUIRE_HOST_IP")
        port = 0 if self._listener is None else endpoint_of(self._listener).port
        return make_report(address, port, model, ray_address)

    def connect(self, others: Mapping[str, int]) -> dict[str, str]:
        """Connect to each address and port. Returns address -> error of those that fail."""
        endpoints = [Endpoint(address, port) for address, port in others.items()]
        failed = unreachable(endpoints, CONNECT_LIMIT_S)
        return {endpoints[i].address: why for i, why in failed.items()}

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


def make_report(
    address: str, port: int, model: str | None, ray_address: str | None = None
) -> NodeReport:
    """Return the report of this machine, which listens at an address and port."""
    gpus, name, total, free = _gpus()
    return NodeReport(
        socket.gethostname(),
        address,
        port,
        find_interfaces(),
        _versions(),
        gpus,
        name,
        total,
        free,
        _free_bytes(SHARED_MEMORY),
        cpu.memory().free,
        tuple(sorted(one.name for one in RDMA_DEVICES.glob("*"))),
        env.network_variables(),
        None if model is None else model_files(Path(model)),
        ray_address,
    )


def find_interfaces() -> dict[str, tuple[str, ...]]:
    """Return name -> addresses of the network interfaces that are up."""
    families = (socket.AF_INET, socket.AF_INET6)
    status = psutil.net_if_stats()
    return {
        name: tuple(one.address for one in addresses if one.family in families)
        for name, addresses in psutil.net_if_addrs().items()
        if name in status and status[name].isup
    }


def _versions() -> dict[str, str]:
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    for name in NCCL_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found["NCCL"] = version(name)
    return found


def _gpus() -> tuple[int, str, int, int]:
    try:
        found = cuda.device_properties()
    except ConfigError as error:
        return 0, str(error).removeprefix("device='cuda': ").partition(";")[0], 0, 0
    return found.device_count, found.name, found.total_bytes, cuda.memory().free


def _free_bytes(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def model_files(folder: Path) -> dict[str, str] | None:
    """Return file -> its size, and for small ones its digest. None: no folder with a model."""
    files = sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)})
    if not files:
        return None
    return {path.name: _describe_file(path) for path in files}


def _describe_file(path: Path) -> str:
    size = path.stat().st_size
    if path.suffix != ".json":
        return f"{size} bytes"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return f"{size} bytes, sha256 {digest}"
