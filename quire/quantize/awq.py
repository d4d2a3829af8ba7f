"""AWQ: inputs of large activations get finer codes, by a scale that an earlier layer takes back.

    (x / s) @ (w * s).T = x @ w.T          s [I] = rms(x) ** a

1 / s is folded into what makes x: a norm, or the rows of the matrix before (values before the
output projection where each head has its own, the up projection before the down projection), so
the result is exact. The exponent a is the one with the least output error; 0 is rounding to
nearest.

Source: https://arxiv.org/abs/2306.00978. Axes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.formats.weight_codes import WeightCodes
from quire.models.base import ModelConfig
from quire.quantize.errors import output_error
from quire.quantize.source import SourceTensor

MODEL_TYPES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3"), 0.0),
    **dict.fromkeys(("gemma2", "gemma3_text"), 1.0),
}
"""Models whose norms and projections follow one another as `folds_of` states -> offset of norms."""
STEPS = 20
"""Exponents that are tried, from 0 to 1."""

Rounding = Callable[[Tensor], WeightCodes]


def require_folds(model_type: str) -> None:
    """Raise ConfigError for a model whose scales cannot be folded."""
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"--algorithm awq folds scales into the layers of {', '.join(MODEL_TYPES)}; the model "
            f"is {model_type}: use gptq"
        )


@dataclass(frozen=True, slots=True)
class Fold:
    """Matrices with one input, and the tensors that 1 / s is folded into.

    norm: the weight of a norm. rows: (tensor, its first row), whose rows make the inputs.
    """

    matrices: tuple[SourceTensor, ...]
    norm: SourceTensor | None = None
    rows: tuple[tuple[SourceTensor, int], ...] = ()


@dataclass(slots=True)
class LayerScales:
    """What the tensors of a layer are multiplied by; float32 vectors by tensor names.

    columns: [I] of a matrix. rows: [O] of a matrix or a bias, 1 where they stay. norms: new values.
    """

    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)

    def scaled(self, name: str, weight: Tensor) -> Tensor:
        """A tensor as it is stored."""
        weight = weight.float()
        if (rows := self.rows.get(name)) is not None:
            weight = weight * (rows[:, None] if weight.dim() == 2 else rows)
        columns = self.columns.get(name)
        return weight if columns is None else weight * columns

    def unscaled(self, name: str, weight: Tensor) -> Tensor:
        """A stored matrix in terms of the source's."""
        if (columns := self.columns.get(name)) is not None:
            weight = weight / columns
        return weight if (rows := self.rows.get(name)) is None else weight / rows[:, None]


def folds_of(tensors: Sequence[SourceTensor], config: ModelConfig) -> list[Fold]:
    """Return the folds of a decoder layer. tensors: of the layer."""
    by_name: dict[str, SourceTensor] = {}
    for one in tensors:
        _, _, inner = one.module.partition(f"layers.{one.number}.")
        by_name[f"{inner}.{one.name.rpartition('.')[2]}"] = one

    def find(*names: str) -> tuple[SourceTensor, ...]:
        return tuple(by_name[f"{name}.weight"] for name in names if f"{name}.weight" in by_name)

    def rows_of(part: str, whole: str, count: int) -> tuple[tuple[SourceTensor, int], ...]:
        """The matrix and the bias whose last `count` rows are the part's."""
        found = []
        for name in (part, whole):
            for param in ("weight", "bias"):
                if (one := by_name.get(f"{name}.{param}")) is not None:
                    found.append((one, one.shape[0] - count))
        return tuple(found)

    attention = find(*(f"self_attn.{one}_proj" for one in ("q", "k", "v", "qkv")))
    mlp = find("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj")
    second = find("pre_feedforward_layernorm") or find("post_attention_layernorm")
    found = [Fold(attention, one) for one in find("input_layernorm")]
    found += [Fold(mlp, one) for one in second]
    if config.heads == config.kv_heads:
        width = config.heads * config.head_dim
        values = rows_of("self_attn.v_proj", "self_attn.qkv_proj", width)
        found.append(Fold(find("self_attn.o_proj"), rows=values))
    ups = rows_of("mlp.up_proj", "mlp.gate_up_proj", config.mlp)
    found.append(Fold(find("mlp.down_proj"), rows=ups))
    for name in by_name:
        if name.startswith("mlp.experts.") and name.endswith(".down_proj.weight"):
            at = name.removesuffix(".down_proj.weight")
            (down,) = find(f"{at}.down_proj")
            ups = rows_of(f"{at}.up_proj", "", down.shape[1])
            found.append(Fold((down,), rows=ups))
    return [one for one in found if one.matrices]


def find_scales(
    folds: Sequence[Fold],
    tensors: Mapping[str, Tensor],
    grams: Mapping[tuple[str, str, int], Tensor],
    quantized: Callable[[SourceTensor], bool],
    rounding: Rounding,
    offset: float,
) -> LayerScales:
    """Search the scales of a layer. tensors: its tensors; quantized: whether one is.

    offset: of norms. A fold with a matrix that stays plain is left out.
    """
    out = LayerScales()
    for fold in folds:
        gram = grams.get(fold.matrices[0].scale_group)
        if gram is None or not all(map(quantized, fold.matrices)):
            continue
        if any(len(one.shape) == 2 and not quantized(one) for one, _ in fold.rows):
            continue
        weights = [tensors[one.name].float() for one in fold.matrices]
        scale = _search(weights, gram, rounding)
        if scale is None:
            continue
        if fold.norm is not None:
            scale = _fold_norm(fold.norm, tensors[fold.norm.name], scale, offset, out)
        for one, first in fold.rows:
            rows = out.rows.setdefault(one.name, torch.ones(one.shape[0], device=scale.device))
            rows[first:] /= scale
        for one in fold.matrices:
            out.columns[one.name] = scale
    return out


def _fold_norm(
    norm: SourceTensor, weight: Tensor, scale: Tensor, offset: float, out: LayerScales
) -> Tensor:
    """Divide a norm's weight; returns the scale that its rounded weight has."""
    wide = weight.float() + offset
    folded = (wide / scale - offset).to(weight.dtype)
    after = folded.float() + offset
    usable = (wide != 0) & (after != 0)
    out.norms[norm.name] = torch.where(usable, folded, weight)
    return torch.where(usable, wide / torch.where(usable, after, 1.0), 1.0)


def _search(weights: Sequence[Tensor], gram: Tensor, rounding: Rounding) -> Tensor | None:
    """The scale [I] with the least output error; None: none is better than 1."""
    size = gram.diagonal().sqrt()
    used = size[size > 0]
    if not len(used):
        return None
    size = torch.where(size > 0, size, used.min())
    whole = [float(((one @ gram) * one).sum()) for one in weights]
    best, least = None, float("inf")
    for step in range(STEPS):
        scale = size ** (step / STEPS)
        scale = scale / (scale.max() * scale.min()).sqrt()
        scale = scale.clamp(1e-4, 1e4)
        error = sum(
            output_error(one, rounding(one * scale).dequantize() / scale, gram) * total
            for one, total in zip(weights, whole)
        )
        if error < least:
            best, least = (scale if step else None), error
    return best
