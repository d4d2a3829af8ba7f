"""Expert balancer: moves experts between ranks by their load, between two steps.

All ranks have the same counts of tokens, plan the same placement, and exchange weights layer by
layer. Weights are written in place, so tapes and CUDA graphs stay valid.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.distributed.expert_placement import (
    Placement,
    balance_experts,
    keep_slots,
    rank_loads,
)
from quire.errors import EngineError
from quire.kernels.formats.expert_tensors import shared_tensors, stored_form
from quire.layers import Experts

MIN_GAIN = 0.02
"""A layer keeps its placement if the busiest rank would have so little less to compute."""


class BalanceReport(NamedTuple):
    """What one balancing did. Balancedness: mean of the ranks' loads over the greatest, 0 to 1."""

    before: float  # balancedness over the layers of this stage, of the window; 0: no tokens
    after: float  # of the same tokens in the new placement
    moved: int  # experts that were written to this rank


class ExpertBalancer:
    """Balances the banks of one rank's model whose experts move."""

    def __init__(self, model: nn.Module) -> None:
        """All ranks call it together.

        Raises: EngineError if experts of a layer are stored in different forms.
        """
        self._banks = {
            name: bank
            for name, bank in model.named_modules()
            if isinstance(bank, Experts) and bank.load is not None
        }
        self._loads: deque[list[list[int]]] = deque()  # of the last intervals, by layer and expert
        for name, bank in self._banks.items():
            _check_forms(name, bank)
            _move(bank, bank.placement, _copies(bank.placement))
        self.count_from_now()

    def count_from_now(self) -> None:
        """Forget the tokens of steps so far."""
        for bank in self._banks.values():
            _load_of(bank).zero_()

    def balance(self, intervals: int) -> BalanceReport:
        """Move experts, by the tokens since the last call and those of intervals - 1 before it."""
        if not self._banks:
            return BalanceReport(0.0, 0.0, 0)  # no layer of this stage has experts
        loads = torch.stack([_load_of(bank) for bank in self._banks.values()])
        # of the first rank: another may have raised in a step, before it counted
        first = _send_to_all(next(iter(self._banks.values())), _as_bytes(loads))[0]
        self._loads.append(first.clone().view(loads.dtype).view(loads.shape).tolist())
        self.count_from_now()
        while len(self._loads) > intervals:
            self._loads.popleft()
        total = [[sum(one) for one in zip(*layer)] for layer in zip(*self._loads)]
        busiest = [0.0, 0.0]
        mean, moved = 0.0, 0
        for bank, counts in zip(self._banks.values(), total):
            old = bank.placement
            slots = len(old[0])
            new = keep_slots(old, balance_experts(counts, len(old), slots))
            now, then = max(rank_loads(counts, old)), max(rank_loads(counts, new))
            if then > now * (1 - MIN_GAIN):
                new, then = old, now
            moved += _move(bank, new, _changes(old, new))
            mean += sum(counts) / len(old)
            busiest = [busiest[0] + now, busiest[1] + then]
        if not mean:
            return BalanceReport(0.0, 0.0, moved)
        return BalanceReport(mean / busiest[0], mean / busiest[1], moved)


class _Write(NamedTuple):
    """An expert that a rank gets from another."""

    source: int
    source_slot: int
    rank: int
    slot: int


def _changes(old: Placement, new: Placement) -> list[_Write]:
    """Return what ranks must get to have the new placement."""
    places: dict[int, list[tuple[int, int]]] = {}
    for rank, own in enumerate(old):
        for slot, expert in enumerate(own):
            places.setdefault(expert, []).append((rank, slot))
    found: list[_Write] = []
    for rank, own in enumerate(new):
        for slot, expert in enumerate(own):
            if expert != old[rank][slot]:
                sources = places[expert]
                found.append(_Write(*sources[len(found) % len(sources)], rank, slot))
    return found


def _copies(placement: Placement) -> list[_Write]:
    """Return what makes all copies of an expert those of its first rank.

    They are equal already if they were read from a checkpoint; dummy weights are not.
    """
    first: dict[int, tuple[int, int]] = {}
    found = []
    for rank, own in enumerate(placement):
        for slot, expert in enumerate(own):
            if expert in first:
                found.append(_Write(*first[expert], rank, slot))
            else:
                first[expert] = rank, slot
    return found


def _move(bank: Experts, placement: Placement, writes: Sequence[_Write]) -> int:
    """Exchange the weights of a layer's experts, and take the placement.

    Returns how many experts this rank got.
    """
    if not writes:
        return 0
    rank, size = bank.mesh.ep_rank, sum(one.nbytes for one in bank.expert_tensors(0))
    device = _load_of(bank).device
    pieces, sizes = [], []
    for other in range(len(placement)):
        given = [one for one in writes if (one.source, one.rank) == (rank, other)]
        packed = [_as_bytes(t) for one in given for t in bank.expert_tensors(one.source_slot)]
        pieces.append(torch.cat(packed or [torch.empty(0, dtype=torch.uint8, device=device)]))
        sizes.append(size * sum((one.source, one.rank) == (other, rank) for one in writes))
    for other, taken in enumerate(bank.exchange.send_all(pieces, sizes)):
        at = 0
        for one in writes:
            if (one.source, one.rank) == (other, rank):
                for tensor in bank.expert_tensors(one.slot):
                    part = taken[at : at + tensor.nbytes].clone()  # at an aligned address
                    tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
                    at += tensor.nbytes
    bank.set_placement(placement)
    return sum(one.rank == rank for one in writes)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _send_to_all(bank: Experts, data: Tensor) -> list[Tensor]:
    """Return the bytes that each rank sends, of equal length."""
    ranks = len(bank.placement)
    return bank.exchange.send_all([data] * ranks, [len(data)] * ranks)


def _load_of(bank: Experts) -> Tensor:
    assert bank.load is not None
    return bank.load


def _check_forms(name: str, bank: Experts) -> None:
    """Raise if an expert could not take the place of another, here or on another rank."""
    own, alike = 0, True
    for matrix in (bank.gate_up_proj, bank.down_proj):
        forms = {stored_form(matrix[slot]) for slot in range(len(bank.local))}  # type: ignore[index]
        alike &= len(forms) == 1
        own = zlib.crc32(str(sorted(forms)).encode(), own)
        for tensor in shared_tensors(matrix):
            own = zlib.crc32(_as_bytes(tensor).cpu().numpy().tobytes(), own)
    given = torch.tensor([own if alike else -1], device=_load_of(bank).device)
    ranks = [int(one.clone().view(torch.int64)) for one in _send_to_all(bank, _as_bytes(given))]
    if len(set(ranks)) > 1 or ranks[0] == -1:
        raise EngineError(
            f"enable_eplb: experts of {name} are stored in different forms, so they cannot change "
            "places; leave enable_eplb out"
        )
