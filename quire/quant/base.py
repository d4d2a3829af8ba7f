"""The seam of quantization: a Method decides how one linear layer stores and applies its weights.

It sees a layer as a `Weighted`: something with a weight, maybe a bias, and `put`. The checkpoint
says which method it needs (`quantization_config`); `detect` finds it or refuses by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.packed import PackedWeight


class Weighted(Protocol):
    """A layer whose `weight` [O, I] a method looks after."""

    @property
    def weight(self) -> Tensor | PackedWeight: ...

    def put(self, param: str, value: object) -> None: ...


class Method(Protocol):
    """One way to hold weights."""

    name: str

    def finish(self, layer: Weighted) -> None:
        """Bring a freshly filled layer into the form that `apply` wants; frees the old form."""
        ...

    def apply(self, layer: Weighted, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, I] -> [T, O]."""
        ...


def detect(hf: Mapping[str, object]) -> str | None:
    """The method this config.json asks for. None: plain weights.

    Raises ConfigError for a quantized checkpoint: no method but plain weights is built in yet.
    """
    for key in ("quantization_config", "compression_config"):
        found = hf.get(key)
        if found:
            method = found.get("quant_method", "unnamed") if isinstance(found, dict) else found
            raise ConfigError(
                f"config.json: {key} asks for the quantization method {method!r}; only "
                "unquantized checkpoints (float32, float16, bfloat16) are supported"
            )
    return None
