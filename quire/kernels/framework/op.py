"""An op is one function with one contract and up to three bodies.

    reference   plain PyTorch, fp32 inside: the documentation, the fallback, the oracle of the tests
    native      compiled C++ on CPU tensors; returns NotImplemented for arguments it does not take
    gpu         Triton, in a module of quire/kernels/gpu, imported at the first call on CUDA or
                meta tensors (quire.kernels.framework.meta_device)

The decorated function *is* the reference. `cases` are the arguments that the tests use.
A gpu module has two functions of the op's own arguments:

    outputs(*args)         allocates what the op returns; NotImplemented: the reference must do it
    launch(outs, *args)    starts the kernels that fill it; never waits for the device

So what an op returns exists before its kernel runs, and quire.kernels.framework.lazy_fusion may
launch two as one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from quire.kernels.framework import lazy_fusion
from quire.kernels.native import library

LIBRARY_GEMMS = ("mm", "addmm", "bmm", "_scaled_mm")
"""torch's matrix products that ops call: the library's kernels, and none of ours."""

P = ParamSpec("P")
R = TypeVar("R")
Cases = Callable[[torch.device], Iterable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Op:
    """One op and all its bodies. `atol` is for bfloat16; float32 is held to 1e-4."""

    name: str
    reference: Callable[..., Any]
    cases: Cases
    atol: float
    native: Callable[..., Any] | None = None
    gpu: GpuBody | None = None


class GpuBody:
    """The module of an op's GPU kernels, imported at its first use."""

    __slots__ = ("_launch", "_module", "_outputs")

    def __init__(self, module: str) -> None:
        self._module = module
        self._outputs: Callable[..., Any] | None = None
        self._launch: Callable[..., None] | None = None

    @property
    def outputs(self) -> Callable[..., Any]:
        if self._outputs is None:
            self._load()
        assert self._outputs is not None
        return self._outputs

    @property
    def launch(self) -> Callable[..., None]:
        if self._launch is None:
            self._load()
        assert self._launch is not None
        return self._launch

    def _load(self) -> None:
        module = importlib.import_module(f"quire.kernels.gpu.{self._module}")
        self._outputs, self._launch = module.outputs, module.launch


OPS: dict[str, Op] = {}


def op(
    *,
    cases: Cases,
    atol: float = 2e-2,
    native: Callable[..., Any] | None = None,
    gpu: str | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated reference with its kernels; return the function that picks one."""

    def wrap(reference: Callable[P, R]) -> Callable[P, R]:
        name = reference.__name__
        body = GpuBody(gpu) if gpu else None
        OPS[name] = Op(name, reference, cases, atol, native, body)

        @functools.wraps(reference)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            where = _device_type(args[0] if args else next(iter(kwargs.values())))
            if where == "cpu" and native is not None and library.available():
                out = native(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            elif where != "cpu" and body is not None:
                out = body.outputs(*args, **kwargs)
                if out is not NotImplemented:
                    lazy_fusion.submit(name, body.launch, out, args, kwargs)
                    return out
            if where != "cpu":
                lazy_fusion.flush()  # the reference reads results of ops before it
            return reference(*args, **kwargs)

        return call

    return wrap


def _device_type(first: Any) -> str:
    if isinstance(first, (list, tuple)):
        first = first[0]
    if first.is_cpu:
        return "cpu"
    return str(first.device.type)
