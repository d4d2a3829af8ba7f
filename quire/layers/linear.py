"""Linear layers, by how ranks cut them. With one rank they are all y = x W^T + b.

    Linear        whole on every rank
    ColumnLinear  each rank has some outputs      x whole -> y cut
    RowLinear     each rank has some inputs       x cut   -> y whole, summed over ranks
    HeadsLinear   q, k, v in one, cut by heads    x whole -> heads of this rank
    LMHead        cut by vocabulary, then gathered

Several projections of one input are one matrix: its parts come from several checkpoint tensors.
How the weight is stored and multiplied is the quantization method's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from quire.distributed.collectives import Collectives
from quire.distributed.mesh import Mesh, share, strip
from quire.kernels.fp8 import Fp8Weight
from quire.kernels.packed import PackedWeight
from quire.layers.leaf import Leaf
from quire.quant.base import Method
from quire.quant.none import Method as Plain
from quire.weights.mapping import Part, Spread


@dataclass(frozen=True, slots=True)
class Outputs:
    """One projection: `units` pieces of `width` rows that stay together."""

    units: int
    width: int = 1
    what: str = "outputs"
    repeat: bool = False  # ranks may share a unit if there are fewer units than ranks

    @property
    def rows(self) -> int:
        return self.units * self.width

    def of(self, mesh: Mesh) -> range:
        """The units of one rank."""
        return share(self.units, mesh, what=self.what, repeat=self.repeat)


class Linear(Leaf):
    """Whole on every rank. Base of the others, which only cut differently."""

    weight: Tensor | PackedWeight | Fp8Weight
    bias: Tensor | None

    def __init__(self, inputs: int, outputs: int | tuple[Outputs, ...], bias: bool = False) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = (Outputs(outputs),) if isinstance(outputs, int) else outputs
        self.method: Method = Plain()
        self.declare("weight")
        if bias:
            self.declare("bias")
        else:
            self.bias = None

    @property
    def quantized(self) -> bool:
        """Whether a quantization method may have it. A gate of few outputs is not worth it."""
        return sum(out.rows for out in self.outputs) >= 16

    def equip(self, method: Method) -> None:
        """Take another quantization method, and the parameters it needs. Before values come."""
        self.method = method
        self.declare(*(name for name in method.extra if name not in self.params()))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O]."""
        return self.method.apply(self, x, self.bias)

    def rows(self) -> list[range]:
        """Per part, the rows of it this rank has."""
        return [range(out.rows) for out in self.outputs]

    def columns(self) -> range:
        """The inputs this rank has."""
        return range(self.inputs)

    def dtype(self, param: str) -> torch.dtype | None:
        """As the method stores it; a bias in the model's."""
        return self.method.dtype(param)

    def layout(self, param: str) -> tuple[Part, ...]:
        if param in self.method.extra:
            return self.method.layout(self.layout("weight"), param)
        rows = self.rows()
        starts = accumulate((len(r) for r in rows), initial=0)
        parts = zip(self.outputs, rows, starts)
        if param == "bias":
            return tuple(Part((out.rows,), (r,), at) for out, r, at in parts)
        cols = self.columns()
        return tuple(Part((out.rows, self.inputs), (r, cols), at) for out, r, at in parts)

    def spread(self, param: str) -> Spread:
        given = self.method.spread(self.inputs, param)
        return given or Spread(0.0, 0.02 if param == "bias" else self.inputs**-0.5)


class ColumnLinear(Linear):
    """Each rank has some of the outputs of every part."""

    def __init__(self, inputs: int, outputs: int | tuple[int, ...], bias: bool = False) -> None:
        sizes = (outputs,) if isinstance(outputs, int) else outputs
        super().__init__(inputs, tuple(Outputs(size) for size in sizes), bias)

    def rows(self) -> list[range]:
        return [_rows(out, out.of(self.mesh)) for out in self.outputs]


class RowLinear(Linear):
    """Each rank has some of the inputs; the sum over ranks is the result."""

    def columns(self) -> range:
        return share(self.inputs, self.mesh, what="inputs")

    def forward(self, x: Tensor) -> Tensor:
        """x [T, I of this rank] -> [T, O], the same on every rank."""
        bias = self.bias if self.mesh.tp_rank == 0 else None  # the sum must have it once
        return self.comm.all_reduce(self.method.apply(self, x, bias))


class HeadsLinear(ColumnLinear):
    """Queries, keys and values of this rank's heads, as views of one product."""

    def __init__(
        self, inputs: int, heads: int, kv_heads: int, head_dim: int, bias: bool = False
    ) -> None:
        kv = Outputs(kv_heads, head_dim, "key-value heads", repeat=True)
        outputs = (Outputs(heads, head_dim, "attention heads"), kv, kv)
        Linear.__init__(self, inputs, outputs, bias)
        self.head_dim = head_dim
        self.counts = [heads, kv_heads, kv_heads]

    def shard(self, mesh: Mesh, comm: Collectives) -> None:
        super().shard(mesh, comm)
        heads, kv_heads, _ = (len(out.of(mesh)) for out in self.outputs)
        self.counts = [heads, kv_heads, kv_heads]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """x [T, E] -> q [T, H, D], k [T, K, D], v [T, K, D], strided views of one buffer."""
        qkv = self.method.apply(self, x, self.bias)
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = torch.split(heads, self.counts, dim=1)
        return q, k, v


class LMHead(Linear):
    """Hidden states to logits. May share its weight with the embedding."""

    def __init__(self, vocab: int, hidden: int, bias: bool = False) -> None:
        super().__init__(hidden, vocab, bias)

    @property
    def quantized(self) -> bool:
        """No: tokens close to each other are told apart here."""
        return False

    def rows(self) -> list[range]:
        return [strip(self.outputs[0].rows, self.mesh)]

    def forward(self, x: Tensor) -> Tensor:
        """x [R, E] -> [R, V]."""
        return self.comm.all_gather(self.method.apply(self, x, self.bias))


def _rows(out: Outputs, units: range) -> range:
    return range(units.start * out.width, units.stop * out.width)
