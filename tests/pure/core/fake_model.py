"""A model that is wrong as soon as the core is.

Like attention, its KV cells depend on all cells before them (within the window, in a window
group) and are read only through block tables; like a runner, it keeps tables and last tokens in
slots of its own, obeys a plan in the order that StepPlan says, and does so late: the plan is
taken down at submit() and carried out at wait(), when the scheduler has moved on.

said() is the same arithmetic on plain lists: what must come out whatever the scheduler does.
"""

from __future__ import annotations

from collections import deque

from quire.core.types import NO_BLOCK, UNKNOWN, StepResult, TokenLogprobs, Wants

VOCAB = 6
MOD = 1_000_003


def cell(state, token, group, salt):
    """salt: what else separates contents, an adapter for one, makes other contents."""
    return (state * 31 + token * 7 + group * 3 + sum(salt) + 1) % MOD


def fold(cells):
    h = 7
    for c in cells:
        h = (h * 37 + c) % MOD
    return h


def draw(state, seed, position):
    """The token a sequence says: its own random numbers, counted by its outputs."""
    return (state ^ (seed * 7919 + position * 104_729)) % VOCAB


def said(prompt, length, *, windows=(None,), seed=0, salt=b""):
    """The first `length` output tokens, with no cache at all."""
    tokens, cells = list(prompt), [[] for _ in windows]
    for position in range(len(prompt) + length):
        state = 0
        for g, w in enumerate(windows):
            seen = cells[g] if w is None else cells[g][max(0, position - w + 1) :]
            state = (state * 41 + fold(seen)) % MOD
        for g in range(len(windows)):
            cells[g].append(cell(state, tokens[position], g, salt))
        if position + 1 == len(tokens):
            state = 0
            for g, w in enumerate(windows):
                seen = cells[g] if w is None else cells[g][max(0, position + 1 - w) :]
                state = (state * 43 + fold(seen)) % MOD
            tokens.append(draw(state, seed, len(tokens) - len(prompt)))
    return tokens[len(prompt) : len(prompt) + length]


