"""Tensors of a KV cache of 8 bits: codes, and in some formats a scale for each token and head.

    number = code * scale      scale = amax / limit of the head's vector, or given with the layer

A vector with a NaN or an infinity gets the scale NaN, so that what is read is not finite either.

Axes: N blocks, K kv heads, B tokens of a block, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config.memory.kv_format import KVFormat

CODE_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Dtype of codes -> the largest magnitude that is written."""


def split_memory(memory: Tensor, form: KVFormat, size: int, block: int) -> tuple[Tensor, Tensor]:
    """Views of memory [N, 2, K, bytes] uint8: codes [N, 2, K, B, D] and scales [N, 2, K, B]."""
    codes = memory[..., : block * size].view(getattr(torch, form.dtype))
    at = form.scale_offset(size, block)
    scales = memory[..., at : at + 4 * block].view(torch.float32)
    return codes.unflatten(3, (block, size)), scales


def allocate_blocks(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Views of new memory with scales, all bits set: codes of `shape` [N, 2, K, B, D], scales."""
    form = KVFormat(str(dtype).removeprefix("torch."), dtype.itemsize, per_token=True)
    *heads, block, size = shape
    bytes_shape = (*heads, form.head_bytes(size, block))
    memory = torch.full(bytes_shape, 0xFF, dtype=torch.uint8, device=device)
    return split_memory(memory, form, size, block)


def has_dense_heads(cache: Tensor) -> bool:
    """Whether the tokens of a head are one run, and heads, planes and blocks follow at even steps.

    cache: [N, 2, K, B, D]. Heads may be followed by scales.
    """
    step = head_step(cache)
    _, planes, heads, _, size = cache.shape
    wanted = (planes * heads * step, heads * step, step, size, 1)
    # torch gives axes of one any stride
    return all(n == 1 or a == b for n, a, b in zip(cache.shape, cache.stride(), wanted))


def head_step(cache: Tensor) -> int:
    """Elements from head to head, of codes [N, 2, K, B, D] or scales [N, 2, K, B]."""
    return cache.stride(1) // cache.shape[2]


def _divide(x: Tensor, by: float | Tensor) -> Tensor:
    """x / by. On a GPU torch would multiply by the inverse of a number, which rounds twice."""
    return x / (by if isinstance(by, Tensor) else torch.full((), by, device=x.device))


def encode(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of x / scale, float32 inside; beyond the limits of the dtype they are cut."""
    limit = CODE_LIMITS[dtype]
    codes = _divide(x.float(), scale).clamp(-limit, limit)
    return codes.round().nan_to_num(0.0).to(dtype) if dtype == torch.int8 else codes.to(dtype)


def encode_per_token(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes [T, K, D], scales [T, K] float32) of vectors x [T, K, D]."""
    amax = x.float().abs().amax(-1)
    scales = torch.where(amax.isfinite(), _divide(amax, CODE_LIMITS[dtype]), torch.nan)
    divisor = torch.where(scales == 0, 1.0, scales)
    return encode(x, divisor[..., None], dtype), scales
