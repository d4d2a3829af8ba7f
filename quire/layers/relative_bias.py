"""Relative position bias: a number per head and bucket of distances, added to attention scores.

Checkpoints have it by bucket. The buckets become a table by distance when it is loaded, so that
kernels know no buckets. From max_distance on all distances are in one bucket.

    near distances have a bucket each, far ones share buckets that grow as powers
    bidirectional: half of the buckets are for keys after the query
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.distributed.mesh import shard_range
from quire.layers.param_module import ParamModule
from quire.weights.mapping import InitSpec, WeightShard


class RelativeBias(ParamModule):
    """`table` [H, 2 R + 1] float32: column R + d is for a key d tokens after its query.

    R is max_distance. The layers of a stack share it.
    """

    weight: Tensor  # [buckets, H]

    def __init__(self, buckets: int, max_distance: int, heads: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.buckets, self.max_distance, self.heads = buckets, max_distance, heads
        self.bidirectional = bidirectional
        self.table = torch.empty(0)  # until the weight is loaded
        self.declare("weight")

    def after_load(self, dtype: torch.dtype) -> None:
        with torch.device("cpu"):
            places = [self.bucket(d) for d in range(-self.max_distance, self.max_distance + 1)]
            rows = torch.tensor(places).to(self.weight.device)
        self.table = self.weight.detach()[rows].t().float().contiguous()

    def bucket(self, distance: int) -> int:
        """Return the bucket of a key that is `distance` tokens after its query."""
        count, first = self.buckets, 0
        if self.bidirectional:
            count //= 2
            first = count if distance > 0 else 0
            distance = abs(distance)
        else:
            distance = max(-distance, 0)
        exact = count // 2
        if distance < exact:
            return first + distance
        # in float32, as the models were trained: a distance at an edge falls into the same bucket
        share = torch.log(torch.tensor(distance / exact)) / math.log(self.max_distance / exact)
        return first + min(exact + int(share * (count - exact)), count - 1)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        mine = shard_range(self.heads, self.mesh, what="attention heads")
        return (WeightShard((self.buckets, self.heads), (range(self.buckets), mine)),)

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, 1.0)
