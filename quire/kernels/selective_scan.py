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
from quire.kernels.state_rows import StateRows

CHUNK = 64


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for decodes, lengths in ((3, ()), (1, (2, 130))):
        tokens, at, spans = decodes + sum(lengths), decodes, []
        for length in lengths:
            spans.append((at, at + length))
            at += length
        count = decodes + len(lengths)
        yield {
            "x": torch.randn(tokens, 8, device=device),
            "dt": torch.randn(tokens, 8, device=device),
            "b": torch.randn(tokens, 4, device=device),
            "c": torch.randn(tokens, 4, device=device),
            "z": torch.randn(tokens, 8, device=device),
            "state": torch.randn(count + 3, 8, 4, device=device),
            "rows": StateRows(
                torch.randperm(count + 2, device=device)[:count], decodes, tuple(spans)
            ),
            "a_log": torch.rand(8, 4, device=device),
            "d": torch.randn(8, device=device),
        }


@op(cases=_cases)
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
