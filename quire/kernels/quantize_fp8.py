"""Quantizes rows of activations to e4m3, each with the scale of its largest magnitude.

    scale = max(|x|) / 448          over the row, or over each 128 inputs of it
    q     = x * (1 / scale)         rounded to nearest even

The largest element becomes exactly +-448, so nothing saturates; a row with an infinity or a NaN
becomes NaN, so the fault stays visible. With a `static` scale, of a checkpoint that fixed one, q is
clamped instead. Axes: T tokens in the step, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.fp8_weight import BLOCK_SIZE, E4M3, E4M3_MAX, scale_of
from quire.kernels.framework.op import op


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, i, dtype in [
        (1, 128, torch.float32),
        (7, 320, torch.bfloat16),
        (33, 1000, torch.bfloat16),
        (5, 4096, torch.float16),
        (3, 14336, torch.bfloat16),
    ]:
        x = (3 * torch.randn(t, i, device=device)).to(dtype)
        yield {"x": x}
        yield {"x": x, "block": BLOCK_SIZE}
        yield {"x": x, "static": torch.full((1,), 0.01, device=device)}
    wide = torch.randn(9, 512, device=device).to(torch.bfloat16)
    yield {"x": wide[:, 128:384]}
    yield {"x": torch.zeros(2, 64, device=device)}


@op(cases=_cases, atol=0.0, gpu="linear.quantize_fp8")
def quantize_fp8(x: Tensor, block: int = 0, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize every row of x.

    x: [T, I], rows may be strided. block: 0, or 128 inputs to a scale. static: float32 [1].
    Returns (q [T, I] e4m3, scale float32): scale [T], or [ceil(I / 128), T], the order in which
    the tensor cores' block product reads it.
    """
    assert block in (0, BLOCK_SIZE), block
    wide, (rows, inputs) = x.float(), x.shape
    if static is not None:
        q = (wide * (1.0 / static)).clamp(-E4M3_MAX, E4M3_MAX)
        return q.to(E4M3), static.expand(rows).contiguous()
    if not block:
        scale = scale_of(wide.abs().amax(1))
        return (wide * (1.0 / scale)[:, None]).to(E4M3), scale
    groups = torch.nn.functional.pad(wide, (0, -inputs % BLOCK_SIZE)).view(rows, -1, BLOCK_SIZE)
    scale = scale_of(groups.abs().amax(2))
    q = (groups * (1.0 / scale)[:, :, None]).view(rows, -1)[:, :inputs]
    return q.to(E4M3), scale.t().contiguous()
