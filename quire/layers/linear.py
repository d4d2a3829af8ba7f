"""Linear layers, by how ranks cut them. With one rank they are all y = x W^T + b.

    Linear        whole on every rank
    ColumnLinear  each rank has some outputs      x whole -> y cut
    RowLinear     each rank has some inputs       x cut   -> y whole, summed over ranks
    QKVLinear     q, k, v in one, cut by heads    x whole -> heads of this rank
    LMHead        cut by vocabulary, then gathered
    ClassifierLinear  whole on every rank, in float32
    PatchLinear   a convolution over patches that do not overlap

Several projections of one input are one matrix: its parts come from several checkpoint tensors.
How the weight is stored and multiplied is decided by the quantization method.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from quire.distributed.collectives import Collectives
from quire.distributed.mesh import (
    Mesh,
    head_range,
    shard_range,
    strip_size,
    vocab_range,
    width_range,
)
from quire.errors import WeightError
from quire.kernels.add import clip
from quire.kernels.formats.weight import StoredWeight
from quire.layers.param_module import ParamModule
from quire.layers.weight_module import PLAIN, WeightModule
from quire.weights.mapping import InitSpec, WeightShard


@dataclass(frozen=True, slots=True)
class OutputGroup:
    """One projection: `units` pieces of `width` rows that stay together."""

    units: int
    width: int = 1
    label: str = "outputs"
    repeat: bool = False  # ranks may share a unit if there are fewer units than ranks
    kv_heads: int | None = None  # units are query heads, which ranks share as they do KV heads

    @property
    def rows(self) -> int:
        return self.units * self.width

    def units_of_rank(self, mesh: Mesh) -> range:
        """The units of one rank."""
        if self.kv_heads is not None:
            return head_range(self.units, self.kv_heads, mesh)
        if self.width == 1:
            return width_range(self.units, mesh)
        return shard_range(self.units, mesh, what=self.label, repeat=self.repeat)

    def rows_of_rank(self, mesh: Mesh) -> range:
        """The rows of one rank."""
        units = self.units_of_rank(mesh)
        return range(units.start * self.width, units.stop * self.width)


class Linear(WeightModule):
    """Whole on every rank. Base of the others, which only cut differently."""

    weight: StoredWeight
    bias: Tensor | None
    adapter_refusal = ""
    """Why no adapter can be added to its product; "": one can."""

    def __init__(
        self, inputs: int, outputs: int | tuple[OutputGroup, ...], bias: bool = False
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = (OutputGroup(outputs),) if isinstance(outputs, int) else outputs
        self.set_quant_method(PLAIN)
        if bias:
            self.declare("bias")
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O]."""
        return self.weight.product(x, self.bias)

    def rank_rows(self) -> list[range]:
        """Per part, the rows of it this rank has."""
        return [range(out.rows) for out in self.outputs]

    def rank_columns(self) -> range:
        """The inputs this rank has."""
        return range(self.inputs)

    def weight_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        cols = self.rank_columns()
        return tuple(
            WeightShard((out.rows, self.inputs), (rows, cols), at)
            for out, rows, at in self._parts()
        )

    def vector_layout(self, param: str) -> tuple[WeightShard, ...]:
        return tuple(WeightShard((out.rows,), (rows,), at) for out, rows, at in self._parts())

    def _parts(self) -> Iterator[tuple[OutputGroup, range, int]]:
        """Per part: itself, the rows of it this rank has, and where they start in the weight."""
        rank_rows = self.rank_rows()
        starts = accumulate((len(rows) for rows in rank_rows), initial=0)
        return zip(self.outputs, rank_rows, starts)

    def weight_init(self, matrix: str) -> InitSpec:
        return InitSpec(0.0, self.inputs**-0.5)


class ColumnLinear(Linear):
    """Each rank has some of the outputs of every part."""

    def __init__(self, inputs: int, outputs: int | tuple[int, ...], bias: bool = False) -> None:
        sizes = (outputs,) if isinstance(outputs, int) else outputs
        super().__init__(inputs, tuple(OutputGroup(size) for size in sizes), bias)

    def rank_rows(self) -> list[range]:
        return [out.rows_of_rank(self.mesh) for out in self.outputs]


