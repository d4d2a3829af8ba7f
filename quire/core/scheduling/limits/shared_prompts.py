"""Shared prompt limit: a prompt waits while another one computes the blocks that both begin with.

Prompts that arrive together would each compute their common beginning, because a block is in the
prefix cache only when the step that fills it is over. Here the first of them computes it, and the
others start behind it, with its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.core.scheduling.limits.base import NO_BOUND, StepBudget
from quire.core.types import Sequence, SequenceState

LEAST_TOKENS = 256
"""Common tokens for which it is worth to wait for a step."""


class _Blocks(NamedTuple):
    """Blocks that a sequence computes: the index of the first, and the keys of all."""

    first: int
    keys: Seq[bytes]


class SharedPromptLimit(StepBudget):
    """Refuses sequences that wait. Requests of higher priority do not wait for others."""

    allows_overtaking = True

    def __init__(self, block_size: int, least_tokens: int = LEAST_TOKENS) -> None:
        self._block_size = block_size
        self._least_blocks = max(least_tokens // block_size, 1)
        self._owners: dict[Sequence, _Blocks] = {}
        self._new_owners: frozenset[Sequence] = frozenset()  # of this step

    def begin_step(self, sequences: int) -> None:
        """Forget prompts that are computed, or no longer run."""
        self._new_owners = frozenset()
        self._owners = {seq: own for seq, own in self._owners.items() if self._computes(seq, own)}

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
        for owner, own in self._owners.items():
            late = owner.request.priority > seq.request.priority  # it may be preempted
            if owner.dp_rank == seq.dp_rank and not late:
                computed = max(owner.computed, seq.planned) // self._block_size
                first = max(own.first, computed)
                last = first + self._least_blocks - 1
                both = last < len(seq.keys) and last - own.first < len(own.keys)
                if both and seq.keys[last] == own.keys[last - own.first]:
                    return True  # equal keys: the blocks before are equal too
        return False

    def take(self, seq: Sequence, n: int) -> None:
        """Note the blocks that a prompt computes from now on."""
        first = seq.planned // self._block_size
        if len(seq.keys) - first >= self._least_blocks and seq not in self._owners:
            self._owners[seq] = _Blocks(first, tuple(seq.keys[first:]))
            self._new_owners |= {seq}

    def undo(self, seq: Sequence, n: int) -> None:
        if seq in self._new_owners:
            del self._owners[seq]
            self._new_owners -= {seq}

    def free_decode_rows(self) -> int:
        return NO_BOUND
