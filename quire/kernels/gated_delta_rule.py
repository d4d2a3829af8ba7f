"""Gated delta rule: linear attention whose state forgets, and corrects what it holds of a key.

    S(t) = exp(g(t)) S(t - 1)       S(t) += beta(t) k(t) (v(t) - k(t) S(t))       o(t) = q(t) S(t)
    g(t) = -exp(a_log) softplus(a(t) + dt_bias)     beta(t) = sigmoid(b(t))

Keys and queries have length 1, and queries are scaled by 1 / sqrt(K). In float32 whatever the
inputs are. In a chunk the corrections are the solution of a triangular system.
Axes: T tokens, J key heads, H value heads, K and V their sizes, Q tokens of a chunk.

Source: Yang et al., Gated Delta Networks, arXiv 2412.06464
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import DELTA_RULE, DTYPES, NativeOp, empty
from quire.kernels.state_rows import NATIVE_FIELDS, StateRows, has_whole_rows

CHUNK = 64
EPS = 1e-6


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for decodes, lengths, dtype, keys, values in (
        (3, (), torch.float32, 8, 16),
        (1, (2, 130), torch.float32, 20, 75),
        (2, (70,), torch.bfloat16, 32, 40),
    ):
        tokens, at, spans = decodes + sum(lengths), decodes, []
        for length in lengths:
            spans.append((at, at + length))
            at += length
        count = decodes + len(lengths)
        rows = torch.randperm(count + 2, device=device)[:count]
        yield {
            "q": torch.randn(tokens, 2, keys, device=device, dtype=dtype),
            "k": torch.randn(tokens, 2, keys, device=device, dtype=dtype),
            "v": torch.randn(tokens, 4, values, device=device, dtype=dtype),
            "a": torch.randn(tokens, 9, device=device, dtype=dtype)[:, :4],
            "b": torch.randn(tokens, 4, device=device, dtype=dtype),
            "state": torch.randn(count + 3, 4, keys, values, device=device),
            "rows": StateRows(rows, decodes, tuple(spans)),
            "a_log": torch.rand(4, device=device),
            "dt_bias": torch.randn(4, device=device),
        }


_run = NativeOp(DELTA_RULE, "qqqqqqqqqqqq" + NATIVE_FIELDS + "qqqqqqqq")


def _native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    rows: StateRows,
    a_log: Tensor,
    dt_bias: Tensor,
) -> Tensor:
    code, given = DTYPES.get(q.dtype), (q, k, v, a, b)
    if code is None or any(t.dtype != q.dtype or not has_whole_rows(t) for t in given):
        return NotImplemented
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in (state, a_log, dt_bias)):
        return NotImplemented
    y = empty(v.shape, torch.float32)
    fields, _kept = rows.native_fields()
    _run(
        *(field for t in given for field in (t.data_ptr(), t.stride(0))), y.data_ptr(),
        state.data_ptr(), *fields, a_log.data_ptr(), dt_bias.data_ptr(), *q.shape[:2],
        v.shape[1], *state.shape[2:], code,
    )  # fmt: skip
    return y


@op(cases=_cases, native=_native, gpu="recurrent.gated_delta_rule")
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    rows: StateRows,
    a_log: Tensor,
    dt_bias: Tensor,
) -> Tensor:
    """q and k [T, J, K], v [T, H, V], a and b [T, H], a_log and dt_bias [H] -> [T, H, V] float32.

    state [.., H, K, V] float32 becomes that after the last token of each row.
    """
    g = -torch.exp(a_log.float()) * F.softplus(a.float() + dt_bias.float())
    beta = b.sigmoid().float()
    each = v.shape[1] // k.shape[1]
    q, k = (_unit(one.float()).repeat_interleave(each, dim=1) for one in (q, k))
    q, v = q * q.shape[-1] ** -0.5, v.float()
    out, first = torch.empty_like(v), rows.decodes
    for cut, source, own in rows.groups():
        found = state.index_select(0, source) * g[cut].exp()[..., None, None]
        change = (v[cut] - (found * k[cut][..., None]).sum(-2)) * beta[cut][..., None]
        found = found + k[cut][..., None] * change[..., None, :]
        state.index_copy_(0, own, found)
        out[cut] = (found * q[cut][..., None]).sum(-2)
    for i, (start, end) in enumerate(rows.spans):
        own, cut = rows.rows[first + i : first + i + 1], slice(start, end)
        before = state.index_select(0, own)[0]
        found, y = _chunks(q[cut], k[cut], v[cut], g[cut], beta[cut], before)
        state.index_copy_(0, own, found[None])
        out[cut] = y
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q and k [L, H, K], v [L, H, V], g and beta [L, H], state [H, K, V]. Padding has beta 0."""
    length, pad = len(q), -len(q) % CHUNK
    q, k, v, g, beta = (
        F.pad(one.transpose(0, 1).flatten(2), (0, 0, 0, pad)).unflatten(1, (-1, CHUNK))
        for one in (q, k, v, g[..., None], beta[..., None])
    )  # [H, n, Q, size]
    total = g[..., 0].cumsum(-1)  # [H, n, Q]: log of the decay since the chunk's start
    mask = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(mask, -torch.inf).exp()
    system = ((k * beta) @ k.transpose(-1, -2)) * decay
    since = total.exp()[..., None]
    right = torch.cat([v * beta, k * beta * since], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = (q @ k.transpose(-1, -2)) * decay
    q, k = q * since, k * (total[..., -1:] - total).exp()[..., None]
    whole = total[..., -1].exp()[..., None, None]
    out = []
    for i in range(q.shape[1]):
        new = values[:, i] - reads[:, i] @ state
        out.append(q[:, i] @ state + within[:, i] @ new)
        state = state * whole[:, i] + k[:, i].transpose(-1, -2) @ new
    return state, torch.cat(out, dim=1).transpose(0, 1)[:length]
