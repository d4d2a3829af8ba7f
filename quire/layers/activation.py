"""Activations, under the names that config.json files use."""

from __future__ import annotations

from torch import Tensor, nn

from quire.kernels.act import ActivationKind, act, act_mul

ACTIVATION_KINDS: dict[str, ActivationKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
"""Name in config.json -> kind of the kernel."""


class Activation(nn.Module):
    """f(x)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.kind = ACTIVATION_KINDS[name]

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same."""
        return act(x, self.kind)


class GatedActivation(nn.Module):
    """f(gate) * up, of the two halves of x."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.kind = ACTIVATION_KINDS[name]

    def forward(self, x: Tensor) -> Tensor:
        """x [T, 2F], gate first -> [T, F]."""
        return act_mul(x, self.kind)