class RowLinear(Linear):
    """Each rank has some of the inputs; the sum over ranks is the result.

    heads: the query heads that its inputs come from, if ranks share them unevenly.
    """

    heads: OutputGroup | None = None

    def rank_columns(self) -> range:
        if self.heads is None:
            return width_range(self.inputs, self.mesh)
        mine, size = self.heads.units_of_rank(self.mesh), self.inputs // self.heads.units
        return range(mine.start * size, mine.stop * size)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, I of this rank] -> [T, O], the same on every rank."""
        bias = self.bias if self.mesh.tp_rank == 0 else None  # the sum must have it once
        return self.comm.all_reduce(self.weight.product(x, bias))


class QKVLinear(ColumnLinear):
    """Queries, keys and values of this rank's heads, as views of one product.

    head_order: for checkpoints with one tensor for all three, the place in it of each of our heads:
    of queries, keys and values in turn. None: they are in our order.
    limit: all are clipped to it. keys, values: False if the layer has no matrix for them; without
    values the keys stand in, without keys there are no heads of either. gates: behind each query
    is a gate of its head's output, as long; q has twice as many heads then.
    """

    def __init__(
        self,
        inputs: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool = False,
        *,
        head_order: Sequence[int] | None = None,
        limit: float | None = None,
        keys: bool = True,
        values: bool = True,
        gates: bool = False,
    ) -> None:
        self.head_order, self.limit = head_order, limit
        kv = OutputGroup(kv_heads, head_dim, "key-value heads", repeat=True)
        others = (kv,) * (keys + (keys and values))
        width = head_dim * (1 + gates)
        outputs = (OutputGroup(heads, width, "attention heads", kv_heads=kv_heads), *others)
        Linear.__init__(self, inputs, outputs, bias)
        self.head_dim = head_dim
        self.head_counts = [out.rows // head_dim for out in outputs]

    def shard(self, mesh: Mesh, comm: Collectives) -> None:
        super().shard(mesh, comm)
        self.head_counts = [len(out.rows_of_rank(mesh)) // self.head_dim for out in self.outputs]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """x [T, E] -> q [T, H, D], k [T, K, D], v [T, K, D], strided views of one buffer."""
        qkv = self.weight.product(x, self.bias)
        if self.limit is not None:
            qkv = clip(qkv, self.limit)
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, *others = torch.split(heads, self.head_counts, dim=1)
        if len(others) == 2:
            return q, others[0], others[1]
        k = others[0] if others else q[:, :0]
        return q, k, k

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[Tensor]:
        """The parts of a checkpoint's one tensor: rows of heads, or scales of them."""
        per_part = tensor.shape[0] == len(self.outputs)  # a number for each
        if self.head_order is None or per_part or self.is_shared(param):
            return super().split_fused(param, tensor)
        order = torch.tensor(self.head_order)
        if tensor.shape[0] % len(order):
            raise WeightError(
                f"a fused q, k, v tensor has {tensor.shape[0]} rows of {param}, which the "
                f"{len(order)} heads do not divide: its heads are not in order, so blocks of a "
                "quantized weight must not span several"
            )
        heads = tensor.unflatten(0, (len(order), -1))
        parts = torch.split(order, [out.units for out in self.outputs])
        return [heads[part].flatten(0, 1) for part in parts]


class HeadsLinear(ColumnLinear):
    """One or more projections to this rank's heads, as views of one product."""

    def __init__(
        self, inputs: int, groups: tuple[OutputGroup, ...], head_dim: int, bias: bool = False
    ) -> None:
        Linear.__init__(self, inputs, groups, bias)
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """x [T, E] -> per projection [T, heads, D], strided."""
        heads = self.weight.product(x, self.bias).view(x.shape[0], -1, self.head_dim)
        counts = [len(out.units_of_rank(self.mesh)) for out in self.outputs]
        return torch.split(heads, counts, dim=1)


class QueryLinear(HeadsLinear):
    """Queries of this rank's heads."""

    def __init__(self, inputs: int, heads: int, head_dim: int, bias: bool = False) -> None:
        groups = (OutputGroup(heads, head_dim, "attention heads"),)
        super().__init__(inputs, groups, head_dim, bias)


class KVLinear(HeadsLinear):
    """Keys and values of this rank's heads."""

    def __init__(self, inputs: int, kv_heads: int, head_dim: int, bias: bool = False) -> None:
        group = OutputGroup(kv_heads, head_dim, "key-value heads", repeat=True)
        super().__init__(inputs, (group, group), head_dim, bias)


class LMHead(Linear):
    """Hidden states to logits. May share its weight with the embedding."""

    role = "head"

    def __init__(self, vocab: int, hidden: int, bias: bool = False) -> None:
        super().__init__(hidden, vocab, bias)

    def rank_rows(self) -> list[range]:
        return [vocab_range(self.outputs[0].rows, self.mesh)]

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        """x [R, E] -> [R, V]. whole: False: this rank's strip of it, `vocab_range`."""
        y, vocab = self.weight.product(x, self.bias), self.outputs[0].rows
        return self.comm.all_gather(y, vocab, strip_size(vocab, self.mesh.tp)) if whole else y


class ClassifierLinear(Linear):
    """Pooled states to logits, of labels mostly. float32: whatever the model's dtype is."""

    role = "head"

    def __init__(
        self, inputs: int, outputs: int, bias: bool = False, *, float32: bool = True
    ) -> None:
        self.computed_in = torch.float32 if float32 else None  # None: the model's
        super().__init__(inputs, outputs, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, I] float32 -> [n, O] float32."""
        return super().forward(x.to(self.computed_in)).float()

    def dtype(self, param: str) -> torch.dtype | None:
        return self.computed_in or super().dtype(param)

    def after_load(self, dtype: torch.dtype) -> None:
        self.computed_in = self.computed_in or dtype
        super().after_load(self.computed_in)


class PatchLinear(Linear):
    """A convolution whose stride is its kernel, as a product with flat patches.

    kernel: its sizes, one per axis of a patch; patches are flat, channels first.
    """

    def __init__(
        self, channels: int, kernel: tuple[int, ...], outputs: int, bias: bool = False
    ) -> None:
        self.kernel = (channels, *kernel)
        super().__init__(math.prod(self.kernel), outputs, bias)

    def fused_shape(self, param: str) -> tuple[int, ...]:
        rows, *inputs = super().fused_shape(param)
        return (rows, *(self.kernel if inputs else ()))

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[Tensor]:
        return super().split_fused(param, tensor.flatten(1) if tensor.dim() > 1 else tensor)


class LogitsBias(ParamModule):
    """The bias of a head that shares its weight with the embedding, as a parameter of its own.

    Checkpoints may have it as [1, V].
    """

    bias: Tensor

    def __init__(self, head: LMHead) -> None:
        super().__init__()
        self.__dict__["head"] = head  # not a submodule of this one
        self.declare("bias")

    def after_load(self, dtype: torch.dtype) -> None:
        self.__dict__["head"].set_param("bias", self.bias.detach())

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        head: LMHead = self.__dict__["head"]
        shape, rows = (
            (head.outputs[0].rows,),
            (vocab_range(head.outputs[0].rows, self.mesh),),
        )
        return (WeightShard(shape, rows, broadcastable=True),)

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, 0.02)
