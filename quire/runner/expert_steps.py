"""Expert steps: a rank's part in the layers of experts of other data-parallel ranks' rows.

A rank whose step has no rows, or has raised, computes the layers of experts that are left in the
step, with its own experts: the others wait for what these add to their rows. A step that raised has
no result on any rank, so what this rank's own rows are does not matter then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quire.distributed.dp_exchange import DataParallelExchange
from quire.layers import Experts, Router


class ExpertSteps:
    """The default is a model that has all rows itself."""

    def __init__(
        self,
        model: object = None,
        exchange: DataParallelExchange | None = None,
        like: Tensor | None = None,
    ) -> None:
        """like: a tensor of the dtype and on the device of hidden states."""
        self._exchange = exchange
        self._layers: list[tuple[Router, Experts]] = []
        if exchange is not None:
            assert isinstance(model, nn.Module)
            assert like is not None
            self._like = like
            found = list(model.modules())  # in the order of the forward pass
            routers = [one for one in found if isinstance(one, Router)]
            experts = [one for one in found if isinstance(one, Experts)]
            self._layers = list(zip(routers, experts, strict=True))

    @contextmanager
    def step(self, counts: Sequence[int]) -> Iterator[None]:
        """Within, a step runs. counts: tokens of each data-parallel rank; (): there is one, or none
        has any."""
        if self._exchange is None or not counts:
            yield
            return
        self._exchange.begin_step(counts)
        try:
            yield
        finally:
            self._compute_rest(self._exchange)

    def _compute_rest(self, exchange: DataParallelExchange) -> None:
        if exchange.is_open:  # it raised between gather() and combine()
            router, experts = self._layers[exchange.done]
            width = experts.combined_width(router.routing.top_k)
            exchange.combine(self._like.new_zeros(sum(exchange.counts), width))
        for router, experts in self._layers[exchange.done :]:
            own, k = exchange.tokens, router.routing.top_k
            x = self._like.new_zeros(own, experts.hidden)
            ids, weights = x.new_zeros(own, k, dtype=torch.int32), x.new_zeros(own, k).float()
            experts(x, ids, weights)
