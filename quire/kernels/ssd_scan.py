"""State space duality: the scan of Mamba-2, in chunks. In float32 whatever the inputs are.

    h(t) = exp(-dt(t) exp(a)) h(t - 1) + dt(t) x(t) B(t)        y(t) = h(t) C(t) + D x(t)

Within a chunk that is a product of matrices under a mask of decays; states go from chunk to chunk.
Axes: T tokens, H heads, P head size, G groups of heads, N state size, Q tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, SSD_SCAN, NativeOp, empty
from quire.kernels.state_rows import NATIVE_FIELDS, StateRows, has_whole_rows

CHUNK = 64


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for decodes, lengths, dtype, size, state in (
        (3, (), torch.float32, 8, 16),
        (1, (2, 130), torch.float32, 37, 20),
        (2, (70,), torch.bfloat16, 64, 40),
    ):
        tokens, at, spans = decodes + sum(lengths), decodes, []
        for length in lengths:
            spans.append((at, at + length))
            at += length
        count = decodes + len(lengths)
        rows = torch.randperm(count + 2, device=device)[:count]
        yield {
            "x": torch.randn(tokens, 4, size, device=device, dtype=dtype),
            "dt": torch.randn(tokens, 9, device=device, dtype=dtype)[:, 2:6],
            "b": torch.randn(tokens, 2, state, device=device, dtype=dtype),
            "c": torch.randn(tokens, 2, state, device=device, dtype=dtype),
            "state": torch.randn(count + 3, 4, size, state, device=device),
            "rows": StateRows(rows, decodes, tuple(spans)),
            "a_log": torch.rand(4, device=device),
            "d": torch.randn(4, device=device),
            "dt_bias": torch.randn(4, device=device),
            "dt_limit": (0.1, 3.0) if decodes == 1 else (0.0, float("inf")),
        }


_run = NativeOp(SSD_SCAN, "qqqqqqqqqq" + NATIVE_FIELDS + "qqqqqqqqqdd")


def _native(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    rows: StateRows,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
) -> Tensor:
    code, given, vectors = DTYPES.get(x.dtype), (x, dt, b, c), (a_log, d, dt_bias)
    if code is None or any(t.dtype != x.dtype or not has_whole_rows(t) for t in given):
        return NotImplemented
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in (state, *vectors)):
        return NotImplemented
    y = empty(x.shape, torch.float32)
    fields, _kept = rows.native_fields()
    _run(
        *(field for t in given for field in (t.data_ptr(), t.stride(0))), y.data_ptr(),
        state.data_ptr(), *fields, *(t.data_ptr() for t in vectors), *x.shape, *b.shape[1:],
        code, *dt_limit,
    )  # fmt: skip
    return y


@op(cases=_cases, native=_native, gpu="recurrent.ssd_scan")
def ssd_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    rows: StateRows,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
) -> Tensor:
    """x [T, H, P], dt [T, H], b and c [T, G, N], a_log and d [H] -> [T, H, P] float32.

    state [.., H, P, N] float32 becomes that after the last token of each row.
    """
    a = -torch.exp(a_log.float())
    steps = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    x, b, c = x.float(), b.float(), c.float()
    out, first = torch.empty_like(x), rows.decodes
    for at, source, own in rows.groups():
        found, y = _one_token(x[at], steps[at], b[at], c[at], state.index_select(0, source), a)
        state.index_copy_(0, own, found)
        out[at] = y
    for i, (start, end) in enumerate(rows.spans):
        own = rows.rows[first + i : first + i + 1]
        cut = slice(start, end)
        found, y = _chunks(x[cut], steps[cut], b[cut], c[cut], state.index_select(0, own)[0], a)
        state.index_copy_(0, own, found[None])
        out[cut] = y
    return out + x * d.float()[:, None]


def _one_token(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor, a: Tensor
) -> tuple[Tensor, Tensor]:
    """x [R, H, P], dt [R, H], b and c [R, G, N], state [R, H, P, N]."""
    each = x.shape[1] // b.shape[1]
    b, c = (one.repeat_interleave(each, dim=1)[:, :, None] for one in (b, c))  # [R, H, 1, N]
    decay = torch.exp(dt * a)[:, :, None, None]
    state = state * decay + (x * dt[:, :, None])[..., None] * b
    return state, (state * c).sum(-1)


def _chunks(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor, a: Tensor
) -> tuple[Tensor, Tensor]:
    """x [L, H, P], dt [L, H], b and c [L, G, N], state [H, P, N]. Padding has dt 0."""
    length, heads = dt.shape
    pad = -length % CHUNK
    x, b, c = (F.pad(one, (0, 0, 0, 0, 0, pad)).unflatten(0, (-1, CHUNK)) for one in (x, b, c))
    dt = F.pad(dt, (0, 0, 0, pad)).unflatten(0, (-1, CHUNK))  # [n, Q, H]
    each = heads // b.shape[2]
    total = (dt * a).cumsum(1).transpose(1, 2)  # [n, H, Q]: log of the decay since its start
    x = x * dt[..., None]
    mask = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(mask, -torch.inf).exp()
    scores = torch.einsum("nqgs,nkgs->ngqk", c, b).repeat_interleave(each, dim=1)  # [n, H, Q, Q]
    y = torch.einsum("nhqk,nkhp->nqhp", scores * decay, x)
    b, c = b.repeat_interleave(each, dim=2), c.repeat_interleave(each, dim=2)  # [n, Q, H, N]
    to_end = (total[..., -1:] - total).exp().transpose(1, 2)[..., None]  # [n, Q, H, 1]
    added = torch.einsum("nkhs,nkhp->nhps", b * to_end, x)
    whole = total[..., -1].exp()[..., None, None]  # [n, H, 1, 1]
    before = []
    for i in range(len(x)):
        before.append(state)
        state = state * whole[i] + added[i]
    since = total.exp().transpose(1, 2)[..., None]
    y += torch.einsum("nqhs,nhps->nqhp", c, torch.stack(before)) * since
    return state, y.flatten(0, 1)[:length]
