"""Converted decoders: models that generate, with no output head or with one that classifies.

Weights of a head that classifies are in the checkpoint, under one of a few names, or they are the
rows that the output head has for some tokens.

Axes: n pooled states, E hidden, L labels
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from quire.errors import WeightError
from quire.layers import Activation, ClassifierLinear, scale, softcap
from quire.models.base import LabelTokens, ModelConfig

NAMES = ("score", "classifier", "v_head")
"""Modules with the weights of such a head in checkpoints. `v_head`: InternLM2's reward models."""


class TokenLogits(ClassifierLinear):
    """Logits of a few tokens, as the output head gives them, or the difference of two."""

    def __init__(self, inputs: int, c: ModelConfig, labels: LabelTokens, bias: bool) -> None:
        super().__init__(inputs, len(labels.ids), bias, float32=c.head_dtype == "float32")
        self.difference = labels.difference
        self.logit_scale, self.logit_softcap = c.logit_scale, c.logit_softcap

    def forward(self, x: Tensor) -> Tensor:
        """x [n, E] float32 -> [n, L] float32."""
        y = super().forward(scale(x, self.logit_scale) if self.logit_scale != 1.0 else x)
        y = y if self.logit_softcap is None else softcap(y, self.logit_softcap)
        return y[:, 1:] - y[:, :1] if self.difference else y


@dataclass(frozen=True, slots=True)
class LabelRows:
    """Rows of the output head, as further tensors of a checkpoint."""

    sources: Mapping[str, str]  # name of a tensor with a row per token -> parameter of the head
    ids: tuple[int, ...]

    def shapes(
        self, shapes: Iterable[tuple[str, Sequence[int]]]
    ) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield (name, shape) of all tensors, and of the rows."""
        for name, shape in shapes:
            yield name, shape
            if name in self.sources:
                yield f"{NAMES[0]}.{self.sources[name]}", (len(self.ids), *shape[1:])

    def tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, and the rows."""
        for name, tensor in tensors:
            yield name, tensor
            if name in self.sources:
                yield f"{NAMES[0]}.{self.sources[name]}", tensor[list(self.ids)]


def replace_head(
    model: Any,
    c: ModelConfig,
    names: Collection[str],
    *,
    head: str,
    inputs: int,
    gone: Collection[str],
) -> None:
    """Remove the output head of a model, and add the one of its config, if any.

    names: the tensors of the checkpoint; none: of dummy weights. head: path of the output head,
    which reads `inputs` numbers; gone: paths of all modules that are removed.
    Sets `score_name`, the path of what classifies, and `label_rows`. Raises WeightError.
    """
    weights = model.weights
    for path in gone:
        parent, _, leaf = path.rpartition(".")
        model.get_submodule(parent)._modules[leaf] = None
    absent = tuple(f"{path}." for path in gone)
    tie = {ours: of for ours, of in weights.tie.items() if not f"{ours}.".startswith(absent)}
    model.weights = replace(weights, absent=weights.absent + absent, tie=tie)
    if c.head == "none":
        _leave_out(model, (*NAMES, "linear"))  # the last is ColBERT's, of the pooler
        return
    made: nn.Module
    places = {f"{at.layer}.{at.param}": name for name in names for at in [weights.target(name)]}
    if c.label_tokens is not None:
        rows = [f"{head}.weight", f"{weights.tie.get(head) if c.tied else None}.weight"]
        found = [places[row] for row in rows if row in places][:1]
        if names and not found:
            raise WeightError(
                "the checkpoint has no output head, so classifier_from_token cannot be used; "
                "leave it out if the checkpoint has a head that classifies"
            )
        sources = dict.fromkeys(found, "weight")
        if f"{head}.bias" in places:
            sources[places[f"{head}.bias"]] = "bias"
        model.label_rows = LabelRows(sources, c.label_tokens.ids)
        name = NAMES[0]
        made = TokenLogits(inputs, c, c.label_tokens, "bias" in sources.values())
    else:
        own = next((one for one in NAMES if any(at.startswith(f"{one}.") for at in places)), None)
        name = own or NAMES[0]
        made = _score(inputs, c, {at.removeprefix(f"{name}.") for at in places})
    _leave_out(model, [one for one in NAMES if one != name])
    model.add_module(name, made)
    model.score_name = name


def _leave_out(model: Any, heads: Iterable[str]) -> None:
    """Skip the tensors of heads that the checkpoint may have beside the one that is used."""
    absent = tuple(f"{name}." for name in heads)
    model.weights = replace(model.weights, absent=model.weights.absent + absent)


def _score(inputs: int, c: ModelConfig, params: Collection[str]) -> nn.Module:
    """One matrix, or two with a ReLU between, as reward models of Qwen2 have.

    params: names of its tensors in the checkpoint, such as "weight" or "2.bias", among others.
    """
    float32 = c.head_dtype == "float32"
    if "2.weight" not in params:
        return ClassifierLinear(inputs, c.labels, "bias" in params, float32=float32)
    return nn.Sequential(
        ClassifierLinear(inputs, inputs, "0.bias" in params, float32=float32),
        Activation("relu"),
        ClassifierLinear(inputs, c.labels, "2.bias" in params, float32=float32),
    )
