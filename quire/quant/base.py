"""The seam of quantization: a Method decides how one linear layer stores and applies its weights.

It sees a layer as a `QuantizableLayer`: something with a weight, maybe a bias, and `put`. Which
method a
layer has is said by the checkpoint's config.json or the user (quire.config.quantization).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.formats.fp8_weight import Fp8Weight
from quire.kernels.formats.packed_weight import PackedWeight
from quire.weights.mapping import InitSpec, WeightShard


class QuantizableLayer(Protocol):
    """A layer whose `weight` [O, I] a method looks after."""

    @property
    def weight(self) -> Tensor | PackedWeight | Fp8Weight: ...

    def set_param(self, param: str, value: object) -> None: ...


class ExpertWeights(Protocol):
    """A layer that holds the weights of X experts in matrices stacked [X, O, I].

    The extra parameters of a matrix are named after it: `down_proj_weight_scale`.
    """

    matrices: tuple[str, ...]

    def set_param(self, param: str, value: object) -> None: ...


class Method(Protocol):
    """One way to hold weights."""

    name: str

    @property
    def extra_params(self) -> tuple[str, ...]:
        """Parameters a checkpoint must have beside `weight`: scales."""
        ...

    def layout(self, weight: tuple[WeightShard, ...], param: str) -> tuple[WeightShard, ...]:
        """How checkpoint tensors fill one of `extra`, beside a weight of this layout."""
        ...

    def dtype(self, param: str) -> torch.dtype | None:
        """What a parameter is stored in; None: the model's dtype."""
        ...

    def init_spec(self, inputs: int, param: str) -> InitSpec | None:
        """How stand-in values of a weight [.., inputs] or its scales are drawn.

        None: as the layer says.
        """
        ...

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        """Bring a freshly filled layer into the form that `apply` wants; frees the old form."""
        ...

    def process_experts_after_loading(self, bank: ExpertWeights) -> None:
        """The same for each matrix of a bank of experts."""
        ...

    def apply(self, layer: QuantizableLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, I] -> [T, O]."""
        ...
