"""Base of modules with weight matrices, stored and multiplied by a quantization method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from quire.distributed.collectives import Collectives
from quire.distributed.mesh import Mesh
from quire.kernels.formats.cropped_weight import CroppedWeight
from quire.kernels.formats.weight import PlainExperts, PlainWeight
from quire.layers.param_module import ParamModule
from quire.quant.base import Method, ParamSpec, common_step, widened
from quire.quant.none import Method as Plain
from quire.weights.mapping import InitSpec, WeightShard, stored_shape

PLAIN: Method = Plain()


class WeightModule(ParamModule):
    """Base of linear layers, the embedding and banks of experts: see quire.quant.base.

    Subclasses call `set_quant_method` once their sizes are set.
    """

    role: str = "linear"
    matrices: tuple[str, ...] = ("weight",)
    multiplied = True
    plain_class: ClassVar[type[PlainWeight | PlainExperts]] = PlainWeight

    def __init__(self) -> None:
        super().__init__()
        self.method = PLAIN
        self._specs: dict[str, tuple[str, str, ParamSpec]] = {}  # parameter -> matrix, name, spec
        self._layouts: dict[str, tuple[WeightShard, ...]] = {}
        self._owners: dict[tuple[str, int], tuple[str, int]] = {}  # of parts: see owner_of
        self._stored: dict[tuple[str, int], tuple[str, int]] = {}

    def set_quant_method(self, method: Method) -> None:
        """Take a method, with its parameters in place of those of the one before."""
        for name in self._specs:
            self._param_names.remove(name)
            self.set_param(name, None)
        self.method = method
        self._layouts.clear()
        self._specs = {
            self.param_name(matrix, name): (matrix, name, spec)
            for matrix in self.matrices
            for name, spec in method.params(self, matrix).items()
        }
        self._owners = {
            (param.rpartition("_")[0], part): (param, place)
            for param, (_, _, spec) in self._specs.items()
            for place, part in enumerate(spec.parts or ())
        }
        self._stored = {ours: theirs for theirs, ours in self._owners.items()}
        self.declare(*self._specs)

    def owner_of(self, param: str, part: int) -> tuple[str, int]:
        return self._owners.get((param, part), (param, part))

    def stored_as(self, param: str, part: int) -> tuple[str, int]:
        return self._stored.get((param, part), (param, part))

    def param_name(self, matrix: str, name: str) -> str:
        """Return the layer's name of a method's parameter: a bank prefixes the matrix."""
        if matrix == "weight":
            return name
        return matrix if name == "weight" else f"{matrix}_{name}"

    def weight_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        """The parts of a matrix, each [O, I], whole and as this rank has them."""
        raise NotImplementedError

    def vector_layout(self, param: str) -> tuple[WeightShard, ...]:
        """The parts of a parameter that no method owns: a bias."""
        raise NotImplementedError

    def weight_init(self, matrix: str) -> InitSpec:
        """How dummy values of a plain weight are drawn."""
        raise NotImplementedError

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        if param not in self._layouts:  # the loader needs it for each tensor of a bank
            self._layouts[param] = self._build_layout(param)
        return self._layouts[param]

    def _build_layout(self, param: str) -> tuple[WeightShard, ...]:
        if param not in self._specs:
            return self.vector_layout(param)
        matrix, _, spec = self._specs[param]
        return spec.layout(self.stored_layout(matrix))

    def stored_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        """weight_layout() in whole blocks of the format: what the rank stores, and crops."""
        return widened(self.weight_layout(matrix), self.blocks_of(matrix))

    def blocks_of(self, matrix: str) -> tuple[int, int]:
        """Outputs and inputs of the least block of a matrix that no parameter's step crosses."""
        specs = [spec for of, _, spec in self._specs.values() if of == matrix]
        return common_step(one.outputs_per for one in specs), common_step(
            one.inputs_per for one in specs
        )

    def crop(self) -> None:
        """Make weights that are stored in whole blocks those of this rank's rows and columns."""
        for matrix in self.matrices:
            own, stored = self.weight_layout(matrix), self.stored_layout(matrix)
            if own == stored:
                continue
            rows = tuple(
                _shifted(part.ranges[0], whole.start - whole.ranges[0].start)
                for part, whole in zip(own, stored, strict=True)
            )
            columns = _shifted(own[0].ranges[1], -stored[0].ranges[1].start)
            weight, shape = getattr(self, matrix), stored_shape(stored)
            self.set_param(matrix, CroppedWeight(weight, rows, shape[0], columns, shape[1]))

    def is_shared(self, param: str) -> bool:
        """Whether a checkpoint tensor of all parts is one that every part has: a vector [I]."""
        spec = self._specs[param][2] if param in self._specs else None
        return spec is not None and spec.outputs_per is None and not spec.broadcastable

    def fused_shape(self, param: str) -> tuple[int, ...]:
        shared = self.is_shared(param)
        return self.layout(param)[0].shape if shared else super().fused_shape(param)

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[Tensor]:
        if self.is_shared(param):
            return [tensor] * len(self.layout(param))
        return super().split_fused(param, tensor)

    def shard(self, mesh: Mesh, comm: Collectives) -> None:
        self._layouts.clear()
        super().shard(mesh, comm)

    def dtype(self, param: str) -> torch.dtype | None:
        return self._specs[param][2].dtype if param in self._specs else None

    def init_spec(self, param: str) -> InitSpec:
        if param not in self._specs:
            return InitSpec(0.0, 0.02)
        matrix, _, spec = self._specs[param]
        return spec.init or self.weight_init(matrix)

    def take_params(self, matrix: str) -> dict[str, Tensor]:
        """The loaded values of a matrix, by the method's names. The module drops them.

        What an inner method has made of them already is `weight`.
        """
        if matrix not in self._specs and (made := getattr(self, matrix, None)) is not None:
            self.set_param(matrix, None)
            return {"weight": made.dequantize()}
        found = {}
        for param, (of, name, _) in self._specs.items():
            if of == matrix:
                found[name] = getattr(self, param).detach()
                self.set_param(param, None)
        return found

    def after_load(self, dtype: torch.dtype) -> None:
        """A plain weight that a method has made is in the model's dtype as others are."""
        for matrix in self.matrices:
            weight = getattr(self, matrix)
            if weight.kind == self.plain_class.kind and weight.dtype != dtype:
                self.set_param(matrix, weight.dequantize(dtype))

    def set_param(self, param: str, value: object) -> None:
        """Replace a parameter; a tensor that is a whole weight becomes one that multiplies."""
        plain = self.plain_class
        if param in self.matrices and isinstance(value, Tensor) and not isinstance(value, plain):
            value = plain(value.detach(), requires_grad=False)
        super().set_param(param, value)


def _shifted(one: range, by: int) -> range:
    return range(one.start + by, one.stop + by)
