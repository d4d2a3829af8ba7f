"""State checkpoints: copies of recurrent states that sequences start from.

A running sequence has its state in the row of its slot. A checkpoint is a row of a pool, taken
when the sequence had `position` tokens, the end of a block, and found by the key of that block:

    64, 128, ... tokens up to `every`, each multiple of it, and the last block border of a prompt

A row with drafts holds a row of the pool for each, which gets the state after it: that of the last
accepted draft is copied to the slot before the next step, and those at positions where a checkpoint
is due become one. So rejected drafts leave no trace in a state.

A sequence starts from a checkpoint or from zeros. A checkpoint can be found when the step that
takes it was applied: only then are all tokens before it known. It is a private helper of the KV
cache and writes `state_start` of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.core.kv.block_pool import BlockKey, BlockPool
from quire.core.kv.deferred_free import DeferredFree
from quire.core.types import NO_BLOCK, Sequence, StateSave

FIRST_POSITION = 64
"""Of the first checkpoint of a sequence: what is shorter is computed again."""


KeyOf = Callable[[Sequence, int], BlockKey]
"""Returns the key of the block of a sequence that ends at a length."""


class _DraftRow(NamedTuple):
    """A row with drafts. length: of the sequence after the token before them, whose state its slot
    has."""

    length: int
    checkpoints: list[int]  # one for each draft
    accepted: int = 0


class StateCheckpoints:
    """Owns the rows of checkpoints, which are numbered from 0."""

    def __init__(
        self,
        size: int,
        block_size: int,
        every: int,
        *,
        shared: bool = True,
        first: int = FIRST_POSITION,
        drafts: int = 0,
    ) -> None:
        """size: of checkpoints, 0: none are taken. drafts: further rows, as many as states after
        drafts hold at most. every: tokens between two. shared: requests start from those of others;
        else forks of a request alone do. first: least position."""
        assert every >= first > 0, (every, first)
        self._first = first
        self._pool = BlockPool(size + drafts)
        self._size, self._max_drafts = size, drafts
        self._block_size = block_size
        self._every = self._border(every)
        self._shared = shared
        self._deferred_free = DeferredFree(self._pool.free)
        self._held: set[Sequence] = set()  # waiting sequences that hold what they start from
        self._saves: dict[int, list[tuple[Sequence, int, int]]] = {}
        # step in flight -> sequence, its length, and the row that it writes
        ladder = [first << i for i in range(every.bit_length())]
        self._early = sorted({self._border(at) for at in ladder if at < every})
        self._step = 0  # that is being planned
        self._drafts: dict[Sequence, _DraftRow] = {}  # in flight
        self._applied: dict[Sequence, _DraftRow] = {}  # whose accepted drafts are known

    @property
    def pool(self) -> BlockPool:
        """The rows, for figures."""
        return self._pool

    # -- positions --------------------------------------------------------------------------

    def _border(self, tokens: int) -> int:
        """Return the first block border at `tokens` or after it."""
        return -(-tokens // self._block_size) * self._block_size

    def _prompt_end(self, seq: Sequence) -> int:
        """Return the last block border of the prompt that leaves a token to compute."""
        return (seq.prompt_len - 1) // self._block_size * self._block_size

    def is_due(self, seq: Sequence, position: int) -> bool:
        """Whether a checkpoint is taken when the sequence has so many tokens."""
        if not self._size or position % self._block_size or position < self._first:
            return False
        if position % self._every == 0 or position == self._prompt_end(seq):
            return True
        return position in self._early and position < seq.prompt_len

    def tokens_before_next(self, seq: Sequence, most: int) -> int:
        """Return how many tokens it may compute at once, of `most`, to end at the next checkpoint
        that is due, if there is one before their end."""
        start, size = seq.planned, self._every
        if not self._size:
            return most
        due = [at for at in (*self._early, self._prompt_end(seq)) if at < seq.prompt_len]
        due.append((start // size + 1) * size)
        ahead = [at for at in due if at > start and at >= self._first]
        return min(most, min(ahead) - start)

    # -- starts -----------------------------------------------------------------------------

    def key(self, seq: Sequence, block_key: BlockKey) -> BlockKey:
        """Return the key of the checkpoint at the end of a block."""
        own = b"" if self._shared else seq.request.id.encode()
        return block_key + b"state" + own

    def has(self, seq: Sequence, block_key: BlockKey) -> bool:
        """Whether there is a checkpoint at the end of a block."""
        return self.key(seq, block_key) in self._pool

    def longest(self, seq: Sequence, keys: Seq[BlockKey], fits: Callable[[int], bool]) -> int:
        """Return the most leading blocks at whose end there is a checkpoint. keys: of the blocks.

        fits: whether so many blocks can be used otherwise.
        """
        for blocks in range(len(keys), 0, -1):
            if self.has(seq, keys[blocks - 1]) and fits(blocks):
                return blocks
        return 0

    def restore(self, seq: Sequence, keys: Seq[BlockKey], known: int) -> None:
        """Have the longest hit of a new sequence be its first `known` blocks, for replays. keys: of
        its blocks."""
        for blocks, key in enumerate(keys, 1):
            own = self.key(seq, key)
            if blocks > known:
                self._pool.evict(own)
            elif blocks == known and own not in self._pool:
                for row in self._pool.allocate(1, seq.request.tenant) or ():
                    self._pool.cache_block(row, own)
                    self._pool.free([row])

    def hold_start(self, seq: Sequence, key: BlockKey) -> None:
        """Hold the checkpoint with this key for a waiting sequence, which starts from it."""
        row = self._pool.acquire_cached(key)
        assert row is not None, "the checkpoint was found and is gone"
        seq.state_start = row
        self._held.add(seq)

    def started(self, seq: Sequence, step: int) -> None:
        """The sequence starts with `step`, which reads its checkpoint."""
        if seq in self._held:
            self._held.discard(seq)
            self._deferred_free.free_after([seq.state_start], step)

    def release(self, seq: Sequence, after: int) -> None:
        """The sequence lost its blocks; it starts anew. after: the last step with a row of it."""
        for of in (self._drafts, self._applied):
            if row := of.pop(seq, None):
                self._deferred_free.free_after(row.checkpoints, after)
        if seq in self._held:
            self._held.discard(seq)
            self._pool.free([seq.state_start])
        seq.state_start = NO_BLOCK

    # -- saves ------------------------------------------------------------------------------

    def begin_saves(self, step: int) -> None:
        """Set the step that save() is about."""
        self._step = step

    def save(self, seq: Sequence, length: int) -> StateSave | None:
        """Have the step that is being planned copy the state of a running sequence, which has so
        many tokens then, after its forward pass. None: there is no row for it."""
        rows = self._pool.allocate(1, seq.request.tenant)
        if rows is None:
            return None
        self._saves.setdefault(self._step, []).append((seq, length, rows[0]))
        return StateSave(seq.slot, rows[0])

    # -- drafts -----------------------------------------------------------------------------

    @property
    def available_drafts(self) -> int:
        """Number of drafts that hold_drafts() has rows for."""
        rows = (*self._drafts.values(), *self._applied.values())
        held = sum([len(row.checkpoints) for row in rows])
        return min(self._max_drafts - held, self._pool.available)

    def hold_drafts(self, seq: Sequence, count: int) -> list[int]:
        """Hold rows for the states after the drafts of the next row of a sequence."""
        rows = self._pool.allocate(count, seq.request.tenant)
        assert rows is not None, "more drafts than available_drafts"
        self._drafts[seq] = _DraftRow(seq.planned + 1, rows)
        return rows

    def drop_drafts(self, seq: Sequence) -> None:
        """The row with drafts that was planned last was taken back."""
        self._pool.free(self._drafts.pop(seq).checkpoints)

    def begin_step(self) -> None:
        """A step is planned: note whose rows with drafts were applied."""
        for seq in [seq for seq in self._drafts if not seq.row_drafts]:
            length, rows, _ = self._drafts.pop(seq)
            self._applied[seq] = _DraftRow(length, rows, seq.computed - length)

    def take_accepted(self, key_of: KeyOf) -> tuple[StateSave, ...]:
        """Return which slots take the state after an accepted draft in the step that is planned.

        Those that are due become checkpoints. key_of: of blocks whose tokens are known.
        """
        taken = []
        for seq, (length, rows, accepted) in self._applied.items():
            if accepted:
                taken.append(StateSave(seq.slot, rows[accepted - 1]))
            for i, row in enumerate(rows[:accepted], length + 1):
                if self.is_due(seq, i):
                    self._pool.cache_block(row, self.key(seq, key_of(seq, i)))
            self._deferred_free.free_after(rows, self._step)
        self._applied.clear()
        return tuple(taken)

    # -- steps ------------------------------------------------------------------------------

    def step_finished(self, step: int, stale: Container[Sequence], key_of: KeyOf) -> None:
        """What this step read and wrote is done: its checkpoints can be found from now on.

        stale: sequences that have lost the tokens of their rows. key_of: of the block that ends at
        a length, whose tokens are known now.
        """
        for seq, length, row in self._saves.pop(step, ()):
            if seq not in stale:
                self._pool.cache_block(row, self.key(seq, key_of(seq, length)))
            self._pool.free([row])
        self._deferred_free.step_finished(step)

    def step_failed(self) -> None:
        """Forget the checkpoints that steps in flight write; call it before step_finished()."""
        for step, saves in self._saves.items():
            self._deferred_free.free_after([row for _, _, row in saves], step)
        self._saves.clear()

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Remove checkpoints whose content is in doubt."""
        self._pool.forget(keys)

    def reset(self) -> bool:
        """Forget all. Returns False, without a change, while any is in use."""
        return self._pool.reset()

    def check(self) -> None:
        """Raise AssertionError unless holds and the pool agree."""
        holds: dict[int, int] = {}
        rows = [row for saves in self._saves.values() for _, _, row in saves]
        for one in (*self._drafts.values(), *self._applied.values()):
            rows += one.checkpoints
        rows += [*self._deferred_free.pending_blocks(), *(s.state_start for s in self._held)]
        for row in rows:
            holds[row] = holds.get(row, 0) + 1
        self._pool.check(holds)
