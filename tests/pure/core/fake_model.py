"""A model whose output is wrong if the core is.

Like attention, its KV cells depend on all cells before them (within the window, in a window
group) and are read only through block tables; like a runner, it keeps tables and last tokens in
slots of its own, and executes a plan in the order of StepPlan. It executes late: submit() copies
the plan, and wait() executes it, after the scheduler has planned on.

reference_output() is the same arithmetic on plain lists: the expected output for any schedule.
"""

from __future__ import annotations

from collections import deque
from itertools import chain

from quire.config.memory.part_facts import PAGE_ROWS
from quire.core.media.item_rows import rows_between, start_of_divided_run
from quire.core.media.sources import sources_of
from quire.core.scheduling.limits.media_encoder import MediaStep, MediaSteps
from quire.core.step_results import combine_results
from quire.core.types import (
    NO_BLOCK,
    UNKNOWN,
    Pooled,
    StateMoves,
    StepResult,
    TokenLogprobs,
    Wants,
)

VOCAB = 6
MOD = 1_000_003


def cell(state, token, group, salt):
    """Content of a KV cell. salt: separates contents of equal tokens, as an adapter does."""
    return (state * 31 + token * 7 + group * 3 + sum(salt) + 1) % MOD


def fold(cells):
    h = 7
    for c in cells:
        h = (h * 37 + c) % MOD
    return h


def draw(state, seed, position):
    """Return the sampled token: a function of the state, the seed and the output position."""
    return (state ^ (seed * 7919 + position * 104_729)) % VOCAB


def source_cells(request):
    """Content of the cells of a request's source: what an encoder made of it."""
    whole = fold(request.encoder_prompt) + sum(request.salt)  # each depends on all of the source
    return [(token * 11 + i * 5 + whole) % MOD for i, token in enumerate(request.encoder_prompt)]


def image_cells(source):
    """What cross attention reads of images."""
    return [media_row(one, i) for one in source.items for i in range(one.source_rows)]


def seen_cells(request, position):
    """What a token at a position sees of its request's sources."""
    if request.encoder_prompt:
        return source_cells(request)
    seen = []
    for one in sources_of(request):
        for first, length in one.views():
            seen = image_cells(one)[:length] if position >= first else seen
    return seen


def media_row(item, row):
    """The row that an encoder makes of an item."""
    return 1000 + sum(item.digest) * 13 + row * 17


def media_tokens(request):
    """The tokens of a prompt, with rows of media in place of those that take one."""
    tokens = list(request.prompt)
    for item in request.media:
        for run in rows_between(item, 0, len(tokens)):
            for i in range(run.count):
                tokens[run.position + i] = media_row(item, run.row + i)
    return tokens


def advanced(state, token, salt):
    """A recurrent state after one more token."""
    return (state * 53 + token * 11 + sum(salt) + 5) % MOD


def reference_output(
    prompt, length, *, windows=(None,), seed=0, salt=b"", source=None, recurrent=False
):
    """Return the first `length` output tokens, computed without a cache. source: the cells that a
    position sees."""
    carried = 0
    tokens, cells = list(prompt), [[] for _ in windows]
    for position in range(len(prompt) + length):
        seen = source(position) if source else ()
        state = start = fold(seen) if seen else 0
        for g, w in enumerate(windows):
            seen = cells[g] if w is None else cells[g][max(0, position - w + 1) :]
            state = (state * 41 + fold(seen)) % MOD
        for g in range(len(windows)):
            cells[g].append(cell(state, tokens[position], g, salt))
        if recurrent:
            carried = advanced(carried, tokens[position], salt)
        if position + 1 == len(tokens):
            state = start
            for g, w in enumerate(windows):
                seen = cells[g] if w is None else cells[g][max(0, position + 1 - w) :]
                state = (state * 43 + fold(seen)) % MOD
            tokens.append(draw(state + carried, seed, len(tokens) - len(prompt)))
    return tokens[len(prompt) : len(prompt) + length]


class FakeRanks:
    """The models of several data-parallel ranks."""

    def __init__(self, ranks):
        self.ranks = ranks

    def submit(self, plan):
        for model, own in zip(self.ranks, plan.dp_plans, strict=True):
            model.submit(own)

    def wait(self):
        return combine_results([model.wait() for model in self.ranks])

    def lose(self):
        for model in self.ranks:
            model.lose()


