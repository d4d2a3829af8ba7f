"""Expert placement: which experts each rank has, by their number or by their load.

A placement has a tuple for each rank: the expert in each slot of its bank. An expert may have
copies on several ranks, at most one on each; the tokens that chose it are spread over them evenly.
Pure, and the same on every rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from quire.config.engine_config import ExpertPlacement

Placement = list[tuple[int, ...]]


def place_experts(experts: int, ranks: int, strategy: ExpertPlacement) -> Placement:
    """Return the experts of each rank, in ascending order; the first ranks may have one more.

    linear: neighbours are on one rank. round_robin: they are on different ranks, which is better
    where neighbours are chosen together, as in groups of experts.
    """
    if strategy == "round_robin":
        return [tuple(range(rank, experts, ranks)) for rank in range(ranks)]
    each, more = divmod(experts, ranks)
    starts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return [tuple(range(*starts[rank : rank + 2])) for rank in range(ranks)]


def balance_experts(loads: Sequence[int], ranks: int, slots: int) -> Placement:
    """Return a placement in which ranks have about the same load.

    loads: tokens by expert. slots: of each rank; ranks * slots is between the number of experts and
    ranks times that. The heaviest expert gets the next copy, then the heaviest copy goes to the
    lightest rank that has room and not that expert.
    """
    copies = [1] * len(loads)
    heap = [(float(-load), expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(ranks * slots - len(loads)):
        while copies[heap[0][1]] == ranks:
            heapq.heappop(heap)
        expert = heap[0][1]
        copies[expert] += 1
        heapq.heapreplace(heap, (-loads[expert] / copies[expert], expert))
    share = [load / count for load, count in zip(loads, copies)]
    placed: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for expert in sorted(range(len(loads)), key=lambda one: (-share[one], one)):
        for _ in range(copies[expert]):
            room = [r for r in range(ranks) if len(placed[r]) < slots]
            free = [r for r in room if expert not in placed[r]]
            rank = min(free, key=lambda r: (totals[r], r)) if free else None
            if rank is None:
                rank = _make_room(placed, totals, share, expert, room[0])
            placed[rank].append(expert)
            totals[rank] += share[expert]
    return [tuple(sorted(one)) for one in placed]


def _make_room(
    placed: list[list[int]], totals: list[float], share: Sequence[float], expert: int, short: int
) -> int:
    """Move an expert to rank `short`, which has room but has `expert`; return where it was.

    A full rank without `expert` has at least two experts that `short`, which is not full, lacks.
    """
    moves = [
        (max(totals[short] + share[one], totals[rank] - share[one] + share[expert]), rank, one)
        for rank, own in enumerate(placed)
        if expert not in own
        for one in own
        if one not in placed[short]
    ]
    _, rank, one = min(moves)
    placed[rank].remove(one)
    placed[short].append(one)
    totals[rank] -= share[one]
    totals[short] += share[one]
    return rank


def keep_slots(before: Placement, after: Placement) -> Placement:
    """Return `after` with ranks exchanged and slots ordered so that few experts move.

    Ranks are alike, so each new set of experts goes to the old rank that has most of it; an expert
    that stays on its rank keeps its slot.
    """
    pairs = sorted(
        (-len(set(old) & set(new)), r, n)
        for r, old in enumerate(before)
        for n, new in enumerate(after)
    )
    chosen: dict[int, int] = {}
    taken: set[int] = set()
    for _, rank, number in pairs:
        if rank not in chosen and number not in taken:
            chosen[rank] = number
            taken.add(number)
    found = []
    for rank, old in enumerate(before):
        new = set(after[chosen[rank]])
        arriving = iter(sorted(new.difference(old)))
        found.append(tuple(one if one in new else next(arriving) for one in old))
    return found


def rank_loads(loads: Sequence[int], placement: Placement) -> list[float]:
    """Return the tokens that each rank computes, if those of an expert are spread evenly."""
    copies = [0] * len(loads)
    for own in placement:
        for expert in own:
            copies[expert] += 1
    return [sum(loads[expert] / copies[expert] for expert in own) for own in placement]
