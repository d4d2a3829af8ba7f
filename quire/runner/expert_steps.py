"""Expert steps: a rank's part in the layers of experts of other data-parallel ranks' rows.

A rank whose step has no rows, or has raised, computes the layers of experts that are left in the
step, with its own experts: the others wait for what these add to their rows. A step that raised has
no result on any rank, so what this rank's own rows are does not matter then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from quire.distributed.dp_exchange import DataParallelExchange
from quire.kernels.framework import lazy_fusion
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
        self._exchange, self._model = exchange, model
        self._count = 0  # of the layers
        if exchange is not None:
            assert like is not None
            self._like, self._count = like, len(_layers(model))

    @property
    def are_shared(self) -> bool:
        """Whether other data-parallel ranks have rows for this rank's experts."""
        return self._exchange is not None

    @contextmanager
    def step(self, counts: Sequence[int], padded: int = 0) -> Iterator[None]:
        """Within, a step runs. counts: tokens of each data-parallel rank; (): there is one, or none
        has any. padded: tokens that each rank exchanges in place of these, which are no more; 0: as
        many as it has."""
        if self._exchange is None or not counts:
            yield
            return
        rows = [padded] * len(counts) if padded else counts
        self._exchange.begin_step(rows)
        try:
            yield
        finally:
            self._compute_rest(self._exchange)
            self._exchange.begin_step(())

    @contextmanager
    def equal_rows(self, slots: Tensor) -> Iterator[None]:
        """Within, a forward pass of as many rows on each rank is launched or captured. slots: int32
        [T]; negative: padding."""
        with nullcontext() if self._exchange is None else self._exchange.equal_rows(slots):
            yield

    def finish(self) -> None:
        """All layers of the step were launched, by a graph."""
        if self._exchange is not None:
            self._exchange.done = self._count

    def _compute_rest(self, exchange: DataParallelExchange) -> None:
        if exchange.done == self._count:
            return
        layers = _layers(self._model)  # fewer than usual while steps are traced
        if exchange.is_open:  # it raised between gather() and combine()
            router, experts = layers[exchange.done]
            width = experts.combined_width(router.routing.top_k)
            exchange.combine(self._like.new_zeros(sum(exchange.counts), width))
        for router, experts in layers[exchange.done :]:
            own, k = exchange.tokens, router.routing.top_k
            x = self._like.new_zeros(own, experts.hidden)
            ids, weights = x.new_full((own, k), -1, dtype=torch.int32), x.new_zeros(own, k).float()
            experts(x, ids, weights)
            lazy_fusion.flush()


def _layers(model: object) -> list[tuple[Router, Experts]]:
    """Return the layers of experts, in the order of the forward pass."""
    assert isinstance(model, nn.Module)
    found = list(model.modules())
    routers = [one for one in found if isinstance(one, Router)]
    experts = [one for one in found if isinstance(one, Experts)]
    return list(zip(routers, experts, strict=True))
