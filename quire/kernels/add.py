"""Element-wise ops: the residual add without a norm, a factor, a limit, the soft cap of logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.act import NATIVE_CODES, elementwise_native, run_elementwise
from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, empty

_SHAPES = [
    (1, 64, torch.float32),
    (7, 101, torch.bfloat16),
    (33, 1000, torch.bfloat16),
    (2, 64, torch.float16),
]


def _add_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, e, dtype in _SHAPES:
        x = torch.randn(t, e, device=device).to(dtype)
        y = torch.randn(t, e, device=device).to(dtype)
        yield {"x": x, "y": y}


def _softcap_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, e, dtype in _SHAPES:
        yield {"x": 40 * torch.randn(t, e, device=device).to(dtype), "cap": 30.0}


def _scale_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, e, dtype in _SHAPES:
        yield {"x": torch.randn(t, e, device=device).to(dtype), "factor": 54.545}


def _clip_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, e, dtype in _SHAPES:
        yield {"x": 6 * torch.randn(t, e, device=device).to(dtype), "limit": 5.1}


def _add_native(x: Tensor, y: Tensor) -> Tensor:
    code = DTYPES.get(x.dtype)
    if code is None or y.dtype != x.dtype or y.shape != x.shape:
        return NotImplemented
    if not x.is_contiguous() or not y.is_contiguous():
        return NotImplemented
    out, n = empty(x.shape, x.dtype), x.numel()
    run_elementwise(
        x.data_ptr(), y.data_ptr(), n, n, out.data_ptr(), 1, n, NATIVE_CODES["add"], code, 0.0
    )
    return out


def _softcap_native(x: Tensor, cap: float) -> Tensor:
    return elementwise_native(x, NATIVE_CODES["softcap"], cap)


def _scale_native(x: Tensor, factor: float) -> Tensor:
    return elementwise_native(x, NATIVE_CODES["scale"], factor)


def _clip_native(x: Tensor, limit: float) -> Tensor:
    return elementwise_native(x, NATIVE_CODES["clip"], limit)


@op(cases=_add_cases, native=_add_native, gpu="elementwise.add")
def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, of one shape and dtype, as a new tensor."""
    return (x.float() + y.float()).to(x.dtype)


@op(cases=_scale_cases, native=_scale_native, gpu="elementwise.scale")
def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor, rounded once, as a new tensor."""
    return (x.float() * factor).to(x.dtype)


@op(cases=_clip_cases, native=_clip_native, gpu="elementwise.clip")
def clip(x: Tensor, limit: float) -> Tensor:
    """x between -limit and limit, as a new tensor."""
    return x.clamp(-limit, limit)


@op(cases=_softcap_cases, native=_softcap_native, gpu="elementwise.softcap")
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), as a new tensor: logits between -cap and cap."""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)
