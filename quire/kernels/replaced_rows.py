"""Rows of weights that an adapter has in place of the model's: whole matrices, or a few tokens.

Of an embedding the vector of a token is replaced, of an output layer the output. Outputs and
tokens that an adapter does not replace, and rows without an adapter, keep their bits.

Axes: S slots of adapters, N rows that a slot has room for, I inputs, O outputs, V vocabulary, T
rows of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework.op import op


@dataclass(frozen=True, slots=True, eq=False)
class ReplacedRows:
    """The rows of one layer.

    rows: [S, N, I]. outputs: int32 [S, N], of which output each is, -1: none. bias: [S, N]; None:
    adapters have none.
    """

    rows: Tensor
    outputs: Tensor
    bias: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        slots: int,
        count: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool = False,
    ) -> ReplacedRows:
        """Room for `count` rows of each slot; none is replaced."""
        return cls(
            torch.zeros(slots, count, inputs, dtype=dtype, device=device),
            torch.full((slots, count), -1, dtype=torch.int32, device=device),
            torch.zeros(slots, count, dtype=dtype, device=device) if bias else None,
        )

    @property
    def numel(self) -> int:
        """Numbers of rows and biases."""
        return self.rows.numel() + (0 if self.bias is None else self.bias.numel())


def _random_rows(slots: int, count: int, inputs: int, outputs: int, **how: Any) -> ReplacedRows:
    made = ReplacedRows.allocate(slots, count, inputs, **how)
    made.rows.copy_(torch.randn(made.rows.shape))
    if made.bias is not None:
        made.bias.copy_(torch.randn(made.bias.shape))
    for slot in range(1, slots):  # the first has none
        own = torch.randperm(outputs)[: count - slot % 2]
        made.outputs[slot, : len(own)] = own.int()
    return made


def _linear_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, i, o, n, bias, dtype in [
        (1, 16, 9, 9, False, torch.float32),
        (7, 40, 30, 4, True, torch.bfloat16),
        (20, 33, 12, 12, True, torch.float32),
    ]:
        yield {
            "y": torch.randn(t, o, device=device).to(dtype),
            "x": torch.randn(t, i, device=device).to(dtype),
            "weight": _random_rows(3, n, i, o, dtype=dtype, device=device, bias=bias),
            "slots": torch.randint(-1, 3, (t,), dtype=torch.int32, device=device),
            "bias": None if n == o else torch.randn(o, device=device).to(dtype),
        }


@op(cases=_linear_cases)
def replace_outputs(
    y: Tensor, x: Tensor, weight: ReplacedRows, slots: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Replace outputs in y [T, O], the product of x [T, I], in place, and return it.

    slots: int32 [T], -1: none. bias: [O], added to outputs without a bias of their own. On a GPU
    every row is multiplied with every slot: a CUDA graph cannot wait for which are used.
    """
    if y.is_cpu:
        for slot in slots.unique().tolist():
            known = weight.outputs[slot] >= 0
            if slot >= 0 and known.any():
                at, to = (slots == slot).nonzero(), weight.outputs[slot][known].long()
                own = bias if bias is None else bias[to]
                if weight.bias is not None:
                    own = weight.bias[slot][known].to(x.dtype)
                made = F.linear(x[at[:, 0]], weight.rows[slot][known].to(x.dtype), own)
                y[at, to] = made.to(y.dtype)
        return y
    padded = F.pad(y, (0, 1))  # what is not replaced is written to the last column
    for slot in range(len(weight.rows)):
        to = weight.outputs[slot].long()
        own = bias if bias is None else bias[to.clamp(min=0)]
        if weight.bias is not None:
            own = weight.bias[slot].to(x.dtype)
        made = F.linear(x, weight.rows[slot].to(x.dtype), own).to(y.dtype)
        padded.scatter_(1, torch.where((slots == slot)[:, None] & (to >= 0), to, y.shape[1]), made)
    return y.copy_(padded[:, :-1])


def _embedding_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, v, e, n, dtype in [(1, 9, 16, 9, torch.float32), (30, 50, 24, 7, torch.bfloat16)]:
        weight = _random_rows(3, n, e, v, dtype=dtype, device=device)
        places = torch.full((3, v), -1, dtype=torch.int32, device=device)
        for slot in range(3):
            known = weight.outputs[slot] >= 0
            places[slot, weight.outputs[slot][known].long()] = known.nonzero()[:, 0].int()
        yield {
            "y": torch.randn(t, e, device=device).to(dtype),
            "ids": torch.randint(0, v, (t,), device=device, dtype=torch.int32),
            "rows": weight.rows,
            "places": places,
            "slots": torch.randint(-1, 3, (t,), dtype=torch.int32, device=device),
            "scale": 1.5,
        }


@op(cases=_embedding_cases)
def replace_vectors(
    y: Tensor, ids: Tensor, rows: Tensor, places: Tensor, slots: Tensor, scale: float = 1.0
) -> Tensor:
    """Replace vectors of tokens in y [T, E] in place, and return it.

    ids: int32 [T]. rows: [S, N, E], multiplied by scale. places: int32 [S, V], where in them a
    token's is, -1: it is not replaced. slots: int32 [T], -1: none.
    """
    slot = slots.clamp(min=0).long()
    at = places[slot, ids.long()].long()
    own = (rows[slot, at.clamp(min=0)].float() * scale).to(y.dtype)
    return y.copy_(torch.where(((slots >= 0) & (at >= 0))[:, None], own, y))
