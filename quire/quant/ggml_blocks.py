"""Blocks of ggml types -> codes: one function per layout, over all blocks of a matrix at once.

    unpack("Q4_K", data)       uint8 [..., O, B, bytes] -> WeightCodes [..., O, I], exact
    dequantize("IQ2_S", data)  the same -> float32 [..., O, I], of types without codes

B blocks of a row. What the bytes mean: GGML_TYPES and the functions here. Types whose values come
from large tables (IQ1 to IQ3) have no codes; the package gguf has their tables.

Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.config.quant.ggml import TYPE_BY_NAME
from quire.errors import ConfigError
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.quantizers.floats import e2m1_table

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TERNARY_GROUP = 128
"""Values per scale of ternary weights: half of a block, as kernels have no larger groups."""
CHUNK_BLOCKS = 1 << 16
"""Blocks that gguf widens at once: it needs several times their size."""

Unpack = Callable[[Tensor], WeightCodes]


def has_codes(kind: str) -> bool:
    """Whether a type can be unpacked; else it can only be dequantized."""
    return kind in _UNPACK


def unpack(kind: str, data: Tensor) -> WeightCodes:
    """Unpack blocks, uint8 [..., B, bytes of the type] or [..., B * bytes]."""
    each = TYPE_BY_NAME[kind].nbytes
    if data.shape[-1] != each or data.dim() < 3:
        data = data.unflatten(-1, (-1, each))
    return _UNPACK[kind](data)


def dequantize(kind: str, data: Tensor) -> Tensor:
    """Widen blocks of a type without codes, by the package gguf. Raises ConfigError without it."""
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError:
        raise ConfigError(
            f"weights of type {kind} need tables of the package gguf: pip install quire-llm[gguf]"
        ) from None
    number = gguf.GGMLQuantizationType[kind]
    blocks = data.reshape(-1, TYPE_BY_NAME[kind].nbytes).cpu()
    wide = torch.empty(len(blocks), TYPE_BY_NAME[kind].values)
    for some, out in zip(blocks.split(CHUNK_BLOCKS), wide.split(CHUNK_BLOCKS)):
        out.copy_(torch.from_numpy(gguf.quants.dequantize(some.numpy(), number)))
    return wide.view(*data.shape[:-2], -1).to(data.device)


def widen(kind: str, data: Tensor) -> Tensor:
    """Blocks of any type -> float32 [..., I]."""
    return unpack(kind, data).dequantize() if has_codes(kind) else dequantize(kind, data)


def _half(data: Tensor) -> Tensor:
    """Bytes [..., B, 2] -> float16 [..., B]."""
    return data.contiguous().view(torch.float16).squeeze(-1)


def _fields(data: Tensor, bits: int) -> Tensor:
    """[..., n] -> [..., 8 / bits, n]: the fields of bytes, all of the lowest first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    return data[..., None, :] >> shifts[:, None] & (1 << bits) - 1


def _codes(q: Tensor, data: Tensor, bits: int, group: int, **how: Any) -> WeightCodes:
    """q [..., O, B, *parts] of data [..., O, B, bytes]."""
    return WeightCodes(q=q.flatten(data.dim() - 2), bits=bits, group=group, **how)


def _flat(factors: Tensor, data: Tensor) -> Tensor:
    """Factors [..., O, B, groups] -> [..., O, G]."""
    return factors.flatten(data.dim() - 2)


def _q4(data: Tensor, group: int, **how: Any) -> WeightCodes:
    scale = GroupFactors(_half(data[..., :2]))
    return _codes(_fields(data[..., -16:], 4), data, 4, group, scale=scale, **how)


def _q4_0(data: Tensor) -> WeightCodes:
    return _q4(data, 32, zero=8)


def _q4_1(data: Tensor) -> WeightCodes:
    return _q4(data, 32, offset=GroupFactors(_half(data[..., 2:4])))