class FakeModel:
    """blocks, host: device and host memory, cell by cell; garbage where nobody wrote."""

    def __init__(self, blocks, block_size, windows=(None,), host=0, slots=64, proposer=None):
        self.size, self.windows = block_size, windows
        self.device = [[("garbage", b, i) for i in range(block_size)] for b in range(blocks)]
        self.host = [[("garbage", b, i) for i in range(block_size)] for b in range(host)]
        self.joined = [None] * slots
        self.tables = [None] * slots
        self.last = [None] * slots
        self.queue = deque()
        self.proposer = proposer  # (sequence, tokens) -> proposed next ones, in the result
        self.accepted = []  # how many drafts of each row that had some
        self.skips = lambda: False  # whether a row yields no token

    def submit(self, plan):
        """Take the plan down, as a runner does when it fills its input buffers."""
        for slot in plan.leaves:
            assert self.joined[slot] is not None, f"slot {slot} is empty already"
            self.joined[slot] = None
        for seq in plan.joins:
            assert self.joined[seq.slot] is None, f"slot {seq.slot} is taken"
            self.joined[seq.slot] = seq
            self.tables[seq.slot] = [[] for _ in self.windows]
        for seq in plan.changed_tables:
            self.tables[seq.slot] = [[] for _ in self.windows]
        rows = [self._row(row) for row in plan.rows]
        self._check_fence(plan, rows)
        self.queue.append((plan, rows))

    def _check_fence(self, plan, rows):
        """Nobody may write what a step in flight reads for somebody else: it may be late."""
        for other, theirs in self.queue:
            read = {b for *_, tables in theirs for t in tables for b in t}
            read |= {c.src for c in other.copies}
            written = {c.dst for c in (*plan.copies, *plan.swap_in)}
            assert not read & written, "a block was handed out too early"
            for seq, _, start, tokens, _, tables in rows:
                blocks = {
                    t[p // self.size] for t in tables for p in range(start, start + len(tokens))
                }
                for whose, *_, old in theirs:
                    clash = blocks & {b for t in old for b in t}
                    assert seq is whose or not clash, "a block was handed out too early"
            back = {c.src for c in other.swap_in}
            assert not back & {c.dst for c in plan.swap_out}, "a host block was reused too early"

    def _row(self, row):
        seq = row.seq
        assert self.joined[seq.slot] is seq, "a row of a sequence without a slot"
        for g, table in enumerate(seq.tables):
            mine = self.tables[seq.slot][g]
            mine += table[len(mine) :]
            assert mine == table, "a table changed otherwise than by append, and was not named"
        assert row.count == row.drafts + 1 or not row.drafts
        drafts = seq.drafts[: row.drafts]
        assert len(drafts) == row.drafts
        tokens = seq.tokens[row.start : row.start + row.count - row.drafts]
        tables = [list(t) for t in self.tables[seq.slot]]
        return seq, seq.slot, row.start, [*tokens, *drafts], (row.wants, drafts), tables

    def wait(self):
        """Carry out the oldest plan."""
        plan, rows = self.queue.popleft()
        self._copy(plan.swap_out, self.device, self.host)
        self._copy(plan.swap_in, self.host, self.device)
        self._copy(plan.copies, self.device, self.device)
        self._check_writes(rows)
        said = [self._run(*row) for row in rows]
        pooled = {
            i: row.seq.request.id for i, row in enumerate(plan.rows) if row.wants is Wants.POOLED
        }
        logprobs = self._prompt_logprobs(rows)
        proposals = self._propose(rows, said)
        return StepResult(said, prompt_logprobs=logprobs, pooled=pooled, drafts=proposals)

    def _propose(self, rows, said):
        """Drafts of the next row of each sequence that has a token."""
        found = {}
        for i, (seq, _, start, tokens, (_, drafts), _) in enumerate(rows):
            if self.proposer is not None and said[i]:
                known = [*seq.tokens[:start], *tokens[: len(tokens) - len(drafts)], *said[i]]
                found[i] = tuple(self.proposer(seq, known))
        return {i: drafts for i, drafts in found.items() if drafts}

    def _prompt_logprobs(self, rows):
        """For who computes every prompt position, of each its own number."""
        found = {}
        for i, (seq, _, start, tokens, _, _) in enumerate(rows):
            end = min(start + len(tokens) + 1, seq.prompt_len)
            if seq.index == 0 and not seq.request.read_prefix_cache and start + 1 < end:
                found[i] = [TokenLogprobs([p], [0.0], [1]) for p in range(start + 1, end)]
        return found

    def lose(self):
        """Fail at the oldest plan: nothing of it happens on the device."""
        plan, _ = self.queue.popleft()
        for row in plan.rows:
            self.last[row.seq.slot] = 0

    def _copy(self, pairs, source, target):
        """All at once: a kernel does not go in order."""
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
        if UNKNOWN in tokens:
            assert tokens == [UNKNOWN], "only the last token may be unknown"
            tokens = [self.last[slot]]
        for p, token in enumerate(tokens, start):
            state = 0
            for g, w in enumerate(self.windows):
                first = 0 if w is None else max(0, p - w + 1)
                state = (state * 41 + fold(self._read(tables[g], first, p))) % MOD
            for g in range(len(self.windows)):
                block = tables[g][p // self.size]
                assert block != NO_BLOCK
                self.device[block][p % self.size] = cell(state, token, g, seq.request.salt)
        wants, drafts = wants
        if wants is not Wants.TOKEN:
            return ()
        if self.skips():
            self.last[slot] = 0
            return ()
        said, known = [], start + len(tokens) - len(drafts)
        for end, draft in enumerate((*drafts, None), known):
            state = 0
            for g, w in enumerate(self.windows):
                first = 0 if w is None else max(0, end - w)
                state = (state * 43 + fold(self._read(tables[g], first, end))) % MOD
            said.append(draw(state, seq.request.seed + seq.index, end - seq.prompt_len))
            if said[-1] != draft:
                break
        if drafts:
            self.accepted.append(len(said) - 1)
        self.last[slot] = said[-1]
        return tuple(said)

    def _read(self, table, first, end):
        cells = [self.device[table[p // self.size]][p % self.size] for p in range(first, end)]
        return [c if isinstance(c, int) else hash(c) for c in cells]
