"""Runs a recording again: the same requests, at the same steps, through the scheduler of today.

Where its plan is not the plan that was recorded, they differ: that is the news. Tokens are not in a
recording (unless it was asked for), so they are made up: blocks that had one key get one content,
so what was shared is shared. What the model said is made up too, and ends where it ended.

With an executor the plans are carried out as well, and what that says is ignored, but for faults.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, get_type_hints

import msgspec

from quire.config.engine_config import EngineConfig
from quire.core.constraint import Constraint
from quire.core.params import SamplingParams
from quire.core.scheduling.limits.grammar_wait import CompileOutcome, GrammarProvider
from quire.core.scheduling.scheduler import Scheduler
from quire.core.snapshot import GrammarStats
from quire.core.tenant_limits import UNRESTRICTED, TenantLimits
from quire.core.types import Request, StepPlan, StepResult
from quire.engine.recording.flight_recorder import PLAIN_FIELDS
from quire.engine.recording.recording_file import Recording
from quire.errors import EngineError
from quire.executors.base import Executor, StepFuture

_HINTS = get_type_hints(Request)
RecordedRow = tuple[int, int, int, int, bool]
"""Request, index, start, count, whether it samples."""


class RecordedStep(NamedTuple):
    """A plan as it was recorded."""

    step: int
    recorded_at: float
    available_blocks: int
    rows: tuple[RecordedRow, ...]
    joins: tuple[tuple[int, int, int], ...]  # request, index, tokens found in the cache
    preempted: tuple[int, ...]
    blocks_moved: tuple[int, int, int]  # blocks to the host, from it, copied


class ReplayDifference(NamedTuple):
    """Where today's scheduler does something else. step: 0 is before the first."""

    step: int
    what: str


class ReplayResult(NamedTuple):
    """What came of it."""

    steps: int
    differences: list[ReplayDifference]
    notes: list[str]


class IncompleteRecording(Exception):
    """A recording lacks what a replay needs."""


class KnownBlocks:
    """What the whole recording says of its requests, looked up while it is run."""

    def __init__(self, records: list[list[Any]]) -> None:
        self.requests: dict[int, dict[str, Any]] = {}
        self.places_by_sequence: dict[int, tuple[int, int]] = {}  # sequence -> request, index
        self.keys: dict[tuple[int, int], list[int]] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}  # if tokens were recorded
        self._key_counts: Counter[int] | None = None  # how many have a key
        for record in records:
            self._read(record)

    def _read(self, record: list[Any]) -> None:
        kind = record[0]
        if kind == "b":
            for requests in record[4] or ():
                self.requests.setdefault(requests["number"], requests)
                for number, index, _, _, _, keys in requests["sequences"]:
                    self.places_by_sequence[number] = (requests["number"], index)
                    self._add_keys((requests["number"], index), keys)
        elif kind == "a":
            self.requests[record[2]["number"]] = record[2]
        elif kind == "j":
            number, request, index, _, keys = record[1:]
            self.places_by_sequence[number] = (request, index)
            self._add_keys((request, index), self.keys.get((request, index), []) + keys)
        elif kind == "k":
            self._add_keys(self.places_by_sequence[record[1]], record[2])
        elif kind == "x":
            for index, keys in record[3]:
                self._add_keys((record[2], index), keys)
        elif kind == "e":
            self._add_keys((record[2], record[3]), record[4])
        elif kind == "l":
            for request, index, _, _, _, _, keys in record[5]:
                self._add_keys((request, index), keys)
            for request, index, tokens in record[6] or ():
                self.tokens.setdefault((request, index), []).extend(tokens)

    def has_unknown_content(self, place: tuple[int, int], blocks: int) -> bool:
        """Whether one of its first blocks is known of nobody else: somebody computed it who was
        still at it when the recording ended, so what that one said is not known.
        """
        if self._key_counts is None:
            self._key_counts = Counter(key for keys in self.keys.values() for key in set(keys))
        return any(self._key_counts[key] == 1 for key in self.keys.get(place, [])[:blocks])

    def _add_keys(self, place: tuple[int, int], keys: list[int]) -> None:
        known = self.keys.get(place, [])
        self.keys[place] = max(known, keys, key=len)