def _q5(data: Tensor, **how: Any) -> WeightCodes:
    """Bit j of the four bytes before the low halves is bit 4 of value j."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    high = (data[..., -20:-16, None] >> shifts & 1).flatten(-2)
    q = _fields(data[..., -16:], 4).flatten(-2) | high << 4
    return _codes(q, data, 5, 32, scale=GroupFactors(_half(data[..., :2])), **how)


def _q5_0(data: Tensor) -> WeightCodes:
    return _q5(data, zero=16)


def _q5_1(data: Tensor) -> WeightCodes:
    return _q5(data, offset=GroupFactors(_half(data[..., 2:4])))


def _q8_0(data: Tensor) -> WeightCodes:
    """Signed bytes as unsigned ones above a zero of 128."""
    scale = GroupFactors(_half(data[..., :2]))
    return _codes(data[..., 2:] ^ 0x80, data, 8, 32, scale=scale, zero=128)


def _q2_k(data: Tensor) -> WeightCodes:
    factors = data[..., :16]
    q = _fields(data[..., 16:80].unflatten(-1, (2, 32)), 2)
    scale = GroupFactors(_half(data[..., 80:82]), _flat(factors & 15, data))
    offset = GroupFactors(-_half(data[..., 82:84]), _flat(factors >> 4, data))
    return _codes(q, data, 2, 16, scale=scale, offset=offset)


def _q3_k(data: Tensor) -> WeightCodes:
    """A value lacks 4 where its bit of the mask is 0: so the mask is bit 2, with a zero of 4."""
    high = _fields(data[..., :32], 1)  # [.., 8, 32]
    low = _fields(data[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3, -2)
    factors = _fields(data[..., 96:104], 4).flatten(-2) | (
        _fields(data[..., 104:108], 2).flatten(-2) << 4
    )
    signed = (factors.to(torch.int8) - 32).flatten(data.dim() - 2)
    scale = GroupFactors(_half(data[..., 108:110]), signed)
    return _codes(low | high << 2, data, 3, 16, scale=scale, zero=4)


def _k_factors(data: Tensor) -> dict[str, GroupFactors]:
    """Scale and offset of Q4_K and Q5_K: d, dmin, and 8 pairs of 6 bits in 12 bytes."""
    low, mid, high = data[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    mins = torch.cat((mid & 63, high >> 4 | mid >> 6 << 4), -1)
    return {
        "scale": GroupFactors(_half(data[..., :2]), _flat(scales, data)),
        "offset": GroupFactors(-_half(data[..., 2:4]), _flat(mins, data)),
    }


def _q4_k(data: Tensor) -> WeightCodes:
    q = _fields(data[..., 16:].unflatten(-1, (4, 32)), 4)
    return _codes(q, data, 4, 32, **_k_factors(data))


def _q5_k(data: Tensor) -> WeightCodes:
    high = _fields(data[..., 16:48], 1)  # [.., 8, 32]
    low = _fields(data[..., 48:].unflatten(-1, (4, 32)), 4).flatten(-3, -2)
    return _codes(low | high << 4, data, 5, 32, **_k_factors(data))


def _q6_k(data: Tensor) -> WeightCodes:
    low = _fields(data[..., :128].unflatten(-1, (2, 64)), 4).flatten(-2).unflatten(-1, (4, 32))
    high = _fields(data[..., 128:192].unflatten(-1, (2, 32)), 2)
    scales = data[..., 192:208].contiguous().view(torch.int8)
    scale = GroupFactors(_half(data[..., 208:210]), _flat(scales, data))
    return _codes(low | high << 4, data, 6, 16, scale=scale, zero=32)


def _iq4_nl(data: Tensor) -> WeightCodes:
    table = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=data.device)
    return _q4(data, 32, table=table)


def _iq4_xs(data: Tensor) -> WeightCodes:
    table = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=data.device)
    nibbles = torch.tensor([0, 4], dtype=torch.uint8, device=data.device)
    pairs = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=data.device)
    low = (data[..., 4:8, None] >> nibbles & 15).flatten(-2)
    high = (data[..., 2:4, None] >> pairs & 3).flatten(-2)
    signed = (low | high << 4).to(torch.int8) - 32
    q = _fields(data[..., 8:].unflatten(-1, (8, 16)), 4)
    scale = GroupFactors(_half(data[..., :2]), _flat(signed, data))
    return _codes(q, data, 4, 32, scale=scale, table=table)


def _mxfp4(data: Tensor) -> WeightCodes:
    """A power of two per block, 2 ** (byte - 127): the exponent of a bfloat16."""
    powers = data[..., 0].short()
    bits = torch.where(powers == 0, 0x40, powers << 7)  # 2 ** -127 is subnormal
    scale = GroupFactors(bits.view(torch.bfloat16))
    return _codes(
        _fields(data[..., 1:], 4), data, 4, 32, scale=scale, table=e2m1_table(data.device)
    )


def _nvfp4(data: Tensor) -> WeightCodes:
    """Scales are e4m3 of which the sign bit means nothing, and NaN means 0."""
    scales = data[..., :4] & 127
    scales = torch.where(scales == 127, 0, scales).view(torch.float8_e4m3fn)
    q = _fields(data[..., 4:].unflatten(-1, (4, 8)), 4)
    one = torch.ones(*data.shape[:-2], 1, device=data.device)
    scale = GroupFactors(one, _flat(scales, data))
    return _codes(q, data, 4, 16, scale=scale, table=e2m1_table(data.device))


def _ternary(q: Tensor, data: Tensor) -> WeightCodes:
    scale = _half(data[..., -2:]).repeat_interleave(
        TYPE_BY_NAME["TQ1_0"].values // TERNARY_GROUP, -1
    )
    return _codes(q, data, 2, TERNARY_GROUP, scale=GroupFactors(scale), zero=1)


def _tq1_0(data: Tensor) -> WeightCodes:
    """Five digits to base 3 in a byte, read by multiplying: the digit is the high byte of 3 x."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=data.device)[:, None]
    parts = (data[..., :32], powers), (data[..., 32:48], powers), (data[..., 48:52], powers[:4])
    digits = [(part[..., None, :] * by).flatten(-2) for part, by in parts]
    q = (torch.cat(digits, -1).short() * 3 >> 8).to(torch.uint8)
    return _ternary(q, data)


def _tq2_0(data: Tensor) -> WeightCodes:
    return _ternary(_fields(data[..., :64].unflatten(-1, (2, 32)), 2), data)


def _q1_0(data: Tensor) -> WeightCodes:
    """A bit is a sign: the codes are 0 and 2, around a zero of 1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    q = (data[..., 2:, None] >> shifts & 1) << 1
    return _codes(q, data, 2, 128, scale=GroupFactors(_half(data[..., :2])), zero=1)


def _q2_0(data: Tensor) -> WeightCodes:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=data.device)
    q = data[..., 2:, None] >> shifts & 3
    return _codes(q, data, 2, 64, scale=GroupFactors(_half(data[..., :2])), zero=1)


_UNPACK: dict[str, Unpack] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
}
