"""Dense layers behind the pooling: folders of a sentence-transformers model, such as 2_Dense."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quire.config.engine_config import DenseSection
from quire.errors import WeightError
from quire.kernels.framework import lazy_fusion
from quire.kernels.linear import linear, pack
from quire.pooling.activations import activation_named
from quire.weights import files


class Dense:
    """activation(x W^T + b)."""

    def __init__(self, section: DenseSection, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = pack(weight), bias
        self._activation = activation_named(section.activation)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, inputs] -> [n, outputs]"""
        y = linear(x, self.weight, self.bias)
        lazy_fusion.flush()
        return self._activation(y)


def load_dense(
    section: DenseSection, folder: Path, dtype: torch.dtype, device: torch.device
) -> Dense:
    """Read the layer from its own folder in the model's. Raises WeightError."""
    own = folder / section.folder
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (section.outputs, section.inputs)}
    if section.bias:
        shapes["linear.bias"] = (section.outputs,)
    if not own.is_dir():
        raise WeightError(f"modules.json names {section.folder}, and there is no such folder")
    tensors = dict(files.iterate_tensors(own, False))
    if not section.folder:  # the model's own
        tensors = {name: tensor for name, tensor in tensors.items() if name in shapes}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != shapes:
        raise WeightError(
            f"{section.folder or folder}: its weights must be {_describe(shapes)} by its "
            f"config.json, got {_describe(found)}"
        )
    loaded = {name: tensor.to(device, dtype, copy=True) for name, tensor in tensors.items()}
    return Dense(section, loaded["linear.weight"], loaded.get("linear.bias"))


def dummy_dense(
    section: DenseSection, dtype: torch.dtype, device: torch.device, seed: int
) -> Dense:
    """Return a layer with random weights."""
    draws = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        weight = torch.randn(section.outputs, section.inputs, generator=draws)
        bias = torch.randn(section.outputs, generator=draws) if section.bias else None
    weight = (weight * section.inputs**-0.5).to(device, dtype)
    return Dense(section, weight, None if bias is None else bias.to(device, dtype))


def _describe(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())) or "none"
