"""Online softmax: scores in log2 units and one softmax step, shared by the attention kernels.

All functions are inlined into the decode, prefill and merge kernels. Scores are kept times
log2(e), because the hardware's exponential is base two. A row without keys has the
running maximum LOWEST, finite, so that no difference of two infinities can arise.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST_SCORE = tl.constexpr(-1.0e30)


@triton.jit
def scale_and_softcap(dot, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores in log2 units from raw products, with the soft cap if there is one."""
    if SOFTCAP:
        # tanh(y) = 1 - 2 / (1 + exp(2 y)); exact at both ends, where exp is 0 or infinite
        grown = tl.exp2(dot * (scale / softcap * 2.0 * LOG2E))
        return (1.0 - 2.0 / (1.0 + grown)) * (softcap * LOG2E)
    return dot * (scale * LOG2E)


@triton.jit
def bias_rows(bias_ptr, head, live, REACH: tl.constexpr):
    """Pointers to each head's bias at distance 0, in [H, 2 REACH + 1]; dead heads read head 0."""
    return bias_ptr + tl.where(live, head, 0) * (2 * REACH + 1) + REACH


@triton.jit
def add_distance_bias(scores, distance, rows, REACH: tl.constexpr):
    """Scores [M, N] in log2 units plus a bias by distance [M or 1, N], cut at REACH. rows: [M]."""
    near = tl.minimum(tl.maximum(distance, -REACH), REACH)
    return scores + tl.load(rows[:, None] + near) * LOG2E


@triton.jit
def begin_sums(M: tl.constexpr, D: tl.constexpr):
    """(acc [M, D], total [M], top [M]) of rows without a key."""
    top = tl.full([M], LOWEST_SCORE, tl.float32)
    return tl.zeros([M, D], tl.float32), tl.zeros([M], tl.float32), top


@triton.jit
def online_softmax_step(s, v, v_scales, acc, total, top, SCALES: tl.constexpr,
                        IEEE: tl.constexpr):  # fmt: skip
    """One online-softmax step: scores s [M, N] and values v [N, D] into (acc, total, top).

    v_scales: [N] scales of the values, if SCALES.
    """
    higher = tl.maximum(top, tl.max(s, 1))
    shrink = tl.exp2(top - higher)
    p = tl.exp2(s - higher[:, None])
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    if SCALES:
        if v.dtype == tl.float16:  # weights times scales may be too small for it; values are not
            v = (v.to(tl.float32) * v_scales[:, None]).to(tl.float16)
        else:
            p = p * v_scales[None, :]
    if IEEE:
        acc = tl.dot(p, v, acc, input_precision="ieee")
    else:
        acc = tl.dot(p.to(v.dtype), v, acc)
    return acc, total, higher


@triton.jit
def load_scales(scales_ptr, block, at, live, kh, K: tl.constexpr, B: tl.constexpr,
                S_N: tl.constexpr, S_H: tl.constexpr, S_T: tl.constexpr,
                SCALES: tl.constexpr):  # fmt: skip
    """Scales of keys and of values at positions `at` in these blocks; 0 where not live."""
    k_scales = tl.zeros_like(at).to(tl.float32)
    v_scales = k_scales
    if SCALES:
        where = scales_ptr + block.to(tl.int64) * S_N + kh * S_H + at % B * S_T
        k_scales = tl.load(where, mask=live, other=0.0)
        v_scales = tl.load(where + K * S_H, mask=live, other=0.0)
    return k_scales, v_scales


@triton.jit
def dot_qk(q, k, k_scales, SCALES: tl.constexpr, IEEE: tl.constexpr):
    """q [M, D] times k [N, D] transposed, fp32; times the keys' scales [N], if SCALES."""
    if IEEE:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(k))
    if SCALES:
        scores = scores * k_scales[None, :]
    return scores


@triton.jit
def join_sink(acc, total, top, sink):
    """Add one more logit per row, in log2 units, to the denominator only."""
    higher = tl.maximum(top, sink)
    shrink = tl.exp2(top - higher)
    return acc * shrink[:, None], total * shrink + tl.exp2(sink - higher)


@triton.jit
def join_part(acc, total, top, part, its_total, its_top):
    """(acc, total, top) with those of another part of the context."""
    higher = tl.maximum(top, its_top)
    shrink = tl.exp2(top - higher)
    weight = tl.exp2(its_top - higher)
    total = total * shrink + its_total * weight
    return acc * shrink[:, None] + part * weight[:, None], total, higher


@triton.jit
def normalize(acc, total):
    """acc / total, and zeros for rows without a key."""
    return tl.where((total == 0.0)[:, None], 0.0, acc / total[:, None])
