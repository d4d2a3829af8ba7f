"""Adapter scaling: turns the magnitudes of DoRA into factors, once for each copy in host memory.

The ranks have the weights. They are asked for one layer at a time, between steps: a request waits
for its adapter meanwhile, and steps of others run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from quire.executors.base import Executor
from quire.runner.adapters.row_norms import NormsRequest, RankNorms, ScaledDelta, scale_delta
from quire.runner.plain_data import decode_as, encode
from quire.weights.adapters.adapter import Adapter, Delta, EmbeddingDelta, LinearDelta

Norms = dict[int, RankNorms]


class AdapterScaling:
    """pack: what is done with a scaled adapter at last."""

    def __init__(self, executor: Executor, pack: Callable[[Adapter], Adapter]) -> None:
        self._executor, self._pack = executor, pack

    def start(self, adapter: Adapter) -> Iterator[Adapter | None] | None:
        """Return the work on an adapter that was read, in pieces of which the last yields it; None:
        it needs none."""
        layers = {layer: _with_magnitude(parts) for layer, parts in adapter.deltas.items()}
        wanted = {layer: parts for layer, parts in layers.items() if parts}
        return self._scale(adapter, wanted) if wanted else None

    def _scale(
        self, adapter: Adapter, wanted: Mapping[str, Mapping[int, ScaledDelta]]
    ) -> Iterator[Adapter | None]:
        deltas = dict(adapter.deltas)
        for layer, parts in wanted.items():
            request = encode(NormsRequest(layer, parts))
            answers = self._executor.call("call_part", "adapters", request)
            ranks = [norms for one in answers if (norms := decode_as(one, Norms))]
            scaled = {
                part: scale_delta(d, [one[part] for one in ranks]) for part, d in parts.items()
            }
            deltas[layer] = {**deltas[layer], **scaled}
            yield None
        yield self._pack(replace(adapter, deltas=deltas))


def _with_magnitude(parts: Mapping[int, Delta]) -> dict[int, ScaledDelta]:
    return {
        part: delta
        for part, delta in parts.items()
        if isinstance(delta, (LinearDelta, EmbeddingDelta)) and delta.magnitude is not None
    }
