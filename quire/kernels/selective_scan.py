"""Selective scan: that of Mamba-1, whose states decay at a rate of each channel and number.

    h(t) = exp(-dt(t) exp(a)) h(t - 1) + dt(t) x(t) B(t)      y(t) = (h(t) C(t) + D x(t)) silu(z(t))

A chunk is scanned in doublings: after k passes each token has the sum over the 2^k before it.
In float32 whatever the inputs are. Axes: T tokens, C channels, N state size, Q tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, SELECTIVE_SCAN, NativeOp, empty
from quire.kernels.state_rows import NATIVE_FIELDS, StateRows, has_whole_rows

CHUNK = 64


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for decodes, lengths, dtype, channels, state in (
        (3, (), torch.float32, 8, 4),
        (1, (2, 130), torch.float32, 87, 16),
        (2, (70,), torch.bfloat16, 100, 5),
    ):
        tokens, at, spans = decodes + sum(lengths), decodes, []
        for length in lengths:
            spans.append((at, at + length))
            at += length
        count = decodes + len(lengths)
        yield {
            "x": torch.randn(tokens, channels, device=device, dtype=dtype),
            "dt": torch.randn(tokens, channels, device=device, dtype=dtype),
            "b": torch.randn(tokens, 2 * state, device=device, dtype=dtype)[:, state:],
            "c": torch.randn(tokens, state, device=device, dtype=dtype),
            "z": torch.randn(tokens, channels, device=device, dtype=dtype),
            "state": torch.randn(count + 3, channels, state, device=device),
            "rows": StateRows(
                torch.randperm(count + 2, device=device)[:count], decodes, tuple(spans)
            ),
            "a_log": torch.rand(channels, state, device=device),
            "d": torch.randn(channels, device=device),
        }


_run = NativeOp(SELECTIVE_SCAN, "qqqqqqqqqqqq" + NATIVE_FIELDS + "qqqqqq")


def _native(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    z: Tensor,
    state: Tensor,
    rows: StateRows,
    a_log: Tensor,
    d: Tensor,
) -> Tensor:
    code, given = DTYPES.get(x.dtype), (x, dt, b, c, z)
    if code is None or any(t.dtype != x.dtype or not has_whole_rows(t) for t in given):
        return NotImplemented
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in (state, a_log, d)):
        return NotImplemented
    y = empty(x.shape, x.dtype)
    fields, _kept = rows.native_fields()
    _run(
        *(field for t in given for field in (t.data_ptr(), t.stride(0))), y.data_ptr(),
        state.data_ptr(), *fields, a_log.data_ptr(), d.data_ptr(), *x.shape, b.shape[1], code,
    )  # fmt: skip
    return y


@op(cases=_cases, native=_native, gpu="recurrent.selective_scan")
def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    z: Tensor,
    state: Tensor,
    rows: StateRows,
    a_log: Tensor,
    d: Tensor,
) -> Tensor:
    """x, dt and z [T, C], b and c [T, N], a_log [C, N], d [C] -> [T, C] in the dtype of x.

    state [.., C, N] float32 becomes that after the last token of each row.
    """
    rate, gate, kind = -torch.exp(a_log.float()), F.silu(z.float()), x.dtype
    steps, x, b, c = F.softplus(dt.float()), x.float(), b.float(), c.float()
    out, first = torch.empty_like(x), rows.decodes
    for cut, source, own in rows.groups():
        decay = torch.exp(steps[cut][:, :, None] * rate)
        found = state.index_select(0, source) * decay
        found = found + (steps[cut] * x[cut])[:, :, None] * b[cut][:, None, :]
        state.index_copy_(0, own, found)
        out[cut] = (found * c[cut][:, None, :]).sum(-1)
    for i, (start, end) in enumerate(rows.spans):
        own = rows.rows[first + i : first + i + 1]
        carried = state.index_select(0, own)[0]
        for at in range(start, end, CHUNK):
            cut = slice(at, min(at + CHUNK, end))
            states = _scan(steps[cut], x[cut], b[cut], rate, carried)
            out[cut] = (states * c[cut, None, :]).sum(-1)
            carried = states[-1]
        state.index_copy_(0, own, carried[None])
    return ((out + x * d.float()) * gate).to(kind)


def _scan(dt: Tensor, x: Tensor, b: Tensor, rate: Tensor, carried: Tensor) -> Tensor:
    """States after each of Q tokens: [Q, C, N]. carried: [C, N] before them."""
    decay = torch.exp(dt[:, :, None] * rate)
    states = (dt * x)[:, :, None] * b[:, None, :]
    states[0] += decay[0] * carried
    reach = 1
    while reach < len(dt):
        states = torch.cat([states[:reach], states[reach:] + decay[reach:] * states[:-reach]])
        decay = torch.cat([decay[:reach], decay[reach:] * decay[:-reach]])
        reach *= 2
    return states
