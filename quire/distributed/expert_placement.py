"""Expert placement: which experts each rank has. Imports no torch."""

from __future__ import annotations

from quire.config.engine_config import ExpertPlacement


def place_experts(experts: int, ranks: int, strategy: ExpertPlacement) -> list[tuple[int, ...]]:
    """Return the experts of each rank, in ascending order; the first ranks may have one more.

    linear: neighbours are on one rank. round_robin: they are on different ranks, which is better
    where neighbours are chosen together, as in groups of experts.
    """
    if strategy == "round_robin":
        return [tuple(range(rank, experts, ranks)) for rank in range(ranks)]
    each, more = divmod(experts, ranks)
    starts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return [tuple(range(*starts[rank : rank + 2])) for rank in range(ranks)]
