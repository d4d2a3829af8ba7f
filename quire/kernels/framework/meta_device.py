"""Meta device: runs the GPU side of an engine on tensors without memory, to find its kernels.

Shapes, strides and dtypes are all that the choice of a kernel depends on, and meta tensors have
them. So a whole engine is built and stepped for a described GPU, in a process that has none: every
launch is recorded and nothing runs. Streams, events and graphs do nothing here. Only for processes
that do nothing else: Triton's driver stays replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from quire.kernels.framework.kernel_spec import KernelSpec
from quire.kernels.framework.op import LIBRARY_GEMMS
from quire.kernels.gpu.runtime.fast_launch import TritonKernel
from quire.kernels.gpu.runtime.target import GpuTarget, describe_target

WARP_SIZE = 32


@contextmanager
def trace_kernels(note: Callable[[KernelSpec], None]) -> Iterator[None]:
    """Within, no kernel is launched, and `note` is called once with each that would have been."""
    from triton import knobs

    seen: set[KernelSpec] = set()

    def skip(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        function = fn.jit_function.fn
        spec = KernelSpec(
            function.__module__, function.__name__, str(compile["specialization_data"])
        )
        if spec not in seen:
            seen.add(spec)
            note(spec)
        return True

    recorded: set[Any] = set()
    record = TritonKernel._compile_and_launch

    def record_once(kernel: TritonKernel, key: tuple[Any, ...], *launch: Any) -> None:
        if (id(kernel), key) not in recorded:  # Triton would look it up in vain each time
            recorded.add((id(kernel), key))
            record(kernel, key, *launch)

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = skip
    try:
        with mock.patch.object(TritonKernel, "_compile_and_launch", record_once):
            yield
    finally:
        knobs.runtime.jit_cache_hook = before


@contextmanager
def on_meta_device(target: GpuTarget) -> Iterator[None]:
    """Within, meta tensors stand for tensors of a GPU, and torch.cuda needs no device."""
    fakes: dict[str, Any] = {
        "Event": _Event,
        "Stream": _Stream,
        "CUDAGraph": _Graph,
        "graph_pool_handle": lambda: None,
        "current_stream": lambda device=None: _Stream(),
        "stream": lambda stream: nullcontext(),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
    }
    set_triton_target(target)
    describe_target(target)
    try:
        with (
            mock.patch.multiple(torch.cuda, **fakes),
            mock.patch.multiple(torch, **_torch_functions()),
            mock.patch.multiple(Tensor, create=True, **_tensor_functions()),
        ):
            yield
    finally:
        describe_target(None)


def set_triton_target(target: GpuTarget) -> None:
    """Make Triton compile for this GPU, whatever the process has."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = target.capability
    driver.set_active(_FixedTargetDriver(GPUTarget("cuda", 10 * major + minor, WARP_SIZE)))


@dataclass(frozen=True, slots=True)
class _FixedTargetDriver:
    """Triton's driver, with the methods that tracing and compiling use."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class MetaGroup:
    """A torch.distributed backend of so many ranks, of which there is the first: it exchanges
    nothing."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0

    def allreduce(self, tensors: Sequence[Tensor]) -> MetaGroup:
        return self

    def broadcast(self, x: Tensor, root: int) -> MetaGroup:
        return self

    def _allgather_base(self, out: Tensor, x: Tensor) -> MetaGroup:
        return self

    def alltoall_base(
        self, out: Tensor, x: Tensor, taken: Sequence[int], given: Sequence[int]
    ) -> MetaGroup:
        return self

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> MetaGroup:
        return self

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> MetaGroup:
        return self

    def wait(self) -> None:
        pass


class _Event:
    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Graph:
    """A capture runs the body; a replay does nothing."""

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass


def _tensor_functions() -> dict[str, Any]:
    """Methods of tensors: no host memory is pinned, and copies from meta to the host do nothing."""
    copy, move = Tensor.copy_, Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target = kwargs.get("device", args[0] if args else None)
        if self.is_meta and isinstance(target, (str, torch.device)) and str(target) == "cpu":
            return torch.zeros(self.shape, dtype=self.dtype)
        return move(self, *args, **kwargs)

    def copy_(self: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if self.is_cpu and source.is_meta else copy(self, source, *args, **kwargs)

    def pin_memory(self: Tensor) -> Tensor:
        return self

    def cpu(self: Tensor) -> Tensor:
        return to(self, "cpu")

    return {"to": to, "copy_": copy_, "pin_memory": pin_memory, "cpu": cpu}


def _torch_functions() -> dict[str, Any]:
    """Functions of torch: of products with a given result nothing is asked, as for some there is no
    body for meta tensors."""
    empty = torch.empty

    def empty_unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs)

    empty_like = torch.empty_like

    def quick_empty_like(x: Tensor, **kwargs: Any) -> Tensor:
        if kwargs or not x.is_contiguous():
            return empty_like(x, **kwargs)
        return empty(x.shape, dtype=x.dtype, device=x.device)  # torch's own is Python for meta

    def skip_with_result(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def product(*args: Any, **kwargs: Any) -> Tensor:
            out: Tensor | None = kwargs.get("out")
            return function(*args, **kwargs) if out is None else out

        return product

    products = {name: skip_with_result(getattr(torch, name)) for name in LIBRARY_GEMMS}
    return {"empty": empty_unpinned, "empty_like": quick_empty_like, **products}
