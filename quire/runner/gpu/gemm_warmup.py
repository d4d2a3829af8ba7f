"""GEMM warm-up: multiplies by each shape of weight once, so that the library loads its kernels.

CUDA loads a kernel at its first launch, and waits for an idle device to do so: tens of milliseconds
in the middle of steps, repeatedly, because the library has kernels for many numbers of rows. On an
idle device, at start, all of them together take a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from quire.kernels.framework import lazy_fusion
from quire.layers import LMHead
from quire.models.base import LanguageModel

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def warm_up_gemms(
    model: LanguageModel | nn.Module, rows: Sequence[int], tokens: Sequence[int], max_tokens: int
) -> torch.dtype:
    """Multiply by one weight of each shape and kind, for each likely number of rows of a step.

    rows: of decode steps, ascending. tokens: of captured steps with prompts. Powers of two follow
    up to max_tokens, of the largest step.
    Returns the dtype of the activations between the layers.
    """
    assert isinstance(model, nn.Module)
    like = next(p for p in model.parameters() if p.dtype in FLOAT_DTYPES)
    further = [1 << bit for bit in range(rows[-1].bit_length(), max_tokens.bit_length())]
    for module in _distinct_linears(model):
        counts = rows if isinstance(module, LMHead) else sorted({*rows, *tokens, *further})
        for count in counts:
            dtype = getattr(module, "computed_in", None)  # of a head; None: the model's
            x = like.new_zeros((count, module.weight.shape[1]), dtype=dtype)
            module.weight.product(x, module.bias)
            lazy_fusion.flush()
    return like.dtype


def _distinct_linears(model: nn.Module) -> Iterator[Any]:
    """Return the linear layers without those equal to an earlier one."""
    seen: set[Any] = set()
    for module in model.modules():
        if getattr(module, "role", None) not in ("linear", "head"):
            continue
        weight: Any = module.weight
        key = (type(weight), tuple(weight.shape), weight.dtype, module.bias is None)
        if key not in seen:
            seen.add(key)
            yield module