class SyntheticTokens:
    """Tokens of prompts and answers, made up: a block's content is a function of its key."""

    def __init__(
        self, book: KnownBlocks, block_size: int, vocab: int, never: frozenset[int]
    ) -> None:
        self._known_blocks = book
        self._block_size = block_size
        self._vocabulary = [token for token in range(min(vocab, 1 << 15)) if token not in never]

    def prompt(self, number: int) -> tuple[int, ...]:
        facts = self._known_blocks.requests[number]
        if facts["tokens"]:
            return tuple(facts["tokens"])
        places = [(number, index) for index in range(num_sequences(facts))]
        place = max(places, key=lambda one: len(self._known_blocks.keys.get(one, ())))
        return tuple(self._block_tokens(place, 0, facts["prompt"]))

    def generated(self, place: tuple[int, int], since: int, until: int) -> list[int]:
        """Of a sequence's tokens, prompt included, those in [since, until)."""
        known = self._known_blocks.tokens.get(place)
        first = self._known_blocks.requests[place[0]]["prompt"]
        if known is not None and until - first <= len(known):
            return known[since - first : until - first]
        return self._block_tokens(place, since, until)

    def _block_tokens(self, place: tuple[int, int], since: int, until: int) -> list[int]:
        keys, size = self._known_blocks.keys.get(place, []), self._block_size
        found: list[int] = []
        for block in range(since // size, -(-until // size)):
            name = keys[block] if block < len(keys) else f"{place} {block}"
            draw = random.Random(f"block {name}")
            tokens = draw.choices(self._vocabulary, k=size)
            found += tokens[max(since - block * size, 0) : until - block * size]
        return found


class RecordedGrammars:
    """In place of what compiles grammars: who is let go, when the recording says so."""

    def __init__(self) -> None:
        self._outcomes: list[tuple[Constraint, CompileOutcome]] = []

    def set_outcome(self, number: int, outcome: CompileOutcome) -> None:
        self._outcomes.append((constraint_for(number), outcome))

    def check_constraint(self, constraint: Constraint) -> None:
        pass

    def acquire(self, constraint: Constraint) -> None:
        pass

    def release(self, constraint: Constraint) -> None:
        pass

    def outcomes(self) -> Iterator[tuple[Constraint, CompileOutcome]]:
        done, self._outcomes = self._outcomes, []
        return iter(done)

    @property
    def has_outcomes(self) -> bool:
        return bool(self._outcomes)

    def set_outcome_callback(self, ring: Callable[[], None]) -> None:
        pass

    def stats(self) -> GrammarStats:
        raise NotImplementedError("nobody looks at a replay")

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        pass


def constraint_for(number: int) -> Constraint:
    """What stands for the grammar of a request."""
    return Constraint(str(number))


class RecordingReplay:
    """One recording and one scheduler. scheduler_of: as quire.engine.build has it."""

    def __init__(
        self,
        recording: Recording,
        scheduler_of: Callable[[EngineConfig, GrammarProvider], Scheduler],
        executor: Executor | None = None,
    ) -> None:
        config = without_queue_limits(recording.config)
        self._records = recording.records
        self._known_blocks = KnownBlocks(recording.records)
        never = frozenset(config.sampling.eos_ids)
        self._tokens = SyntheticTokens(
            self._known_blocks, config.cache.block_size, config.model.vocab, never
        )
        self._block_size = config.cache.block_size
        self._grammars = RecordedGrammars()
        self._scheduler = scheduler_of(config, self._grammars)
        self._executor = executor
        self._in_flight: deque[tuple[StepPlan, RecordedStep, StepFuture | None]] = deque()
        self._joins: list[tuple[int, int, int]] = []
        self._last_rows: tuple[int, ...] = ()
        self._starts_empty = True  # the recording begins with nobody here
        self._starts_with_cold_cache = True  # and with nothing in the prefix cache
        self._has_begun = False
        self.steps = 0
        self.differences: list[ReplayDifference] = []
        self.notes: list[str] = []

    def run(self) -> ReplayResult:
        """To the end of the recording, or to the first step that is another."""
        try:
            for record in self._records:
                self._apply_record(record)
                if self.differences:
                    break
            else:
                self._plan_once_more()
        except Exception as error:  # noqa: BLE001 - a border: what broke is what is looked for
            self._add_difference(f"it raises {type(error).__name__}: {error}")
        return ReplayResult(self.steps, self.differences, self.notes)

    def _add_difference(self, what: str) -> None:
        self.differences.append(ReplayDifference(self.steps, what))

    def _plan_once_more(self) -> None:
        """The plan that the recording lacks may be what the engine died of."""
        if not self._in_flight and not self._scheduler.idle:
            self._scheduler.plan()

    def _apply_record(self, record: list[Any]) -> None:
        kind, scheduler = record[0], self._scheduler
        if kind == "b":
            self._begin(record[1], *record[3:])
        elif kind == "a":
            scheduler.add(self._request(record[2], record[2]["spoken"]))
        elif kind == "g":
            for number in record[2]:
                self._grammars.set_outcome(number, 0)
            for number in record[3]:
                self._grammars.set_outcome(number, EngineError("it ended there"))
            scheduler.enqueue_ready()
        elif kind == "x":
            scheduler.abort(str(record[2]))
        elif kind == "e":
            scheduler.abort_sequence(str(record[2]), record[3])
        elif kind == "r":
            scheduler.release(str(record[2]))
        elif kind == "c":
            scheduler.reset_prefix_cache()
        elif kind == "j":
            number, index = self._known_blocks.places_by_sequence[record[1]]
            self._joins.append((number, index, record[4]))
        elif kind == "p":
            self._plan_step(self._read_step(record))
        elif kind == "l":
            self._finish_step(record)
        elif kind == "f":
            self._fail_step(record[1])
        elif kind == "m":
            scheduler.fail_request(str(record[2]), record[3])

    # -- requests -------------------------------------------------------------------------------

    def _begin(
        self, step: int, available: int, here: list[dict[str, Any]] | None, order: list[int]
    ) -> None:
        """Who was here when the recording began; later ones of these are not needed."""
        if self._has_begun:
            return
        self._has_begun = True
        self._starts_with_cold_cache = not step
        if here is None:
            raise IncompleteRecording(
                "it begins in the middle, and had no room to say who was there"
            )
        if not here:
            return
        self._starts_empty = False
        running: dict[int, tuple[str, int, int]] = {}
        for facts in here:
            spoken = self._resume_lengths(facts, running)
            if any(said is not None for said in spoken):
                self._scheduler.add(self._request(facts, spoken))
        resume = self._scheduler.replay_state()
        for number in order:
            if number in running:
                resume.start_running(*running[number])
        hidden = resume.fill_pool(available)
        self.notes.append(
            f"the recording begins in the middle, with {len(here)} requests; {hidden} blocks are "
            "taken for what came before it"
        )

    def _resume_lengths(
        self, facts: dict[str, Any], running: dict[int, tuple[str, int, int]]
    ) -> list[int | None]:
        """How much each sequence of a request has said; notes who runs, by number."""
        spoken: list[int | None] = [None] * num_sequences(facts)
        for index in facts["alive"]:  # who waits has said what it brought along
            spoken[index] = (facts["spoken"] or [0] * len(spoken))[index]
        for number, index, computed, said, runs, _ in facts["sequences"]:
            ends = said >= facts["stop"]["max_tokens"]  # with a step in flight
            spoken[index] = None if ends else said
            if runs and not ends:
                running[number] = (str(facts["number"]), index, computed)
        return spoken

    def _request(self, facts: dict[str, Any], spoken: list[int | None]) -> Request:
        number, n = facts["number"], num_sequences(facts)
        prompt = self._tokens.prompt(number)
        plain = {
            name: msgspec.convert(facts[name], _HINTS[name])
            for name in PLAIN_FIELDS
            if name in facts
        }
        terms: TenantLimits = plain.get("tenant_limits", UNRESTRICTED)
        plain["tenant_limits"] = TenantLimits(weight=terms.weight, kv_share=terms.kv_share)
        said = tuple(
            None if length is None else tuple(self._generated((number, index), len(prompt), length))
            for index, length in enumerate(spoken[:n])
        )
        parent = facts["parent"]
        return Request(
            id=str(number),
            prompt=prompt,
            params=SamplingParams(prompt_logprobs=0 if facts["judged"] else None),
            salt=repr(facts["salt"]).encode(),
            tenant=repr(facts["tenant"]).encode(),
            parent=None if parent is None else str(parent),
            constraint=constraint_for(number) if facts["kept"] else None,
            resumed_tokens=said,
            **plain,
        )

    def _generated(self, place: tuple[int, int], first: int, length: int) -> list[int]:
        return self._tokens.generated(place, first, first + length)

    # -- steps ----------------------------------------------------------------------------------

    def _read_step(self, record: list[Any]) -> RecordedStep:
        _, step, at, available, starts, numbers, counts, samples, _, preempted, moved = record
        if numbers is not None:
            self._last_rows = tuple(numbers)
        places = [self._known_blocks.places_by_sequence[number] for number in self._last_rows]
        counts = counts or [1] * len(starts)
        samples = samples or [True] * len(starts)
        rows = tuple(
            (number, index, start, count, bool(sample))
            for (number, index), start, count, sample in zip(
                places, starts, counts, samples, strict=True
            )
        )
        joins, self._joins = tuple(self._joins), []
        return RecordedStep(step, at, available, rows, joins, tuple(preempted), tuple(moved))

    def _plan_step(self, step: RecordedStep) -> None:
        resume = self._scheduler.replay_state()
        for number, index, computed in step.joins:
            if not computed or not resume.waits_without_blocks(str(number), index):
                continue
            if not self._starts_with_cold_cache or self._known_blocks.has_unknown_content(
                (number, index), computed // self._block_size
            ):
                resume.restore_prefix(str(number), index, computed)
        self.steps = step.step
        plan = self._scheduler.plan()
        self._compare(plan, step)
        pending = None if self._executor is None else self._executor.submit(plan)
        self._in_flight.append((plan, step, pending))

    def _compare(self, plan: StepPlan, step: RecordedStep) -> None:
        rows = tuple(
            (int(row.seq.request.id), row.seq.index, row.start, row.count, row.samples)
            for row in plan.rows
        )
        preempted = tuple([int(one) for one in plan.preempted])
        for what, then, now in (
            ("preempts", step.preempted, preempted),
            ("has rows of", step.rows, rows),
        ):
            if then != now:
                replayed, recorded = describe_missing(now, then), describe_missing(then, now)
                self._add_difference(f"it {what} {replayed}; recorded: {recorded}")
        moved = (len(plan.swap_out), len(plan.swap_in), len(plan.copies))
        if not self.differences and self._starts_empty and moved != step.blocks_moved:
            self._add_difference(
                f"it moves {moved} blocks (out, in, copied); recorded: {step.blocks_moved}"
            )

    def _finish_step(self, record: list[Any]) -> None:
        _, number, _, prompt_tokens, seconds, ends, _ = record
        if not self._in_flight or self._in_flight[0][0].step != self._current_step(number):
            self._end_unplanned(ends)
            return
        plan, step, pending = self._in_flight.popleft()
        if pending is not None:
            pending.wait()
        self._scheduler.apply(plan, self._step_result(plan, step, ends))
        self._scheduler.observe_step(prompt_tokens, seconds)
        if self._starts_empty:
            self._scheduler.check()

    def _current_step(self, number: int) -> int | None:
        """Today's number of a step: they need not begin at the same."""
        return next((plan.step for plan, step, _ in self._in_flight if step.step == number), None)

    def _end_unplanned(self, ends: list[Any]) -> None:
        """A step landed that was planned before the recording began."""
        for request, index, *_ in ends:
            self._scheduler.abort_sequence(str(request), index)

    def _step_result(self, plan: StepPlan, step: RecordedStep, ends: list[Any]) -> StepResult:
        """What the model said, as far as it matters to the scheduler."""
        finished = {(request, index): end for request, index, *end in ends}
        said: list[list[int]] = []
        result = StepResult(said)
        for i, row in enumerate(plan.rows):
            place = (int(row.seq.request.id), row.seq.index)
            if row.samples:
                at = row.start + row.count
                said.append(
                    self._without_stop(row.seq.stop_ids, self._tokens.generated(place, at, at + 1))
                )
            else:
                said.append([])
            if place in finished:
                finish, _, fault, tokens, _ = finished[place]
                if finish == "error":
                    (result.request_errors if fault == "request" else result.errors)[i] = (
                        "as recorded"
                    )
                elif tokens and finish in ("stop", "length"):
                    result.finish_reasons[i] = finish
        return result

    def _without_stop(self, stop_ids: frozenset[int], tokens: list[int]) -> list[int]:
        """A token that does not end the text, or it would have been recorded."""
        if tokens[0] not in stop_ids:
            return tokens
        return [next(token for token in range(len(stop_ids) + 1) if token not in stop_ids)]

    def _fail_step(self, number: int) -> None:
        if self._in_flight and self._current_step(number) == self._in_flight[0][0].step:
            plan, _, pending = self._in_flight.popleft()
            if pending is not None:
                try:
                    pending.wait()
                except Exception as error:  # noqa: BLE001 - as it was recorded
                    self.notes.append(
                        f"step {number} raises again: {type(error).__name__}: {error}"
                    )
            self._scheduler.fail_step(plan)


def num_sequences(facts: dict[str, Any]) -> int:
    """Sequences of a request."""
    return int(facts.get("n", 1))


def without_queue_limits(config: EngineConfig) -> EngineConfig:
    """Who was let in then is let in again: how many may be here is a question of the clock."""
    said = replace(config.scheduler, max_num_queued_reqs=None, max_num_queued_tokens=None)
    return replace(config, scheduler=said)


def describe_missing(these: tuple[Any, ...], those: tuple[Any, ...]) -> str:
    """The first of these that are not at their place in those."""
    found = [one for i, one in enumerate(these) if i >= len(those) or those[i] != one]
    shown = ", ".join(_describe_row(one) for one in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{shown or 'no others'}{more} ({len(these)} in all)"


def _describe_row(one: Any) -> str:
    if not isinstance(one, tuple):
        return f"request {one}"
    number, index, start, count, samples = one
    name = f"request {number}" + (f".{index}" if index else "")
    return f"{name} [{start}, {start + count}){'' if samples else ' without a token'}"
