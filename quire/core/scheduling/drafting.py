"""Drafting: chooses the drafts of the next row of each sequence, and counts which are accepted.

    probability of draft j of a row = a_0 * a_1 * ... * a_j      a: decayed acceptance by position
    drafts of the row = those proposed whose probability is at least the price (DraftCosts)

A sequence without drafts is not looked at again for some tokens, more each time, so its rows take
the scheduler's fast path: Sequence.plain_len is the length from which it is looked at. Sequences
are looked at in the same steps, so the others are steps of single tokens; at none of them if there
is no room for drafts, and at those without accepted drafts if DraftTrials allows it. A sequence
whose drafts do not pay has some again after LAST_WAIT tokens, as a probe.

A row with drafts must be applied before its sequence has another one, unless the worker has what
that one reads (quire.core.scheduling.continued_steps). If drafts bring enough, the next step is
planned after that (`awaited`), and has all rows; if not, only rows that expect much have drafts,
and take part in every second step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.core.drafters.base import HostDrafter
from quire.core.drafters.prediction import PredictionDrafter
from quire.core.scheduling.draft_costs import FIRST_PRICE, LEAST_PRICE, DraftCosts
from quire.core.scheduling.draft_trials import DraftTrials
from quire.core.scheduling.limits.base import NO_BOUND
from quire.core.types import DraftCounts, Request, Sequence, StepPlan, num_known_tokens

LAST_WAIT = 64
"""Tokens after which a sequence without drafts is looked at again, at most. A power of 2."""
MISSES_PER_WAIT = 2
"""Looks without a proposal after which the wait doubles."""
UNPAID_WAIT = 8
"""Factor of the wait if drafts that are proposed do not pay: each look costs the host."""
PROBE_DRAFTS = 2
"""Drafts of a row that are verified although they do not pay."""
PROBE_SHARE = 8
"""Of so many rows one is a probe, at most, in a step that has any."""
MOST_STARTS = 16
"""Rows that drafts leave to waiting sequences, at most, where steps have prompts."""
NO_LOOKS, ACCEPTED, ALL = -1, 0, NO_BOUND
"""Which sequences are looked at, by the greatest plain_len of them: those whose last drafts were
accepted, and new ones, have 0."""
ROW_RATE = 1 / 4
"""Weight of the last row in the acceptance of a sequence."""
FIRST_MEAN = 0.4
PROMISE = 0.5
"""Acceptance of first drafts from which more are tried where few do not pay."""
DRIFT = 1 / 16
"""How far the acceptance at a position that is not verified goes to that of the position before, in
a step: else drafts that failed once would never be tried again behind ones that do not."""
WAIT_SHARE = 0.05
"""Expected drafts per row from which the next step is planned after a step with drafts."""
SKIP_GAIN = 2.0
"""Accepted drafts that a row must expect to have drafts, if the next step is not."""
MEASURE_EVERY = 8
"""Of so many steps without drafts one is measured."""
BUSY_SHARE, FREE_SHARE = 16, 2
"""Share of the token budget that drafts take at most: if prompts wait, and if none do."""


Results = Counter[tuple[int, int]]
"""Rows by their numbers of drafts and of accepted ones."""


class _Applied(NamedTuple):
    """A step that was applied. awaited: the next one was planned after it, or continues it; behind:
    it was planned after an awaited one, or continues one."""

    rows: int = 0
    drafts: int = 0
    awaited: bool = False
    behind: bool = False
    continues: bool = False


class RecordedDrafts(NamedTuple):
    """Drafts of a step that is planned again."""

    of_rows: Mapping[tuple[str, int], int]  # by request and index; others have none
    proposals: int = 0  # as StepPlan has them
    continues: bool = False


class DraftTally:
    """Counts of verified drafts that only grow, for DraftCounts."""

    __slots__ = ("accepted", "rows", "tokens")

    def __init__(self) -> None:
        self.rows = self.tokens = 0
        self.accepted: list[int] = []

    def add(self, drafts: int, accepted: int, rows: int = 1) -> None:
        """Count a row, or some that are alike."""
        self.rows += rows
        self.tokens += rows * drafts
        if accepted > len(self.accepted):
            self.accepted += [0] * (accepted - len(self.accepted))
        for i in range(accepted):
            self.accepted[i] += rows

    def to_counts(self) -> DraftCounts:
        return DraftCounts(self.rows, self.tokens, tuple(self.accepted))


class _DraftState:
    """State of a sequence that may have drafts.

    rates: acceptance by position, of drafts behind accepted ones. wait: tokens until it is looked
    at again. guessed: the drafts of its row in flight assume a token that was unknown.
    """

    __slots__ = ("guessed", "misses", "rates", "sources", "tally", "wait")

    def __init__(self, sources: Seq[HostDrafter]) -> None:
        self.sources = sources
        self.rates: list[float] = []
        self.tally = DraftTally()
        self.wait = 1
        self.misses = 0
        self.guessed = False


class Drafting:
    """Helper of the scheduler. It writes `drafts` and `plain_len` of sequences.

    step, rows: of the step that is planned. begun: the last step in which a sequence was looked at.
    plain_step: the last step that has no drafts, and follows such a step, to be measured. recorded:
    in a replay, of the step that is planned.
    """

    def __init__(
        self,
        drafter: HostDrafter | None = None,
        *,
        max_drafts: int = 0,
        max_len: int | None = None,
        adaptive: bool = True,
        overlaps: bool = False,
        step_tokens: int = NO_BOUND,
        step_rows: int = NO_BOUND,
        model: bool = False,
        continues: bool = False,
    ) -> None:
        """drafter: of sequences whose results have no proposals; None: there is none. max_drafts:
        of a row; 0: none are verified. max_len: of a sequence with drafts. adaptive: False: every
        row has as many as are proposed. overlaps: a step is planned before the one before is over.
        step_tokens: the token budget of a step. step_rows: of a step with drafts, each of which is
        one. model: results have proposals. continues: steps may continue others (StepPlan)."""
        self._max_drafts, self._max_len = max_drafts, max_len
        self._adaptive, self._overlaps = adaptive, overlaps
        self._step_tokens, self._step_rows = step_tokens, step_rows
        self._prediction = PredictionDrafter()
        self._sources = () if drafter is None else (drafter,)
        self._states: dict[Sequence, _DraftState] = {}
        self._total = DraftTally()
        self._verified: list[tuple[bytes, int, int, bool]] = []
        """Rows of the step that is applied: tenant, drafts, accepted ones, whether that shows
        anything about the next ones."""
        self._means = [FIRST_MEAN] * max_drafts  # acceptance by position, of all sequences
        self._tenant_means: dict[bytes, list[float]] = {}
        """The same by tenant: where a sequence begins does not depend on the texts of others."""
        self._costs, self._trials = DraftCosts(), DraftTrials()
        self.step = self.rows = 0
        self._max_plain_len = ALL  # sequences are looked at if their plain_len is no larger
        self._room = NO_BOUND  # drafts that the step may have
        self.recorded: RecordedDrafts | None = None
        self.prompts_wait = False  # the last step had prompt tokens
        self.begun = self.plain_step = -1
        self.has_model = model
        self._continues = continues and overlaps
        self._probes_model = False  # whether the proposals of the last step are a probe
        self._price = self._expected = 0.0
        self._chances: list[float] | None = None
        """Of all drafts that were proposed in this plan; None: there was no proposal."""
        self._left = self._probes = 0
        self._awaits = True  # whether a step with drafts is awaited
        # the last two steps, as both may be in flight: awaited ones, and ones planned behind those
        self._awaited, self._behind = (0, 0), (-1, -1)
        self._applied = _Applied()
        self._held: tuple[int, int, float] | None = None
        """Rows, drafts and seconds of an awaited step that was planned early: what the next one
        lost is added. The time of one that is behind another has such a wait already."""

    # -- sequences ----------------------------------------------------------------------------

    def add(self, request: Request, sequences: Iterable[Sequence]) -> None:
        """Follow the sequences of a new request, if they may have drafts."""
        excluded = request.pooling is not None or request.hold or request.num_beams > 1
        if not self._max_drafts or not request.speculates or excluded:
            return
        sources = (self._prediction, *self._sources) if request.prediction else self._sources
        for seq in sequences:
            self._states[seq] = _DraftState(sources)
            if sources or self.recorded is not None:
                fails = (
                    not request.prediction
                    and self._means_of(seq.request.tenant)[0] < FIRST_MEAN / 2
                )
                seq.plain_len = 1 if fails else 0

    def remove(self, seq: Sequence) -> None:
        """A sequence has ended."""
        state = self._states.pop(seq, None)
        for source in state.sources if state is not None else ():
            source.remove(seq)

    def counts(self, seq: Sequence) -> DraftCounts | None:
        """Return the counts of a sequence that has not been removed; None: it had no drafts."""
        state = self._states.get(seq)
        return state.tally.to_counts() if state is not None and state.tally.rows else None

    @property
    def awaited(self) -> int:
        """The last step whose result the next plan should wait for."""
        return self._awaited[1]

    @property
    def total(self) -> DraftCounts:
        """Counts since the start."""
        return self._total.to_counts()

    # -- plans --------------------------------------------------------------------------------

    def begin_plan(self, step: int, rows: int, waiting: int) -> None:
        """A step is planned. rows: sequences that run. waiting: others, that may start in it."""
        self.step, self.rows = step, rows
        if self.awaited == step - 1:
            self._behind = self._behind[1], step
        starts = min(waiting, MOST_STARTS) if self.prompts_wait else 0
        self._room = max(min(rows * self._max_drafts, self._step_rows - rows - starts), 0)
        self._trials.begin_step(rows)
        if self.has_model or self.recorded is not None:
            self._max_plain_len = ALL  # also to drop what the model has proposed
        elif not self._room:
            self._max_plain_len = NO_LOOKS
        elif not self._adaptive:
            self._max_plain_len = ALL
        elif step <= self.plain_step:
            self._max_plain_len = NO_LOOKS
        else:
            self._max_plain_len = ALL if self._trials.may_look else ACCEPTED

    def skips(self, seq: Sequence) -> bool:
        """Whether the next row of a sequence has no drafts, without a call of choose()."""
        length = len(seq.tokens)
        if length < seq.plain_len:
            return True
        return seq.plain_len > self._max_plain_len and length < seq.max_len and not seq.row_drafts

    def choose(self, seq: Sequence) -> int:
        """Return the number of drafts for the next row of a sequence with one pending token.

        The sequence has them. Its last tokens may still be UNKNOWN: it is then assumed that they
        will be what is proposed for them.
        """
        state = self._states.get(seq)
        if state is None:
            seq.plain_len = seq.max_len
            return 0
        if self.recorded is not None:
            seq.drafts = (0,) * self.recorded.of_rows.get((seq.request.id, seq.index), 0)
            return len(seq.drafts)
        if self.begun != self.step:
            self._begin_step()
        length, known = len(seq.tokens), num_known_tokens(seq)
        if not self._left:
            seq.drafts = ()
            if self.has_model:
                seq.plain_len = min(length + LAST_WAIT, seq.max_len)
            else:
                self._max_plain_len = NO_LOOKS
            return 0
        limited = seq.plain_len and self._adaptive and not self.has_model
        if limited and not self._trials.take_look():
            self._max_plain_len = ACCEPTED
        proposed = self._propose(state, seq, known)
        count = self._affordable(state, seq, len(proposed)) if proposed else 0
        seq.drafts = proposed[:count]
        if count:
            self._left -= count
            state.guessed = known < length
            seq.plain_len = 0
        elif not proposed:
            state.misses += 1
            if state.misses % MISSES_PER_WAIT == 0:
                state.wait = min(2 * state.wait, LAST_WAIT)
            self._put_off(state, seq)
        else:
            state.wait = min(UNPAID_WAIT * state.wait, LAST_WAIT)
            self._put_off(state, seq)
        return count

    def may_continue(self, plan: StepPlan) -> bool:
        """Whether a step may be planned behind this one, whose drafts are not verified yet."""
        if self.recorded is not None:
            return self.recorded.continues
        if not self._continues or not plan.proposals:
            return False
        return len(plan.rows) * (1 + plan.proposals) <= self._step_tokens

    def choose_continued(self, seq: Sequence, ahead: int, proposals: int) -> int:
        """Return the number of drafts of a row behind one that yields up to `ahead` tokens more
        than one. proposals: that there will be."""
        state = self._states.get(seq)
        if state is None:
            return 0
        if self.recorded is not None:
            return self.recorded.of_rows.get((seq.request.id, seq.index), 0)
        if self.begun != self.step:
            self._begin_step()
        most = min(proposals, self._most_drafts(len(seq.tokens) + ahead, seq))
        count = self._affordable(state, seq, most) if most > 0 and self._left else 0
        if count:
            self._left -= count
            state.guessed, seq.plain_len = False, 0
        return count

    def end_plan(self, rows: int, drafts: int, *, samples: bool = True) -> int:
        """A step of so many rows was planned. drafts: in all rows. samples: whether it yields
        tokens.

        Returns the number of drafts that the model should propose behind these.
        """
        proposes = self.has_model and self._states and rows < self._step_rows and samples
        proposals = self._next_proposals() if proposes else 0
        if self.recorded is not None:
            proposals = self.recorded.proposals
        if self._chances is not None:
            self._costs.set_chances(self.rows, self._chances, self._room)
            self._chances = None
        if self._overlaps and self.begun == self.step and self._expected:
            self._awaits = self._expected >= WAIT_SHARE * self.rows
        if proposals or (drafts and self._overlaps and self._awaits):
            self._awaited = self.awaited, self.step
        return proposals

    def _next_proposals(self) -> int:
        if not self._adaptive:
            return self._max_drafts
        if not self._may_have_drafts:
            return 0  # nor passes of the model: they would be in the time of a step without drafts
        price, probability, count = self._costs.price(self.rows), 1.0, 0
        while count < self._max_drafts:
            probability *= self._means[count]
            if probability < price:
                break
            count += 1
        _drift(self._means, max(count, 1))
        if not self._costs.is_known(self.rows):
            return min(self._max_drafts, PROBE_DRAFTS)
        self._probes_model = not count and self.step % LAST_WAIT == 0
        return min(self._max_drafts, PROBE_DRAFTS) if self._probes_model else count

    @property
    def _may_have_drafts(self) -> bool:
        """Whether the step may: it is not to be measured without any, and losses are in bounds."""
        return self.step > self.plain_step and self._trials.allowed

    def _begin_step(self) -> None:
        self.begun, self._expected = self.step, 0.0
        self._probes = max(self.rows // PROBE_SHARE, 1)
        self._left = self._room
        if self._adaptive:
            share = BUSY_SHARE if self.prompts_wait else FREE_SHARE
            self._left = min(self._left, self._step_tokens // share)
            self._price = self._costs.price(self.rows)
            if self._means[0] >= PROMISE and self._costs.is_small(self.rows):
                self._price = min(self._price, FIRST_PRICE)
            self._left = min(self._left, self._most_tried())
            if self._costs.take_plain(self.rows):
                self.plain_step = self.step + (2 if self._overlaps else 0)
            if not self._may_have_drafts:
                self._left = 0

    def _most_tried(self) -> int:
        """Return the drafts of a step whose cost may be learned from it. The passes of a model cost
        as much for one row as for all."""
        most = self._costs.max_drafts(self.rows)
        return max(most, PROBE_DRAFTS * self.rows) if self.has_model else most

    def _propose(self, state: _DraftState, seq: Sequence, known: int) -> tuple[int, ...]:
        """Return proposals for its next row, as many as it may have."""
        length = len(seq.tokens)
        most = self._most_drafts(length, seq)
        if most <= 0:
            return ()
        for source in state.sources:
            found = source.propose(seq, known, most + length - known)[length - known :]
            if found:
                return tuple(found)
        return seq.drafts[:most]

    def _most_drafts(self, length: int, seq: Sequence) -> int:
        """Return how many drafts its row may have if the sequence is so long."""
        end = seq.max_len if self._max_len is None else min(seq.max_len, self._max_len)
        return min(self._max_drafts, end - length - 1)

    def _affordable(self, state: _DraftState, seq: Sequence, proposed: int) -> int:
        """Return how many of its proposals a row should have."""
        most = min(proposed, self._left)
        if not self._adaptive:
            self._expected += most
            return most
        rates = state.rates
        if len(rates) < proposed:
            means = self._means_of(seq.request.tenant)
            rates += [(1 + 5 * mean) / 6 for mean in means[len(rates) : proposed]]
        chances = self._chances = self._chances or []
        count, probability, expected = 0, 1.0, 0.0
        for rate in rates[:proposed]:
            probability *= rate
            if probability < LEAST_PRICE:
                break
            chances.append(probability)
            if probability >= self._price and count < most:
                expected += probability
                count += 1
        self._expected += expected
        if count and (self._awaits or not self._overlaps or expected >= SKIP_GAIN):
            return count
        if self._probes_model:
            return min(most, PROBE_DRAFTS)
        if state.wait >= LAST_WAIT and self._probes and most:
            self._probes -= 1
            return min(most, PROBE_DRAFTS)
        return 0

    def _put_off(self, state: _DraftState, seq: Sequence) -> None:
        """Look at the sequence again in the next step whose number is a multiple of its wait."""
        wait = state.wait - self.step % state.wait if self._adaptive else 1
        seq.plain_len = min(len(seq.tokens) + wait, seq.max_len)

    # -- results ------------------------------------------------------------------------------

    def set_proposals(self, seq: Sequence, drafts: tuple[int, ...]) -> None:
        """A result of the sequence has proposals. Tokens that later steps in flight will yield are
        assumed to be the first of them."""
        if seq in self._states and not seq.row_drafts:
            seq.drafts = drafts[len(seq.tokens) - num_known_tokens(seq) :]
            seq.plain_len = 0

    def record(self, seq: Sequence, drafts: int, accepted: int) -> None:
        """Count a row, if it had drafts."""
        if not drafts:
            return
        seq.verified_drafts += drafts
        seq.accepted_drafts += accepted
        state = self._states.get(seq)
        if state is None or self.recorded is not None:
            self._total.add(drafts, accepted)
            return
        state.tally.add(drafts, accepted)
        # the token that was assumed was wrong: that shows nothing about the drafts
        shows = bool(accepted) or not state.guessed
        self._verified.append((seq.request.tenant, drafts, accepted, shows))
        if not shows:
            return
        _update(state.rates, drafts, accepted, ROW_RATE)
        _drift(state.rates, drafts)
        state.misses = 0
        if accepted:
            state.wait = 1
        else:
            state.wait = min(2 * state.wait, LAST_WAIT)
            if not seq.row_drafts:  # no row is in flight that continues this one
                self._put_off(state, seq)

    def _count_verified(self) -> None:
        """Count the rows of record(), those that are alike at once."""
        left_out = self._overlaps and not self._awaits
        everyone: Results = Counter()
        tenants: dict[bytes, Results] = {}
        for (tenant, drafts, accepted, shows), rows in Counter(self._verified).items():
            self._total.add(drafts, accepted, rows)
            self._trials.count_rows(rows, accepted, left_out=left_out)
            if shows:
                everyone[drafts, accepted] += rows
                tenants.setdefault(tenant, Counter())[drafts, accepted] += rows
        self._verified.clear()
        weight = 1 / (1 / ROW_RATE + self.rows / 4)
        _update_by_all(self._means, everyone, weight)
        for tenant, results in tenants.items():
            _update_by_all(self._means_of(tenant), results, weight)

    def _means_of(self, tenant: bytes) -> list[float]:
        means = self._tenant_means.get(tenant)
        if means is None:
            means = self._tenant_means[tenant] = [FIRST_MEAN] * self._max_drafts
        return means

    def end_result(self, plan: StepPlan) -> None:
        """A plan was applied. It is called for those whose time is worth to be observed, as is that
        of all with drafts."""
        self._count_verified()
        awaited, behind = plan.step in self._awaited, plan.step in self._behind
        self._applied = _Applied(
            len(plan.rows), plan.num_drafts, awaited, behind, continues=bool(plan.continues)
        )

    def observe_step(self, prompt_tokens: int, seconds: float) -> None:
        """The step of end_result() had so many prompt tokens, and took so long."""
        self.prompts_wait = prompt_tokens > 0
        (rows, drafts, awaited, behind, continues), self._applied = self._applied, _Applied()
        held, self._held = self._held, None
        plain = 0.0 if prompt_tokens else self._costs.plain(rows)
        if drafts or behind:
            self._trials.count_step(seconds, plain, continues=continues)
        if not rows or prompt_tokens:
            return
        if held is not None and behind and plain and not drafts:
            self._costs.observe_drafts(held[0], held[1], held[2] + max(seconds - plain, 0.0))
        if not drafts:
            if not behind:
                self._costs.observe_plain(rows, seconds)
        elif awaited and not behind:
            self._held = rows, drafts, seconds
        else:
            self._costs.observe_drafts(rows, drafts, seconds)

    def measures(self, plan: StepPlan) -> bool:
        """Whether the time of a step is to be observed."""
        if plan.num_drafts or plan.step == self.plain_step or plan.step in self._behind:
            return True
        return not plan.step % MEASURE_EVERY and not plan.proposals


def _update(rates: list[float], drafts: int, accepted: int, weight: float) -> None:
    """Update acceptance by position: of accepted drafts, and of the one that was not."""
    for position in range(min(accepted + 1, drafts, len(rates))):
        rates[position] += ((position < accepted) - rates[position]) * weight


def _update_by_all(rates: list[float], results: Results, weight: float) -> None:
    """The same by several rows at once, whose order is none. weight: of one of them."""
    for position in range(len(rates) if results else 0):
        of = [(accepted, rows) for (drafts, accepted), rows in results.items() if position < drafts]
        reached = sum(rows for accepted, rows in of if accepted >= position)
        if reached:
            share = sum(rows for accepted, rows in of if accepted > position) / reached
            rates[position] += (share - rates[position]) * (1 - (1 - weight) ** reached)


def _drift(rates: list[float], verified: int) -> None:
    """Let acceptance at positions that were not verified go to that of the last one that was."""
    for position in range(verified, len(rates)):
        rates[position] += (rates[position - 1] - rates[position]) * DRIFT
