"""Fast launch starts Triton kernels in two microseconds of host time instead of fifteen.

Triton's own call binds arguments, inspects each and prints its options into a key, every time. Here
the first call of a kind does that; the compiled kernel is kept under a key of dtypes and constants,
and later calls pass pointers straight to its launcher.

A kernel's parameters come in this order: tensors, numbers, constexprs. Kernels are not specialised
on numbers (a step's T changes all the time); strides and sizes of a model are constexprs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from quire.kernels.framework import late_work
from quire.kernels.gpu.runtime.pdl import supports_pdl

Grid = tuple[int, int, int]


def _make_cache_keys_stable() -> None:
    """Make Triton's key of a kernel independent of the kernels whose keys were computed before it.

    Triton 3.6 merges the global constants of a called function before that function's key, and so
    its list of constants, is computed: another process found other keys for the same kernel.
    """
    finder = getattr(triton.runtime.jit, "DependenciesFinder", None)
    merge = getattr(finder, "_update_hash", None)
    if finder is None or merge is None:
        return

    def compute_and_merge(self: Any, function: Any) -> None:
        function.cache_key  # noqa: B018 - a property that computes
        merge(self, function)

    finder._update_hash = compute_and_merge


_make_cache_keys_stable()


class TritonKernel:
    """A jitted function and its compiled forms. interpreted: it runs on the CPU, for tests."""

    def __init__(
        self, body: Callable[..., None], numbers: Sequence[str], jit: Callable[..., Any]
    ) -> None:
        self._jit: Any = jit(do_not_specialize=list(numbers))(body)
        self._name = f"{body.__module__}.{body.__qualname__}"
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any, Any, int]] = {}
        self.interpreted = not isinstance(self._jit, triton.runtime.JITFunction)

    def __call__(
        self,
        grid: Grid,
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
        consts: tuple[Any, ...],
        warps: int = 4,
        stages: int = 3,
        pdl: bool = False,
        tiles: tuple[Any, ...] = (),
        maxnreg: int | None = None,
    ) -> None:
        """Start the kernel on the current stream. pdl: it may start before the previous one ends,
        if the device supports that.

        tiles: tensor descriptors, parameters between the tensors and the numbers. The constexprs
        must distinguish all that differs in them. maxnreg: registers of a thread at its start.
        """
        pointers = [0 if t is None else t.data_ptr() for t in tensors]
        key: tuple[Any, ...] = (consts, warps, stages, pdl, maxnreg)
        key += tuple([None if t is None else t.dtype for t in tensors])
        for pointer in pointers:
            if pointer & 15:  # compiled for what is aligned now; another mix is another kernel
                key += tuple([p & 15 for p in pointers])
                break
        held = self._compiled.get(key)
        if held is None:
            self._compile_and_launch(
                key, grid, (*tensors, *tiles, *numbers, *consts), warps, stages, pdl, maxnreg
            )
            return
        run, function, middle, given = held
        stream = torch._C._cuda_getCurrentRawStream(tensors[given].get_device())  # type: ignore[union-attr]
        run(*grid, stream, function, *middle, *pointers, *tiles, *numbers, *consts)

    def preload(self, specialization: str) -> Any:
        """Compile for `specialization` (or read it from Triton's cache) without a launch."""
        return self._jit.preload(specialization)

    def _compile_and_launch(
        self,
        key: tuple[Any, ...],
        grid: Grid,
        args: tuple[Any, ...],
        warps: int,
        stages: int,
        pdl: bool,
        maxnreg: int | None,
    ) -> None:
        if self.interpreted:
            self._jit[grid](*args)
            return
        given = next(i for i, one in enumerate(args) if isinstance(one, Tensor))
        pdl = pdl and supports_pdl(args[given].device)
        ready, began = late_work.is_ready(), time.perf_counter()
        loaded = self._ids_of_loaded() if ready else set()
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": pdl}
        if maxnreg is not None:
            options["maxnreg"] = maxnreg
        with late_work.preparing():
            done = self._jit[grid](*args, **options)
        if done is not None:  # None: a trace, which notes the kernel and skips its launch
            # a key has None at the same places: that tensor is given at each later launch
            self._compiled[key] = (*_launch_handle(done), given)
            if ready and id(done) not in loaded:
                name = f"{self._name}{key[0]} with {warps} warps"
                late_work.note_kernel(name, time.perf_counter() - began)

    def _ids_of_loaded(self) -> set[int]:
        """Return the ids of this body's kernels that Triton has loaded to a device."""
        kernels = [
            one for cache in self._jit.device_caches.values() for one in [*cache[0].values()]
        ]
        return {id(one) for one in kernels if getattr(one, "module", None) is not None}


def _launch_handle(compiled: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """(launcher, function, the arguments between it and the kernel's own).

    The launcher is a Python call around a C one, which allocates scratch memory. A kernel that
    needs none is started by the C one, if Triton's version is one whose signature is known.
    """
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    no_hooks = (None, None, None)
    if (
        not triton.__version__.startswith("3.6.")
        or run.global_scratch_size
        or run.profile_scratch_size
    ):
        return run, function, (packed, *no_hooks)
    middle = (run.launch_cooperative_grid, run.launch_pdl, None, None, packed, *no_hooks)
    return run.launch, function, middle


def kernel(
    *numbers: str, jit: Callable[..., Any] = triton.jit
) -> Callable[[Callable[..., None]], TritonKernel]:
    """Make a Triton body a TritonKernel. numbers: its parameters that are plain numbers."""
    return lambda body: TritonKernel(body, numbers, jit)
