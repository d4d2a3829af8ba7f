"""Shared prompt limit: a prompt waits while another one computes the blocks that both begin with.

Prompts that arrive together would each compute their common beginning, because a block is in the
prefix cache only when the step that fills it is over. Here the first of them computes it, and the
others start behind it, with its blocks. A short beginning is worth a step if many wait for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.core.scheduling.limits.base import NO_BOUND, StepBudget
from quire.core.types import Sequence, SequenceState

LEAST_TOKENS = 256
"""Common tokens for which a sequence waits for a step. A step without these prompts takes about as
long as so many tokens, as it reads all weights."""
LEAST_SAVED = 2
"""Times as many, of all sequences that wait, for which each of them waits."""


class _Blocks(NamedTuple):
    """Blocks that a sequence computes: the index of the first, and the keys of all."""

    first: int
    keys: Seq[bytes]


class SharedPromptLimit(StepBudget):
    """Refuses sequences that wait. Requests of higher priority do not wait for others."""

    allows_overtaking = True

    def __init__(
        self,
        block_size: int,
        extend_keys: Callable[[Sequence], Seq[bytes]],
        waiting: Iterable[Sequence] = (),
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        """extend_keys: makes the block keys that a sequence is looked up by, and returns them.

        waiting: sequences that wait, as they are at any time.
        """
        self._block_size, self._extend_keys, self._waiting = block_size, extend_keys, waiting
        self._least_blocks = max(least_tokens // block_size, 1)
        self._owners: dict[Sequence, _Blocks] = {}
        # owners by the index of their first block, and by its key
        self._beginnings: dict[int, dict[bytes, list[Sequence]]] = {}
        self._counts: dict[int, Counter[bytes]] = {}  # by block: sequences, by its key
        self._new_owners: frozenset[Sequence] = frozenset()  # of this step

    def begin_step(self, sequences: int) -> None:
        """Forget prompts that are computed, or no longer run."""
        self._new_owners = frozenset()
        self._counts = {}
        if self._owners:
            kept = {seq: own for seq, own in self._owners.items() if self._computes(seq, own)}
            if len(kept) != len(self._owners):
                self._owners, self._beginnings = {}, {}
                for seq, own in kept.items():
                    self._add(seq, own)

    def _add(self, seq: Sequence, own: _Blocks) -> None:
        self._owners[seq] = own
        self._beginnings.setdefault(own.first, {}).setdefault(own.keys[0], []).append(seq)

    def _computes(self, seq: Sequence, own: _Blocks) -> bool:
        end = (own.first + len(own.keys)) * self._block_size
        return seq.state is SequenceState.RUNNING and seq.computed < end

    def may_start(self, seq: Sequence) -> bool:
        return not self._waits(seq)

    def allow(self, seq: Sequence, want: int) -> int:
        return 0 if self._waits(seq) else want

    def _waits(self, seq: Sequence) -> bool:
        """Whether the sequence would compute blocks that a running one computes."""
        if not self._owners or seq.state is not SequenceState.WAITING:
            return False
        if not seq.request.read_prefix_cache:
            return False
        for owner in self._similar(seq):
            late = owner.request.priority > seq.request.priority  # it may be preempted
            if owner.dp_rank == seq.dp_rank and not late:
                own = self._owners[owner]
                computed = max(owner.computed, seq.planned) // self._block_size
                first = max(own.first, computed)
                if self._is_worth(seq, own, first):
                    return True
        return False

    def _similar(self, seq: Sequence) -> Iterator[Sequence]:
        """Yield the owners whose first block is one of the sequence's."""
        keys = self._keys(seq)
        for first, owners in self._beginnings.items():
            if first < len(keys):
                yield from owners.get(keys[first], ())

    def _is_worth(self, seq: Sequence, own: _Blocks, first: int) -> bool:
        """Whether the blocks from `first` on that both have are worth a step."""
        keys, most = seq.keys, min(len(seq.keys), own.first + len(own.keys))
        if first >= most:
            return False
        # where keys differ all later ones differ too
        end = bisect_left(
            range(first, most), True, key=lambda i: keys[i] != own.keys[i - own.first]
        )
        if not end or end >= self._least_blocks:
            return end > 0
        return end * self._count(seq, first) >= LEAST_SAVED * self._least_blocks

    def _count(self, seq: Sequence, block: int) -> int:
        """Return how many sequences begin with the blocks of this one up to `block`, of those that
        waited when this was first asked in this step."""
        if block not in self._counts:
            keys = [self._keys(one) for one in self._waiting]
            self._counts[block] = Counter([some[block] for some in keys if block < len(some)])
        return self._counts[block][seq.keys[block]] + 1  # it has left the queue itself

    def _keys(self, seq: Sequence) -> Seq[bytes]:
        """Return the keys of a sequence that waits. They are made when they are first needed."""
        return seq.keys or self._extend_keys(seq)

    def take(self, seq: Sequence, n: int) -> None:
        """Note the blocks that a prompt computes from now on."""
        first = seq.planned // self._block_size
        if len(seq.keys) > first and seq not in self._owners:
            self._add(seq, _Blocks(first, tuple(seq.keys[first:])))
            self._new_owners |= {seq}

    def undo(self, seq: Sequence, n: int) -> None:
        if seq in self._new_owners:
            own = self._owners.pop(seq)
            self._beginnings[own.first][own.keys[0]].remove(seq)
            self._new_owners -= {seq}

    def free_decode_rows(self) -> int:
        return NO_BOUND
