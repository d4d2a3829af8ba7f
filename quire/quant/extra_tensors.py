"""Tensors of quantized checkpoints that fill no parameter as they are.

Many writers add a bias to every layer: where the model has none it must be zero. A method may also
have parameters that are made of several tensors, whose shapes no configuration states: such a
method has

    merged = {"outliers": ("rows", "cols", "vals")}        parameter -> tensors it is made of
    merge(name, {"rows": ..., ...}, shape) -> Tensor       one checkpoint tensor [O, I] of it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, cast

from torch import Tensor

from quire.errors import WeightError
from quire.quant.base import Method
from quire.quant.parts import PartsMethod
from quire.weights.mapping import ParamOwner, ParamTarget, Weights, checkpoint_shape, local_target


class MergingMethod(Protocol):
    """A method with such parameters."""

    merged: Mapping[str, tuple[str, ...]]

    def merge(self, name: str, found: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """Return one tensor of a parameter. Raises WeightError."""
        ...


class ExtraTensors:
    """Takes zero biases, and what other ranks have, out of a stream of tensors; merges those that
    belong together."""

    def __init__(self, layers: Mapping[str, ParamOwner], weights: Weights) -> None:
        self._layers, self._weights = layers, weights
        self._parts: dict[str, set[str]] = {}  # merged tensor -> suffixes that the checkpoint has

    def shapes(
        self, shapes: Iterable[tuple[str, Sequence[int]]]
    ) -> list[tuple[str, Sequence[int]]]:
        """Return (name, shape) of the tensors that `tensors` yields. It comes first."""
        found: dict[str, Sequence[int]] = {}
        for name, shape in shapes:
            if self._target(name) is None or self._is_extra_bias(name):
                continue
            if (merged := self._merged_name(name)) is None:
                found[name] = shape
                continue
            self._parts.setdefault(merged, set()).add(name.rpartition(".")[2])
            found[merged] = self._shape(merged)
        return list(found.items())

    def tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a checkpoint. Raises WeightError for a bias that is not zero."""
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            if self._target(name) is None:
                continue
            if self._is_extra_bias(name):
                if bool(tensor.any()):
                    raise WeightError(
                        f"{name} is not zero, but this model's layer has no bias; is config.json "
                        "that of another model?"
                    )
                continue
            if (merged := self._merged_name(name)) is None:
                yield name, tensor
                continue
            parts = waiting.setdefault(merged, {})
            parts[name.rpartition(".")[2]] = tensor
            if parts.keys() == self._parts[merged]:
                method = cast(MergingMethod, self._method(self._target(name)))
                yield merged, method.merge(merged, waiting.pop(merged), self._shape(merged))

    def _is_extra_bias(self, name: str) -> bool:
        """Whether a tensor is the bias of a quantized layer that has none."""
        if not name.endswith("bias"):
            return False
        target = self._target(name)
        method = self._method(target)
        if target is None or method is None or not method.is_stored:
            return False
        if not target.param.endswith("bias"):
            return False
        return target.param not in self._layers[target.layer].param_names()

    def _merged_name(self, name: str) -> str | None:
        """The checkpoint's name of the parameter that a tensor is a part of."""
        path, _, suffix = name.rpartition(".")
        merged = getattr(self._method(self._target(name)), "merged", {})
        return next((f"{path}.{one}" for one, parts in merged.items() if suffix in parts), None)

    def _shape(self, merged: str) -> tuple[int, ...]:
        target = self._target(merged)
        assert target is not None, "a tensor of another rank"
        holder = self._layers[target.layer]
        if target.shard is not None:
            param, part = holder.owner_of(target.param, target.shard)
            target = target._replace(param=param, shard=part)
        if target.param in holder.param_names():
            return tuple(checkpoint_shape(holder, target))
        return ()  # unexpected there

    def _target(self, name: str) -> ParamTarget | None:
        """The target of a tensor on this rank; None: another rank has it."""
        target = self._weights.target(name)
        holder = self._layers.get(target.layer)
        return target if holder is None else local_target(holder, target)

    def _method(self, target: ParamTarget | None) -> Method | None:
        """The method of a layer, or of the part of it that a tensor fills."""
        if target is None:
            return None
        method: Method | None = getattr(self._layers.get(target.layer), "method", None)
        if isinstance(method, PartsMethod):
            return method.method_of(target.param, target.shard)
        return method
