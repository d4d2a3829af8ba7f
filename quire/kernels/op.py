"""An op is one function with one contract and up to three bodies.

    reference   plain PyTorch, fp32 inside: the documentation, the fallback, the oracle of the tests
    native      compiled C++ on CPU tensors; returns NotImplemented for arguments it does not take
    triton      a kernel for CUDA tensors (none yet)

The decorated function *is* the reference. `cases` are the arguments the tests walk over, so there
is no second list to keep in step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from quire.kernels.native import library

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
    triton: Callable[..., Any] | None = None


OPS: dict[str, Op] = {}


def op(
    *,
    cases: Cases,
    atol: float = 2e-2,
    native: Callable[..., Any] | None = None,
    triton: Callable[..., Any] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """File the decorated reference with its kernels, and return the function that picks one."""

    def wrap(reference: Callable[P, R]) -> Callable[P, R]:
        name = reference.__name__
        OPS[name] = Op(name, reference, cases, atol, native, triton)

        @functools.wraps(reference)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            where = _device(args[0] if args else next(iter(kwargs.values())))
            fast = None
            if where == "cpu" and native is not None and library.active():
                fast = native
            elif where == "cuda":
                fast = triton
            if fast is not None:
                out = fast(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            return reference(*args, **kwargs)

        return call

    return wrap


def _device(first: Any) -> str:
    if isinstance(first, (list, tuple)):
        first = first[0]
    if first.is_cpu:
        return "cpu"
    return str(first.device.type)
