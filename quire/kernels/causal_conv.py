"""Causal convolution over time of each channel, with the last inputs of a sequence as its state.

Axes: T tokens, C channels, W width of the kernel, N rows of the state, S rows of the step
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import CAUSAL_CONV, DTYPES, NativeOp, address_of, empty
from quire.kernels.state_rows import NATIVE_FIELDS, StateRows


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype, decodes, lengths, channels, width in (
        (torch.float32, 3, (), 12, 4),
        (torch.float32, 1, (2, 70), 70, 3),
        (torch.bfloat16, 2, (70,), 150, 4),
    ):
        tokens, at, spans = decodes + sum(lengths), decodes, []
        for length in lengths:
            spans.append((at, at + length))
            at += length
        count = decodes + len(lengths)
        rows = torch.randperm(count + 2, device=device)[:count]
        yield {
            "x": torch.randn(tokens, channels + 9, device=device, dtype=dtype)[:, :channels],
            "state": torch.randn(count + 3, channels, width - 1, device=device, dtype=dtype),
            "rows": StateRows(rows, decodes, tuple(spans)),
            "weight": torch.randn(channels, width, device=device, dtype=dtype),
            "bias": torch.randn(channels, device=device, dtype=dtype),
            "silu": width == 4,
        }


_run = NativeOp(CAUSAL_CONV, "qqqqqq" + NATIVE_FIELDS + "qqqqq")
_WIDTHS = (2, 3, 4)


def _native(
    x: Tensor, state: Tensor, rows: StateRows, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    code, (tokens, channels) = DTYPES.get(x.dtype), x.shape
    others = [t for t in (state, weight, bias) if t is not None]
    if code is None or x.stride(1) != 1 or weight.shape[1] not in _WIDTHS:
        return NotImplemented
    if any(t.dtype != x.dtype or not t.is_contiguous() for t in others):
        return NotImplemented
    y = empty((tokens, channels), x.dtype)
    fields, _kept = rows.native_fields()
    _run(
        x.data_ptr(), x.stride(0), y.data_ptr(), state.data_ptr(), weight.data_ptr(),
        address_of(bias), *fields, tokens, channels, weight.shape[1], silu, code,
    )  # fmt: skip
    return y


@op(cases=_cases, native=_native, gpu="recurrent.causal_conv")
def causal_conv(
    x: Tensor, state: Tensor, rows: StateRows, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """x [T, C], weight [C, W] -> [T, C]. state [N, C, W - 1] gets the last inputs of each row."""
    steps, first = state.shape[2], rows.decodes
    kernel = weight.float()
    shift = None if bias is None else bias.float()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for at, source, own in rows.groups():
        window = torch.cat([state.index_select(0, source), x[at][:, :, None]], dim=-1)  # [R, C, W]
        state.index_copy_(0, own, window[:, :, 1:])
        y = (window.float() * kernel).sum(-1)
        out[at] = _act(y if shift is None else y + shift, silu)
    for i, (start, end) in enumerate(rows.spans):
        own = rows.rows[first + i : first + i + 1]
        window = torch.cat([state.index_select(0, own), x[start:end].T[None]], dim=-1)
        state.index_copy_(0, own, window[:, :, -steps:])
        y = F.conv1d(window.float(), kernel[:, None], shift, groups=x.shape[1])[0].T
        out[start:end] = _act(y, silu)
    return out


def _act(y: Tensor, silu: bool) -> Tensor:
    return F.silu(y) if silu else y
