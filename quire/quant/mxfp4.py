"""Experts stored in four bits (MXFP4, as GPT-OSS is published), made plain as they are read.

    <name>_blocks  [X, rows, inputs / 32, 16] uint8     two e2m1 values a byte, the low half first
    <name>_scales  [X, rows, inputs / 32] uint8         a power of two per 32 values, biased by 127

Not a method of keeping weights: what the model gets is <name> [X, inputs, rows], the way
unquantized GPT-OSS checkpoints have it. Every value is exact in bfloat16.

Source: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from quire.errors import WeightError

BLOCKS, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127
Shapes = Iterable[tuple[str, Sequence[int]]]


def dequantized_shapes(shapes: Shapes) -> list[tuple[str, Sequence[int]]]:
    """What `unpacked` makes of tensors of these names and shapes."""
    found = dict(shapes)
    plain: list[tuple[str, Sequence[int]]] = []
    for name, shape in found.items():
        base = _base_name(name)
        if base is None or base + BLOCKS not in found or base + SCALES not in found:
            plain.append((name, shape))
        elif name.endswith(BLOCKS):
            plain.append((base, _dequantized_shape(base, shape, found[base + SCALES])))
    return plain


def dequantize_stream(
    tensors: Iterable[tuple[str, Tensor]], targets: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors on, those of a pair as one. targets: names of tensors that are wanted."""
    wanted, waiting = set(targets), dict[str, Tensor]()
    for name, tensor in tensors:
        base = _base_name(name)
        if base is None or base not in wanted:
            yield name, tensor
            continue
        waiting[name] = tensor
        if base + BLOCKS in waiting and base + SCALES in waiting:
            yield base, dequantize(waiting.pop(base + BLOCKS), waiting.pop(base + SCALES))


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """[X, rows, n, 16] and [X, rows, n], uint8 -> [X, 32 n, rows] bfloat16, a transposed view."""
    values = torch.tensor(VALUES + tuple(-v for v in VALUES), device=blocks.device)
    pair = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)  # of every byte
    shape = (*blocks.shape[:2], 32 * blocks.shape[2])
    out = torch.empty(shape, dtype=torch.bfloat16, device=blocks.device)
    for one, packed, powers in zip(out, blocks, scales):  # an expert at a time: fp32 is wide
        wide = pair[packed.long()].flatten(-2)  # [rows, n, 32]
        one.copy_(torch.ldexp(wide, (powers.int() - BIAS)[..., None]).flatten(-2))
    return out.transpose(1, 2)


def _base_name(name: str) -> str | None:
    for tail in (BLOCKS, SCALES):
        if name.endswith(tail):
            return name.removesuffix(tail)
    return None


def _dequantized_shape(name: str, blocks: Sequence[int], scales: Sequence[int]) -> tuple[int, ...]:
    if len(blocks) != 4 or blocks[3] != 16 or tuple(scales) != tuple(blocks[:3]):
        raise WeightError(
            f"{name}{BLOCKS} is {list(blocks)} and {name}{SCALES} {list(scales)}; MXFP4 has "
            "[experts, rows, blocks, 16] and [experts, rows, blocks]"
        )
    return blocks[0], 32 * blocks[2], blocks[1]
