"""KV cache: manages the block tables of sequences, and shares prefixes between them.

A sequence has one table per layer group; all tables are equally long and entry i covers tokens
[i * B, (i + 1) * B). Entries whose block is outside of a group's window are NO_BLOCK. All groups
draw from one pool. A model without KV has no group and no block: every sequence fits, and none
continues what another step computed. Content is identified by chained keys, so a key covers all
tokens before it:

    key(i) = SHA-256(key(i - 1) | token ids | extra content of block i)   key(-1) = SHA-256(root)

and a group's block is cached under key(i) + group number, on the device or in a tier. What a tier
has is loaded into device blocks before a step reads it. It is a private helper of the scheduler
and writes `tables`, `keys`, `computed` and `planned` of sequences.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable
from collections.abc import Sequence as Seq

from quire.core.kv.block_keys import BlockKeys
from quire.core.kv.block_pool import BlockKey, BlockPool
from quire.core.kv.cache_spec import CacheSpec, FullAttentionSpec
from quire.core.kv.cross_blocks import CrossBlocks
from quire.core.kv.deferred_free import DeferredFree
from quire.core.kv.state_checkpoints import StateCheckpoints
from quire.core.kv.tiers.base import SlowTier
from quire.core.kv.tiers.host import NO_COPIES, HostTier, TierCopies
from quire.core.media.item_rows import start_of_divided_run
from quire.core.media.sources import has_sources
from quire.core.types import NO_BLOCK, UNKNOWN, BlockCopy, Request, Sequence, StateSave

Tables = tuple[list[int], ...]

MAX_SUSPECT_KEYS = 4096
"""Maximum of blocks remembered as read by a sequence with non-finite logits."""

MAX_LOADING_SHARE = 0.25
"""Maximum share of the device blocks that wait for loads of slow tiers."""


class KVCache:
    """Each table holds each of its blocks once; DeferredFree holds what steps still use."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        specs: Seq[CacheSpec] = (FullAttentionSpec(),),
        *,
        prefix_caching: bool = True,
        host: HostTier | None = None,
        states: StateCheckpoints | None = None,
    ) -> None:
        """host: a tier whose copies are part of plans. Other tiers are those of the pool. states:
        of a model with recurrent layers."""
        assert block_size > 0, block_size
        assert specs or not (pool.size or (prefix_caching and states is None)), (
            "without a layer group there are no blocks"
        )
        self.states = states
        self.pool = pool
        self.block_size = block_size
        self.keys = BlockKeys(block_size)
        self.specs = tuple(specs)
        self.prefix_caching = prefix_caching
        self.deferred_free = DeferredFree(pool.free)
        self.host = host
        if host is not None:
            assert prefix_caching, "without prefix caching a tier finds nothing"
            pool.add_tier(host)
        self._cross = CrossBlocks(pool, block_size, host, shared=prefix_caching)
        self._loading: dict[Hashable, tuple[SlowTier, dict[BlockKey, int]]] = {}
        self._suspect_keys: OrderedDict[BlockKey, None] = (
            OrderedDict()
        )  # blocks read by a sequence with non-finite logits
        self._window_groups = tuple(
            g for g, spec in enumerate(self.specs) if spec.window is not None
        )
        self._full_groups = tuple(g for g, spec in enumerate(self.specs) if spec.window is None)
        self._group_suffixes = tuple(bytes([g]) if g else b"" for g in range(len(self.specs)))

    # -- sizes ------------------------------------------------------------------------------

    def max_blocks(self, request: Request, tokens: int) -> int:
        """Maximum of blocks that a sequence of a request needs at a length of `tokens` tokens."""
        own = sum(spec.max_blocks(tokens, self.block_size) for spec in self.specs)
        return own + self._cross.num_blocks(request)

    def token_capacity(self, seq: Sequence) -> int:
        """Number of tokens beyond `planned` that the tables and the available blocks can hold."""
        if not self.specs:
            return seq.pending
        blocks = len(seq.tables[0]) + self.pool.available // len(self.specs)
        return blocks * self.block_size - seq.planned

    def start_capacity(self, seq: Sequence) -> int:
        """token_capacity() of a waiting sequence, after it took blocks for its loads and copies.
        Of one without blocks, after match_prefix()."""
        if not self.specs:
            return seq.pending
        groups, taken = len(self.specs), self._is_shared(seq) * len(self.specs)
        if self.host is not None and len(seq.keys) * self.block_size >= seq.planned:
            taken += len(self._missing_blocks(seq))
        return max(self.token_capacity(seq) + -taken // groups * self.block_size, 0)

    def blocks_to_allocate(self, seq: Sequence, n: int) -> int:
        """Number of blocks that n more tokens need in addition."""
        if not self.specs:
            return 0
        per_group = -(-(seq.planned + n) // self.block_size) - len(seq.tables[0])
        return max(per_group, 0) * len(self.specs)

    def blocks_needed(self, seq: Sequence) -> int:
        """Maximum of new blocks that a waiting sequence needs to compute all its tokens."""
        needed = len(self.specs) if self._is_shared(seq) else 0
        if has_sources(seq.request):
            needed += self._cross.blocks_needed(seq)
        tokens, size = len(seq.tokens), self.block_size
        for spec, table in zip(self.specs, seq.tables):
            missing = spec.max_blocks(tokens, size) - len(table) + table.count(NO_BLOCK)
            if missing > 0:
                needed += missing
        return needed

    # -- allocation -------------------------------------------------------------------------

    def new_tables(self) -> Tables:
        return tuple([] for _ in self.specs)

    def allocate(self, seq: Sequence, n: int) -> bool:
        """Allocate blocks for n more tokens. Returns False, without a change, if too few."""
        needed = self.blocks_to_allocate(seq, n)
        if not needed:
            return True
        blocks = self.pool.allocate(needed, seq.request.tenant)
        if blocks is None:
            return False
        each = needed // len(self.specs)
        for g, table in enumerate(seq.tables):
            table += blocks[g * each : (g + 1) * each]
        return True

    def free_out_of_window(self, seq: Sequence, after: int) -> bool:
        """Free blocks outside of the window when step `after` has finished. Returns whether any.

        The window ends at `computed`, not `planned`: steps in flight, and siblings that fork when
        the prompt is confirmed, still read older blocks.
        """
        freed_any = False
        for g in self._window_groups:
            table = seq.tables[g]
            out_of_window: list[int] = []
            for i in range(self.specs[g].first_needed(seq.computed) // self.block_size - 1, -1, -1):
                if table[i] == NO_BLOCK:
                    break
                out_of_window.append(table[i])
                table[i] = NO_BLOCK
            self.deferred_free.free_after(out_of_window[::-1], after)
            freed_any = freed_any or bool(out_of_window)
        return freed_any

    def release(self, seq: Sequence, after: int) -> None:
        """Free all blocks of the sequence when step `after` has finished."""
        for table in seq.tables:
            self.deferred_free.free_after([b for b in table if b != NO_BLOCK], after)
        if seq.cross_tables:
            held = [block for table in seq.cross_tables for block in table if block != NO_BLOCK]
            self.deferred_free.free_after(held, after)
            seq.cross_tables, seq.encoder_step, seq.new_sources = [], -1, ()
        if self.states is not None:
            self.states.release(seq, after)
        seq.tables = self.new_tables()
        seq.computed = seq.planned = 0

    # -- prefixes ---------------------------------------------------------------------------

    def match_prefix(self, seq: Sequence, *, prefix: bool = True) -> None:
        """Use cached blocks for the longest known prefix; at least one token is left to compute.

        Blocks that only the host tier has are NO_BLOCK until load_prefix(). prefix: False if every
        position must be computed; the encoder's output is used in any case.
        """
        assert not seq.planned, "match_prefix() needs a sequence without blocks"
        if has_sources(seq.request):
            self._cross.match(seq)
        keys = self.extend_keys(seq)
        hit = self.find_prefix(seq) // self.block_size if prefix else 0
        seq.computed = seq.planned = hit * self.block_size
        if hit and self.states is not None:
            self.states.hold_start(seq, self.states.key(seq, keys[hit - 1]))
        for g in range(len(self.specs)):
            first = self._first_block(g, hit)
            seq.tables[g].extend([NO_BLOCK] * first)
            for key in keys[first:hit]:
                block = self.pool.acquire_cached(key + self._group_suffixes[g])
                seq.tables[g].append(NO_BLOCK if block is None else block)

    def extend_keys(self, seq: Sequence) -> list[BlockKey]:
        """Extend the keys of a sequence to all that match_prefix() looks up, and return those."""
        if not self.prefix_caching or not seq.request.read_prefix_cache:
            return []
        return self.keys.first(seq, (len(seq.tokens) - 1) // self.block_size)

    def find_prefix(self, seq: Sequence) -> int:
        """Number of leading tokens that match_prefix() would find now for a sequence without
        blocks."""
        keys = self.extend_keys(seq)
        if self.states is not None:
            return self._find_state(seq, keys) * self.block_size
        hit = self._longest_hit(keys, self._is_available)
        request, size = seq.request, self.block_size
        while request.media and (start := start_of_divided_run(request, hit * size)) is not None:
            hit = self._longest_hit(keys[: start // size], self._is_available)
        return hit * self.block_size

    def _find_state(self, seq: Sequence, keys: list[BlockKey]) -> int:
        """Number of leading blocks that are cached, with the state at their end."""
        assert self.states is not None
        has = self._is_available
        return self.states.longest(
            seq, keys, lambda blocks: self._longest_hit(keys[:blocks], has) == blocks
        )

    def save_state(self, seq: Sequence, length: int) -> StateSave | None:
        """Have the step that is being planned save the state of a sequence, which has so many
        tokens then. None: there is no row for it, or the prefix cache has it."""
        assert self.states is not None
        if seq.tokens[length - 1] != UNKNOWN and self.states.has(seq, self._key_at(seq, length)):
            return None
        return self.states.save(seq, length)

    def take_accepted_states(self) -> tuple[StateSave, ...]:
        """Return what the step that is being planned copies to slots: see StateCheckpoints."""
        assert self.states is not None
        return self.states.take_accepted(self._key_at)

    def _key_at(self, seq: Sequence, length: int) -> BlockKey:
        """Return the key of the block that ends there."""
        return self.keys.first(seq, length // self.block_size)[-1]

    def load_prefix(self, seq: Sequence, step: int) -> int:
        """Load what match_prefix() found in the host tier, with `step`, which is being planned.

        The pool must have the blocks. Returns the number of tokens that are not from the device.
        """
        missing = self._missing_blocks(seq) if self.host is not None else []
        host, keys = self.host, [key for key, _, _ in missing]
        if host is not None and missing:
            blocks = self.pool.allocate(
                len(keys), seq.request.tenant, load=lambda blocks: host.load(keys, blocks)
            )
            assert blocks is not None, f"{seq.request.id} was admitted without blocks to load"
            for (key, table, i), block in zip(missing, blocks, strict=True):
                self.pool.cache_block(block, key)
                table[i] = block
        if has_sources(seq.request):
            self._cross.allocate(seq, step)
        own = {i for _, table, i in missing if any(table is one for one in seq.tables)}
        return len(own) * self.block_size

    def _missing_blocks(self, seq: Sequence) -> list[tuple[BlockKey, list[int], int]]:
        """Return (key, table, index) of contents that match_prefix() found off the device."""
        hit = seq.computed // self.block_size
        missing = [
            (seq.keys[i] + suffix, table, i)
            for g, (table, suffix) in enumerate(zip(seq.tables, self._group_suffixes, strict=True))
            for i in range(self._first_block(g, hit), hit)
            if table[i] == NO_BLOCK
        ]
        if any(NO_BLOCK in table for table in seq.cross_tables):
            missing += [
                (keys[i], table, i)
                for keys, table in zip(self._cross.keys(seq), seq.cross_tables, strict=True)
                for i, block in enumerate(table)
                if block == NO_BLOCK
            ]
        return missing

    def cache_full_blocks(self, seq: Sequence, since: int) -> None:
        """Add to the prefix cache the blocks completed between token `since` and seq.computed.

        Not those of a pooling request that reads none: others like it would not read them.
        """
        first, last = since // self.block_size, seq.computed // self.block_size
        if first == last or not self.prefix_caching:
            return
        if seq.request.pooling is not None and not seq.request.read_prefix_cache:
            return
        keys = self.keys.first(seq, last)
        for g, table in enumerate(seq.tables):
            for i in range(first, last):
                if table[i] != NO_BLOCK:
                    self.pool.cache_block(table[i], keys[i] + self._group_suffixes[g])

    def restore_prefix(self, seq: Sequence, tokens: int) -> None:
        """Limit the prefix hit of a new waiting sequence to its first `tokens` tokens, for replays.

        What other sequences computed before the recording, and its order of use, is unknown here.
        """
        if not self.prefix_caching or len(self.specs) > 1 or not seq.request.read_prefix_cache:
            return
        if self.find_prefix(seq) == tokens:
            return  # the order of use stays as it is
        keys, known = (
            self.keys.first(seq, len(seq.tokens) // self.block_size),
            tokens // self.block_size,
        )
        held = []
        for key in keys[:known]:
            block = self.pool.acquire_cached(key)
            if block is None and (taken := self.pool.allocate(1, seq.request.tenant)):
                (block,) = taken
                self.pool.cache_block(block, key)
            if block is not None:
                held.append(block)
        self.pool.free(held)
        if known < len(keys):
            self.pool.evict(keys[known])
        if self.states is not None:
            self.states.restore(seq, keys, known)

    def invalidate(self, seq: Sequence) -> None:
        """Remove from the prefix cache what the sequence has computed, also from blocks it freed.

        A block that it found there is removed once two such sequences have read it: a single one
        may have non-finite logits for another reason. The same content in a block that another
        sequence computed stays.
        """
        own, end = seq.cached // self.block_size, seq.computed // self.block_size
        computed = [
            key + group
            for table, group in zip(seq.tables, self._group_suffixes, strict=True)
            for key, block in zip(seq.keys[own:end], table[own:end], strict=False)
            if block == NO_BLOCK or self.pool.key_of(block) or key + group not in self.pool
        ]
        if self.states is not None:
            self.states.forget([self.states.key(seq, key) for key in seq.keys[own:]])
        found = [b for table in seq.tables for b in table[:own] if b != NO_BLOCK]
        computed += [key for keys in self._cross.keys(seq) for key in keys]
        read = [key for key in map(self.pool.key_of, found) if key is not None]
        self.pool.forget([*computed, *(key for key in read if key in self._suspect_keys)])
        self._suspect_keys.update(dict.fromkeys(read))
        while len(self._suspect_keys) > MAX_SUSPECT_KEYS:
            self._suspect_keys.popitem(last=False)

    def _is_available(self, key: BlockKey) -> bool:
        """Whether the next step can read this content: from the device pool or the host tier."""
        return key in self.pool or (self.host is not None and key in self.host)

    def _longest_hit(self, keys: Seq[BlockKey], has: Callable[[BlockKey], bool]) -> int:
        """Number of leading blocks that all groups can take as computed."""
        most = len(keys)
        for g in self._full_groups:
            suffix = self._group_suffixes[g]
            for i in range(most):
                if not has(keys[i] + suffix):
                    most = i
                    break
        if not self._window_groups:
            return most
        best, runs = 0, [0] * len(self.specs)  # consecutive blocks, up to here, that a group has
        for i in range(most):
            for g in self._window_groups:
                runs[g] = runs[g] + 1 if has(keys[i] + self._group_suffixes[g]) else 0
            if all(i + 1 - runs[g] <= self._first_block(g, i + 1) for g in self._window_groups):
                best = i + 1
        return best

    def _first_block(self, group: int, blocks: int) -> int:
        """Index of the first of `blocks` full blocks that the next token still reads."""
        return self.specs[group].first_needed(blocks * self.block_size) // self.block_size

    # -- forks ------------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence, length: int) -> None:
        """Share the parent's blocks of tokens [0, length) with the child, if all are still there.

        The last one may be partly filled, and the parent may continue to fill it: copy_on_write()
        gives the child its own block before its first write.
        """
        assert not child.planned, "fork() needs a sequence without blocks"
        if self.states is not None:
            length = self._fork_state(parent, child, length)
        if not (self.specs or self.states) or not length:
            return
        blocks = -(-length // self.block_size)
        firsts = [min(spec.first_needed(length) // self.block_size, blocks) for spec in self.specs]
        for first, table in zip(firsts, parent.tables, strict=True):
            if len(table) < blocks or NO_BLOCK in table[first:blocks]:
                if self.states is not None:
                    self.states.release(child, 0)
                return
        for table in parent.cross_tables:
            self.pool.share(table)
        child.cross_tables = [list(table) for table in parent.cross_tables]
        for g, first in enumerate(firsts):
            shared = parent.tables[g][first:blocks]
            self.pool.share(shared)
            child.tables[g].extend([NO_BLOCK] * first + shared)
        child.computed = child.planned = length
        child.keys.extend(parent.keys[: length // self.block_size])

    def _fork_state(self, parent: Sequence, child: Sequence, length: int) -> int:
        """Have a fork start from the last checkpoint within `length` tokens; return its tokens."""
        assert self.states is not None
        keys = self.keys.first(parent, length // self.block_size)
        blocks = self.states.longest(parent, keys, lambda _: True)
        if blocks:
            self.states.hold_start(child, self.states.key(parent, keys[blocks - 1]))
        return blocks * self.block_size

    def copy_on_write(self, seq: Sequence, after: int) -> list[BlockCopy] | None:
        """Replace partly filled blocks that a fork shares by its own, and return the copies.

        The shared ones are freed when step `after`, which does the copying, has finished. None,
        without a change, if the pool has too few blocks.
        """
        if self.states is not None:
            self.states.started(seq, after)
        if not self._is_shared(seq):
            return []
        blocks = self.pool.allocate(len(self.specs), seq.request.tenant)
        if blocks is None:
            return None
        copies = []
        for table, block in zip(seq.tables, blocks, strict=True):
            copies.append(BlockCopy(table[-1], block))
            self.deferred_free.free_after([table[-1]], after)
            table[-1] = block
        return copies

    def _is_shared(self, seq: Sequence) -> bool:
        """Whether a waiting sequence shares partly filled blocks; a prefix hit never does."""
        return seq.planned % self.block_size != 0

    # -- loads of slow tiers -------------------------------------------------------------------

    def start_loads(self, request: Request, tier: SlowTier) -> list[Hashable]:
        """Load what the prompt's longest hit lacks from a slow tier, as far as blocks suffice.

        Returns the names of the loads that the request should wait for, of other requests too.
        """
        if not self.prefix_caching or not request.read_prefix_cache:
            return []
        seq = Sequence(request, 0, list(request.prompt), self.new_tables())
        keys = self.keys.first(seq, (len(request.prompt) - 1) // self.block_size)
        under_way = {key: name for name, (_, load) in self._loading.items() for key in load}
        space = int(self.pool.size * MAX_LOADING_SHARE) - len(under_way)
        space = min(space, self.pool.available)
        while True:
            hit = self._longest_hit(keys, lambda key: self._is_available(key) or key in tier)
            wanted = [
                key + self._group_suffixes[g]
                for g in range(len(self.specs))
                for key in keys[self._first_block(g, hit) : hit]
            ]
            missing = [k for k in wanted if k not in under_way and not self._is_available(k)]
            if len(missing) <= max(space, 0):
                break
            keys = keys[: hit - 1]
        names = dict.fromkeys(under_way[key] for key in wanted if key in under_way)
        blocks = self.pool.allocate(len(missing), request.tenant, offer=False) if missing else None
        if blocks:
            name = tier.load(missing, blocks)
            self._loading[name] = tier, dict(zip(missing, blocks, strict=True))
            names[name] = None
        return list(names)

    def finish_load(self, name: Hashable, *, loaded: bool) -> None:
        """Add the loaded content to the cache, unless it was forgotten, and free the blocks."""
        tier, load = self._loading.pop(name)
        for key, block in load.items():
            if loaded and key in tier:
                self.pool.cache_block(block, key)
        self.pool.free([*load.values()])

    # -- steps ------------------------------------------------------------------------------

    def take_copies(self, step: int) -> TierCopies:
        """Return the copies between device and host of the plan of this step."""
        if self.states is not None:
            self.states.begin_saves(step)
        return NO_COPIES if self.host is None else self.host.take_copies(step)

    def reset(self) -> bool:
        """Forget all cached content. Returns False if any is in use."""
        return self.pool.reset() and (self.states is None or self.states.reset())

    def step_finished(self, step: int, stale: Container[Sequence] = ()) -> None:
        """Free the blocks that waited for this step. stale: sequences whose rows are dropped."""
        self.deferred_free.step_finished(step)
        self._cross.step_finished(step)
        if self.states is not None:
            self.states.step_finished(step, stale, self._key_at)
        if self.host is not None:
            self.host.step_finished(step)

    def step_failed(self) -> bool:
        """Forget the contents that steps in flight copy; call it before step_finished().

        Returns whether sequences may hold blocks whose content was not loaded.
        """
        if self.states is not None:
            self.states.step_failed()
        lost = self._cross.take_unwritten()
        lost += self.host.forget_copies_in_flight() if self.host is not None else []
        self.pool.uncache(lost)
        return bool(lost)

    # -- invariants -------------------------------------------------------------------------

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless tables, deferred frees and pools agree. Takes all alive."""
        holds: Counter[int] = Counter(self.deferred_free.pending_blocks())
        for _, load in self._loading.values():
            holds.update(load.values())
        for seq in sequences:
            assert len({len(table) for table in seq.tables}) <= 1, f"uneven tables {seq.tables}"
            held = min((len(table) for table in seq.tables), default=None)
            assert held is None or held * self.block_size >= seq.planned, "tokens without a block"
            self._check_windows(seq)
            for table in seq.tables:
                holds.update(b for b in table if b != NO_BLOCK)
            for table in seq.cross_tables:
                holds.update(b for b in table if b != NO_BLOCK)
        self.pool.check(dict(holds))
        if self.states is not None:
            self.states.check()
        if self.host is not None:
            self.host.check()

    def _check_windows(self, seq: Sequence) -> None:
        for spec, table in zip(self.specs, seq.tables, strict=True):
            first = spec.first_needed(seq.computed) // self.block_size
            assert NO_BLOCK not in table[first:], f"a block that is still read was freed: {table}"
