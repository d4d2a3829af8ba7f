"""Dense layers behind the pooling.

"2_Dense"             a folder of a sentence-transformers model
"colbert_linear.pt"   a file of tensors (BGE-M3)
""                    the tensors `linear` of the model's own checkpoint (ColBERT)
"""

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
    """Read the layer from where its section says. Raises WeightError."""
    own, name = folder / section.folder, "linear.weight"
    if own.suffix == ".pt":
        name, tensors = "weight", dict(files.iterate_pickled(own))
    elif not own.is_dir():
        raise WeightError(f"modules.json names {section.folder}, and there is no such folder")
    else:
        tensors = dict(files.iterate_tensors(own, False))
    if not section.folder:
        tensors = {key: value for key, value in tensors.items() if key.startswith("linear.")}
    bias = name.replace("weight", "bias")
    shapes: dict[str, tuple[int, ...]] = {name: (section.outputs, section.inputs)}
    if section.bias:
        shapes[bias] = (section.outputs,)
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if found != shapes:
        raise WeightError(
            f"{section.folder or folder}: the layer behind the pooling must be "
            f"{_describe(shapes)}, got {_describe(found)}"
        )
    loaded = {key: tensor.to(device, dtype, copy=True) for key, tensor in tensors.items()}
    return Dense(section, loaded[name], loaded.get(bias))


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