class FakeModel:
    """blocks, host: number of blocks in device and host memory, initialized with garbage."""

    def __init__(self, blocks, block_size, windows=(None,), host=0, slots=64, proposer=None):
        self.size, self.windows = block_size, windows
        self.device = [[("garbage", b, i) for i in range(block_size)] for b in range(blocks)]
        self.host = [[("garbage", b, i) for i in range(block_size)] for b in range(host)]
        self.joined = [None] * slots
        self.tables = [None] * slots
        self.last = [None] * slots
        self.ahead = [(0, ())] * slots  # accepted drafts of the last row, and drafts behind it
        self.queue = deque()
        self.proposer = proposer  # (sequence, tokens) -> proposed next ones, in the result
        self.sources = [()] * slots  # blocks of the source of each slot
        self.encoded = []  # sources that were encoded
        self.accepted = []  # number of accepted drafts of each row with drafts
        self.skips = lambda: False  # whether a row yields no token
        self.read = [[] for _ in range(slots)]  # tokens computed since a row at the start
        self.states = None  # of a model with recurrent layers: of slots, then checkpoints
        self.media_pages = {}  # page -> rows
        self.encoded_items = []  # digests
        self.slices_run = ([], 0)  # digests of items that are encoded in slices, and how many

    def submit(self, plan):
        """Copy the plan, as a runner does when it fills its input buffers."""
        for slot in plan.leaves:
            assert self.joined[slot] is not None, f"slot {slot} is empty already"
            self.joined[slot] = None
        for seq in plan.joins:
            assert self.joined[seq.slot] is None, f"slot {seq.slot} is taken"
            self.joined[seq.slot] = seq
            self.tables[seq.slot] = [[] for _ in self.windows]
            self.sources[seq.slot] = tuple(chain(*seq.cross_tables))
        for seq in plan.changed_tables:
            self.tables[seq.slot] = [[] for _ in self.windows]
        count = len(plan.continues)
        rows = [self._row(row, continues=i < count) for i, row in enumerate(plan.rows)]
        encodes = [seq for seq in plan.joins if seq.encoder_step == plan.step]
        sources = [
            (seq.request, sources_of(seq.request)[i], tuple(seq.cross_tables[i]))
            for seq in encodes
            for i in seq.new_sources
        ]
        self._check_block_reuse(plan, rows, {b for *_, blocks in sources for b in blocks})
        rank = rows[0][0].dp_rank if rows else 0  # a stale sequence may go to another one
        moves = next((one for one in plan.parts if isinstance(one, StateMoves)), StateMoves())
        starts = [(seq.slot, seq.state_start) for seq in plan.joins]
        self.queue.append((plan, rows, sources, rank, starts, moves.saves))

    def _check_block_reuse(self, plan, rows, encoded):
        """Check that no row writes blocks that a step in flight reads for another sequence."""
        for other, other_rows, *_ in self.queue:
            read = {b for *_, tables in other_rows for t in tables for b in t}
            read |= {c.src for c in other.copies}
            read |= {b for *_, (_, _, source), _ in other_rows for b in source}
            written = {c.dst for c in (*plan.copies, *plan.swap_in)} | encoded
            assert not read & written, "a block was allocated too early"
            for seq, _, start, tokens, _, tables in rows:
                blocks = {
                    t[p // self.size] for t in tables for p in range(start, start + len(tokens))
                }
                for owner, *_, other_tables in other_rows:
                    clash = blocks & {b for t in other_tables for b in t}
                    assert seq is owner or not clash, "a block was allocated too early"
            host_sources = {c.src for c in other.swap_in}
            assert not host_sources & {c.dst for c in plan.swap_out}, (
                "a host block was reused too early"
            )

    def _row(self, row, continues):
        seq = row.seq
        assert self.joined[seq.slot] is seq, "a row of a sequence without a slot"
        for g, table in enumerate(seq.tables):
            known_table = self.tables[seq.slot][g]
            known_table += table[len(known_table) :]
            assert known_table == table, (
                "a table changed other than by append, and is not in changed_tables"
            )
        assert row.count == row.drafts + 1 or not row.drafts
        drafts = (UNKNOWN,) * row.drafts if continues else seq.drafts[: row.drafts]
        assert len(drafts) == row.drafts
        tokens = seq.tokens[row.start : row.start + row.count - row.drafts]
        for end in (row.start, row.start + len(tokens)):
            divided = start_of_divided_run(seq.request, end)
            assert divided is None or end == row.start == seq.prompt_len - 1, "a run was divided"
        tables = [list(t) for t in self.tables[seq.slot]]
        wants = row.wants, drafts, self.sources[seq.slot]
        assert wants[2] == tuple(chain(*seq.cross_tables)), (
            "the source of a running sequence changed"
        )
        return seq, seq.slot, row.start, [*tokens, *drafts], wants, tables

    def wait(self):
        """Execute the oldest plan."""
        plan, rows, sources, rank, starts, saves = self.queue.popleft()
        count = len(plan.continues)
        rows = [*(self._continued(*row) for row in rows[:count]), *rows[count:]]
        self._copy(plan.swap_out, self.device, self.host)
        self._copy(plan.swap_in, self.host, self.device)
        self._copy(plan.copies, self.device, self.device)
        self._encode(sources)
        self._insert_media(plan, rows, rank)
        self._check_writes(rows)
        slots = len(self.joined)
        for slot, checkpoint in starts if self.states else ():
            self.states[slot] = 0 if checkpoint == NO_BLOCK else self.states[slots + checkpoint]
        generated = [self._run(*row) for row in rows]
        for slot, checkpoint in saves:
            self.states[slots + checkpoint] = self.states[slot]
        pooled = self._pool(rows)
        logprobs = self._prompt_logprobs(rows)
        proposals = self._propose(rows, generated)
        return StepResult(generated, prompt_logprobs=logprobs, pooled=pooled, drafts=proposals)

    def _continued(self, seq, slot, least, tokens, wants, tables):
        """Return a row that begins where the one before has ended."""
        accepted, proposed = self.ahead[slot]
        kind, drafts, source = wants
        drafts = (*proposed, *[0] * len(drafts))[: len(drafts)]
        start, tokens = least + accepted, [self.last[slot], *drafts]
        return seq, slot, start, tokens, (kind, drafts, source), tables

    def _pool(self, rows):
        """Return of each pooled row the tokens whose states there were, as a mean needs them all.

        Without groups or states a row is a whole prompt: nothing of an earlier step could be read.
        """
        results = {}
        for i, (seq, slot, start, tokens, (wants, _, _), _) in enumerate(rows):
            assert self.windows or self.states or (start == 0 and len(tokens) == seq.prompt_len)
            known = self.read[slot] if start else ()
            self.read[slot] = [*known, *(token for token in tokens if token != UNKNOWN)]
            if wants is Wants.POOLED:
                results[i] = Pooled((len(self.read[slot]),), bytes(self.read[slot]))
        return results

    def _propose(self, rows, generated):
        """Return drafts for the next row of each sequence that has a token."""
        results = {}
        for i, (seq, slot, start, tokens, (_, drafts, _), _) in enumerate(rows):
            if self.proposer is not None and generated[i]:
                known = [*seq.tokens[:start], *tokens[: len(tokens) - len(drafts)], *generated[i]]
                results[i] = tuple(self.proposer(seq, known))
                self.ahead[slot] = len(generated[i]) - 1, results[i]
        return {i: drafts for i, drafts in results.items() if drafts}

    def _prompt_logprobs(self, rows):
        """Return positions as logprob entries of requests that compute all of them."""
        results = {}
        for i, (seq, _, start, tokens, _, _) in enumerate(rows):
            end = min(start + len(tokens) + 1, seq.prompt_len)
            if seq.index == 0 and not seq.request.read_prefix_cache and start + 1 < end:
                results[i] = [TokenLogprobs([p], [0.0], [1]) for p in range(start + 1, end)]
        return results

    def _encode(self, sources):
        """Write the cells of new sources, before rows read them."""
        for request, source, blocks in sources:
            digests = tuple([one.digest for one in source.items])
            self.encoded.append(request.encoder_prompt or digests)
            cells = source_cells(request) if request.encoder_prompt else image_cells(source)
            for i, value in enumerate(cells):
                self.device[blocks[i // self.size]][i % self.size] = value

    def _insert_media(self, plan, rows, rank):
        """Encode the items of a plan, and put rows of the cache in place of tokens."""
        part = next((one for one in plan.parts if isinstance(one, MediaSteps)), None)
        step = part.ranks[rank] if part and rows else MediaStep((), {})
        sliced = part.slice if part and rows else None
        for item, pages in (*step.encodes, *(self._advance(sliced) if sliced else ())):
            self.encoded_items.append(item.digest)
            made = [media_row(item, row) for row in range(item.num_rows)]
            for i, page in enumerate(pages):
                self.media_pages[page] = made[i * PAGE_ROWS : (i + 1) * PAGE_ROWS]
        for seq, _, start, tokens, _, _ in rows:
            for item in seq.request.media:
                for run in rows_between(item, start, start + len(tokens)):
                    for i in range(run.count):
                        page, at = divmod(run.row + i, PAGE_ROWS)
                        rows = self.media_pages.get(step.pages[item.digest][page], ())
                        tokens[run.position + i - start] = rows[at] if at < len(rows) else -7

    def _advance(self, sliced):
        """Run a slice behind those that were run of the same items; the last one encodes them."""
        digests, (first, last) = [one.item.digest for one in sliced.encodes], sliced.blocks
        assert not first or self.slices_run == (digests, first), "a slice is behind no other"
        self.slices_run = digests, last
        return sliced.encodes if sliced.ends else ()

    def _seen(self, request, blocks, position):
        """Fold what a position sees of the sources in these blocks."""
        seen = 0
        for one in sources_of(request):
            count = -(-one.length // self.size)
            own, blocks = blocks[:count], blocks[count:]
            for first, length in one.views():
                seen = fold(self._read(own, 0, length)) if position >= first else seen
        return seen

    def lose(self):
        """Fail the oldest plan, without any effect on the device."""
        plan, *_ = self.queue.popleft()
        for row in plan.rows:
            self.last[row.seq.slot], self.ahead[row.seq.slot] = 0, (0, ())

    def _copy(self, pairs, source, target):
        """Copy all blocks at once: a kernel has no order."""
        read = [list(source[a]) for a, _ in pairs]
        assert len({b for _, b in pairs}) == len(pairs), "two copies to one block"
        for (_, b), cells in zip(pairs, read):
            target[b] = cells

    def _check_writes(self, rows):
        written = [
            (table[p // self.size], p % self.size)
            for _, _, start, tokens, _, tables in rows
            for table in tables
            for p in range(start, start + len(tokens))
        ]
        assert len(set(written)) == len(written), "two rows write one cell"

    def _run(self, seq, slot, start, tokens, wants, tables):
        wants, drafts, source = wants
        if UNKNOWN in tokens:
            assert tokens == [UNKNOWN, *drafts], "only the last token may be unknown"
            tokens = [self.last[slot], *drafts]
        for p, token in enumerate(tokens, start):
            state = self._seen(seq.request, source, p)
            for g, w in enumerate(self.windows):
                first = 0 if w is None else max(0, p - w + 1)
                state = (state * 41 + fold(self._read(tables[g], first, p))) % MOD
            for g in range(len(self.windows)):
                block = tables[g][p // self.size]
                assert block != NO_BLOCK
                self.device[block][p % self.size] = cell(state, token, g, seq.request.salt)
            if self.states:
                self.states[slot] = advanced(self.states[slot], token, seq.request.salt)
        if wants is not Wants.TOKEN:
            return ()
        if self.skips():
            self.last[slot], self.ahead[slot] = 0, (0, ())
            return ()
        generated, known = [], start + len(tokens) - len(drafts)
        for end, draft in enumerate((*drafts, None), known):
            state = self._seen(seq.request, source, end - 1)
            for g, w in enumerate(self.windows):
                first = 0 if w is None else max(0, end - w)
                state = (state * 43 + fold(self._read(tables[g], first, end))) % MOD
            state += self.states[slot] if self.states else 0
            generated.append(draw(state, seq.request.seed + seq.index, end - seq.prompt_len))
            if generated[-1] != draft:
                break
        if drafts:
            self.accepted.append(len(generated) - 1)
        self.last[slot] = generated[-1]
        return tuple(generated)

    def _read(self, table, first, end):
        cells = [self.device[table[p // self.size]][p % self.size] for p in range(first, end)]
        return [c if isinstance(c, int) else hash(c) for c in cells]
