"""Activations of pooled states, by the names of classes in torch.nn, in any case."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import ConfigError

Activation = Callable[[Tensor], Tensor]
"""[n, d] float -> [n, d]"""

ACTIVATIONS: dict[str, Activation] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "logsoftmax": lambda x: torch.log_softmax(x, dim=-1),
    "logsigmoid": functional.logsigmoid,
    "relu": torch.relu,
    "relu6": functional.relu6,
    "leakyrelu": functional.leaky_relu,
    "elu": functional.elu,
    "selu": functional.selu,
    "celu": functional.celu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "mish": functional.mish,
    "softplus": functional.softplus,
    "softsign": functional.softsign,
    "hardtanh": functional.hardtanh,
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
}
"""With the parameters that torch.nn gives them by default."""


def activation_named(name: str) -> Activation:
    """Return the activation of torch.nn's name, such as "torch.nn.modules.activation.Tanh".

    It computes in float64: in float32 the last bit depends on a number's place in the tensor, and
    so on the other rows of the step. Raises ConfigError.
    """
    found = ACTIVATIONS.get(name.rsplit(".", 1)[-1].lower())
    if found is None:
        raise ConfigError(
            f"the activation {name!r:.80} of pooled states is not known; "
            f"supported: {', '.join(ACTIVATIONS)}"
        )
    if found is ACTIVATIONS["identity"]:
        return found
    return lambda x: found(x.double()).to(x.dtype)
