"""Attention of the fallback: what attention modules of transformers call in place of their own.

The model's forward pass hands a keyword down to every attention call: `StepCalls`, which has the
step's attention and finds the layer of each call. Nothing is looked up globally.

Axes: T tokens in the step, H query heads, K kv heads, D size of keys, V size of values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import Attention, SharedAttention

if TYPE_CHECKING:
    from quire.attention.base import AttentionStep

NAME = "quire"
"""Of the attention function and of the experts function, in transformers' registries."""
KEYWORD = "quire_calls"
"""Of StepCalls, in a model's forward and in the attention function."""


class StepCalls:
    """Attention of one forward pass: finds the layer of each call."""

    def __init__(self, step: AttentionStep) -> None:
        self._step = step
        self._made: Counter[nn.Module] = Counter()

    def run(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """q [T, H, D], k [T, K, D], v [T, K, V] -> [T, H, V]."""
        layer = layers_of(module)[self._made[module]]
        self._made[module] += 1
        layer.sinks = sinks
        keys, values = k.shape[-1], v.shape[-1]
        if keys != values:  # the cache has one size for both; zeros change no score and no sum
            size = max(keys, values)
            q, k, v = (F.pad(x, (0, size - x.shape[-1])) for x in (q, k, v))
        shared = isinstance(layer, SharedAttention)
        out = self._step.run(q, None if shared else k, None if shared else v, layer)
        lazy_fusion.flush()  # code of transformers reads it
        return out[..., :values]

    @property
    def total(self) -> int:
        """Calls made so far."""
        return self._made.total()


CallLayer = Attention | SharedAttention


def set_layers(module: nn.Module, layers: Sequence[CallLayer]) -> None:
    """Give an attention module of transformers the layer of each call that it makes in a step."""
    owned = [layer for layer in layers if isinstance(layer, Attention)]
    module.add_module("quire_attention", nn.ModuleList(owned))
    module.__dict__["quire_layers"] = tuple(layers)


def layers_of(module: nn.Module) -> tuple[CallLayer, ...]:
    """Return what set_layers() has set."""
    found: tuple[CallLayer, ...] = module.__dict__["quire_layers"]
    return found


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    s_aux: Tensor | None = None,
    quire_calls: StepCalls | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Query [1, H, T, D], key [1, K, T, D], value [1, K, T, V] -> [1, T, H, V].

    Scale, window and soft cap are those of the layer, as the probe recorded them.
    """
    calls: StepCalls = quire_calls or module.__dict__[KEYWORD]
    q, k, v = (_rows_of_heads(x) for x in (query, key, value))
    return calls.run(module, q, k, v, s_aux)[None], None


def _rows_of_heads(x: Tensor) -> Tensor:
    """[1, H, T, D] -> [T, H, D], each head's numbers side by side."""
    rows = x[0].transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
