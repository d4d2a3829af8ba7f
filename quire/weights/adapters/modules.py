"""Names of modules in Hugging Face checkpoints, as places in the served model.

The model's own mapping of checkpoint names (quire.weights.mapping.Weights) decides, so an adapter
may use every name that a checkpoint may.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from quire.config.model_identity import LANGUAGE_PREFIXES, is_tower_tensor
from quire.weights.mapping import Weights

ModuleKind = Literal["linear", "embedding", "head", "experts"]

USUAL_PARTS = {
    **{f"{part}_proj": ("qkv_proj", i) for i, part in enumerate("qkv")},
    **{f"{part}_proj": ("gate_up_proj", i) for i, part in enumerate(("gate", "up"))},
}
"""Names of parts in adapters for models whose checkpoints have the fused layer only (Phi-3)."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleShape:
    """One layer of the served model, before it is cut over ranks."""

    kind: ModuleKind
    outputs: tuple[int, ...]  # of each part; of a bank: of gate, up and down of one expert
    inputs: int  # of an embedding: its rows, and `outputs` is their length
    experts: int = 0
    turned: bool = False  # a checkpoint's tensor of a whole bank is [X, inputs, outputs]
    interleaved: bool = False  # gate and up take turns in it
    order: Tensor | None = (
        None  # of rows of a checkpoint's tensor of all parts; None: theirs is ours
    )
    has_bias: bool = False
    scale: float = 1.0  # of an embedding: what its vectors are multiplied by
    head_dim: int = 0  # of layers whose outputs are heads
    refusal: str = ""  # why adapters cannot change the layer

    def inputs_of(self, part: int) -> int:
        """Inputs of one part."""
        return self.outputs[0] if self.kind == "experts" and part == 2 else self.inputs


class ModulePlace(NamedTuple):
    """Where a module is. part None: it is all parts of the layer; expert: of one, of a bank."""

    layer: str
    shape: ModuleShape
    part: int | None
    expert: int | None = None
    transposed: bool = False  # the checkpoint has the weight as [I, O]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterModules:
    """What adapters can change in a model: its layers, and the names that checkpoints use."""

    weights: Weights
    layers: Mapping[str, ModuleShape]  # by the model's names
    tied: Mapping[str, str] = field(default_factory=dict)  # layer -> the layer with its weight
    labels_are_rows: bool = False  # its labels are rows of the output head of the checkpoint

    def find(self, module: str) -> ModulePlace | None:
        """Return the place of a module by its name in a checkpoint; None: there is none.

        The adapter may be of the model inside of a wrapper, or of the model without its prefix.
        """
        outer = max((p for p in LANGUAGE_PREFIXES if module.startswith(p)), key=len, default="")
        inner = module[len(outer) :]
        places = (self._find(name) for name in dict.fromkeys((module, inner, f"model.{inner}")))
        return next((place for place in places if place is not None), None)

    def _find(self, module: str) -> ModulePlace | None:
        layer, param, shard, turn = self.weights.target(f"{module}.weight")
        shape = self.layers.get(layer)
        if shape is None:
            parent, _, leaf = layer.rpartition(".")
            bank = self.layers.get(parent)
            matrix = leaf in ("gate_up_proj", "down_proj") and module.endswith(f".{leaf}")
            if matrix and bank is not None and bank.kind == "experts":
                return ModulePlace(parent, bank, None)
            fused, part = USUAL_PARTS.get(leaf, ("", 0))
            shape = self.layers.get(f"{parent}.{fused}")
            if shape is None or len(shape.outputs) != (3 if fused == "qkv_proj" else 2):
                return None
            return ModulePlace(f"{parent}.{fused}", shape, part)
        if shape.kind == "experts" and shard is not None:
            each = 1 if param.startswith("down") else 2
            expert, half = divmod(shard, each)
            if expert >= shape.experts:
                return None
            return ModulePlace(layer, shape, 2 if each == 1 else half, expert)
        if shard is None and len(shape.outputs) == 1:
            shard = 0
        return ModulePlace(layer, shape, shard, transposed=turn)

    def is_left_out(self, module: str) -> bool:
        """Whether checkpoints have a module that the served model has no use for: another head."""
        if self.labels_are_rows:
            return False
        return f"{self.weights.target(f'{module}.weight').layer}.".startswith(self.weights.absent)

    def near(self, module: str) -> str:
        """Say what a name that leads nowhere may have meant, for a message."""
        if self.labels_are_rows and module.endswith("lm_head"):
            return "its rows became labels (classifier_from_token), which adapters cannot change"
        if is_tower_tensor(module):
            return "it belongs to a tower, and the text half of the model is served"
        known = list(self._names())
        leaf = module.rpartition(".")[2]
        same = [name for name in known if name.rpartition(".")[2] == leaf] or known
        close = difflib.get_close_matches(module, same[:500], n=2, cutoff=0.5)
        return f"the model has {' and '.join(close or same[:2])}"

    def _names(self) -> Iterator[str]:
        """Yield the names of all modules that adapters can change, without prefixes."""
        for layer, shape in self.layers.items():
            if shape.refusal:
                continue
            if shape.kind == "experts":
                (bank,) = self.weights.checkpoint_paths(layer)
                for leaves in self.weights.experts.values():
                    yield from (f"{bank}.0.{leaf}" for leaf in leaves)
            yield from self.weights.checkpoint_paths(layer)
