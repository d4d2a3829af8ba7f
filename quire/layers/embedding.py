"""Embedding tables: of tokens, of learned positions and of computed ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.distributed.mesh import vocab_range
from quire.kernels.add import add
from quire.kernels.embedding import embedding
from quire.kernels.formats.weight import StoredWeight
from quire.kernels.vocab_strip import strip_ids, strip_rows
from quire.layers.param_module import ParamModule
from quire.layers.weight_module import PLAIN, WeightModule
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout


class Embedding(WeightModule):
    """Token ids to vectors, times `scale` rounded to the model's dtype. Cut by vocabulary."""

    role = "embedding"
    weight: StoredWeight

    def __init__(self, vocab: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.vocab, self.size, self.scale = vocab, size, scale
        self.multiplied = False  # unless the output head shares the weight
        self.set_quant_method(PLAIN)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] int32 -> [T, E]."""
        if self.mesh.tp > 1:
            return self._embed_sharded(ids)
        return self.weight.rows(ids, self.scale)

    def _embed_sharded(self, ids: Tensor) -> Tensor:
        """Rows of this rank's strip, zeros for other tokens; the sum over ranks is whole."""
        mine = vocab_range(self.vocab, self.mesh)
        strip = mine.start, len(mine)
        rows = self.weight.rows(strip_ids(ids, *strip), self.scale)
        return self.comm.all_reduce(strip_rows(rows, ids, *strip))

    def weight_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        rows = vocab_range(self.vocab, self.mesh)
        return (WeightShard((self.vocab, self.size), (rows, range(self.size))),)

    def weight_init(self, matrix: str) -> InitSpec:
        return InitSpec(0.0, self.size**-0.5)


class PositionEmbedding(ParamModule):
    """A learned vector per position; the first `skip` rows of the checkpoint's table are unused."""

    weight: Tensor

    def __init__(self, count: int, size: int, skip: int = 0) -> None:
        super().__init__()
        self.count, self.size, self.skip = count, size, skip
        self.declare("weight")

    def forward(self, positions: Tensor) -> Tensor:
        """positions [T] int32 -> [T, E]."""
        return embedding(positions, self.weight)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        if not self.skip:
            return unsharded_layout((self.count, self.size))
        kept = range(self.skip, self.skip + self.count)
        return (WeightShard((self.skip + self.count, self.size), (kept, range(self.size))),)

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, self.size**-0.5)


class PositionTypeEmbedding(ParamModule):
    """The sum of a learned vector per position and one per token type.

    Checkpoints have a table of positions and some of types, joined here. At load the first vector
    of each table of types is added to all positions, and subtracted from its table, so that tokens
    of type 0 need one lookup. Only the first table of types has others.
    """

    weight: Tensor

    def __init__(self, count: int, size: int, types: tuple[int, ...], skip: int = 0) -> None:
        """types: rows of each further table. skip: as in PositionEmbedding."""
        super().__init__()
        self.count, self.size, self.types, self.skip = count, size, types, skip
        self._positions = self._differences = torch.empty(0)  # until the weight is loaded
        self.declare("weight")

    def forward(self, positions: Tensor, token_types: Tensor | None) -> Tensor:
        """positions, token_types [T] int32 -> [T, E]. None: all of type 0."""
        found = embedding(positions, self._positions)
        if token_types is None or len(self._differences) < 2:
            return found
        return add(found, embedding(token_types, self._differences))

    def after_load(self, dtype: torch.dtype) -> None:
        tables = torch.split(self.weight.detach().float(), [self.count, *self.types])
        own = tables[1] - tables[1][:1] if self.types else tables[0][:0]
        positions = sum((table[:1] for table in tables[1:]), tables[0])
        self.set_param("weight", torch.cat((positions, own)).to(dtype))
        self._positions, self._differences = self.weight[: self.count], self.weight[self.count :]

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        kept, columns = range(self.skip, self.skip + self.count), range(self.size)
        shards, at = [WeightShard((kept.stop, self.size), (kept, columns))], self.count
        for rows in self.types:
            shards.append(WeightShard((rows, self.size), (range(rows), columns), at))
            at += rows
        return tuple(shards)

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, self.size**-0.5)


class TypeEmbedding(PositionTypeEmbedding):
    """A learned vector per token type. max_len: positions that are served."""

    def __init__(self, max_len: int, size: int, types: int) -> None:
        self.max_len = max_len
        super().__init__(0, size, (types,))

    def after_load(self, dtype: torch.dtype) -> None:
        table = self.weight.detach().float()
        rows = (table[:1].expand(self.max_len, -1), table - table[0])
        self.set_param("weight", torch.cat(rows).to(dtype))
        self._positions, self._differences = self.weight.split([self.max_len, len(table)])

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((*self.types, self.size))


class SinusoidalEmbedding(nn.Module):
    """A computed vector per position: sines in the first half, cosines in the second."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.count, self.size = count, size
        self._table = torch.empty(0)  # until `place_constants`

    def place_constants(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compute the vectors, before the first forward."""
        with torch.device("cpu"):
            rates = 10000 ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
            angles = torch.arange(self.count)[:, None] * rates
            table = torch.cat((angles.sin(), angles.cos()[:, : self.size // 2]), dim=1)
            self._table = table.to(dtype).to(device)

    def forward(self, positions: Tensor) -> Tensor:
        """positions [T] int32 -> [T, E]."""
        return embedding(positions, self._table)
