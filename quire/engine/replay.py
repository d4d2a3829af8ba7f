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

from quire.config.config import EngineConfig
from quire.core.constraint import Constraint
from quire.core.limits.grammars import Grammars, Outcome
from quire.core.params import SamplingParams
from quire.core.scheduler import Scheduler
from quire.core.snapshot import GrammarFigures
from quire.core.terms import FREE, Terms
from quire.core.types import Request, StepPlan, StepResult
from quire.engine.bundle import Recording
from quire.engine.recorder import PLAIN
from quire.errors import EngineError
from quire.executors.base import Executor, Pending

_HINTS = get_type_hints(Request)
Row = tuple[int, int, int, int, bool]
"""Request, index, start, count, whether it samples."""


class Step(NamedTuple):
    """A plan as it was recorded."""

    step: int
    at: float
    available: int
    rows: tuple[Row, ...]
    joins: tuple[tuple[int, int, int], ...]  # request, index, tokens found in the cache
    preempted: tuple[int, ...]
    moved: tuple[int, int, int]  # blocks to the host, from it, copied


class Difference(NamedTuple):
    """Where today's scheduler does something else. step: 0 is before the first."""

    step: int
    what: str


class Replayed(NamedTuple):
    """What came of it."""

    steps: int
    differences: list[Difference]
    notes: list[str]


class Incomplete(Exception):
    """A recording lacks what a replay needs."""


class Book:
    """What the whole recording says of its requests, looked up while it is run."""

    def __init__(self, records: list[list[Any]]) -> None:
        self.facts: dict[int, dict[str, Any]] = {}
        self.places: dict[int, tuple[int, int]] = {}  # sequence -> request, index
        self.keys: dict[tuple[int, int], list[int]] = {}
        self.said: dict[tuple[int, int], list[int]] = {}  # if tokens were recorded
        self._places_of: Counter[int] | None = None  # how many have a key
        for record in records:
            self._read(record)

    def _read(self, record: list[Any]) -> None:
        kind = record[0]
        if kind == "b":
            for facts in record[4] or ():
                self.facts.setdefault(facts["number"], facts)
                for number, index, _, _, _, keys in facts["sequences"]:
                    self.places[number] = (facts["number"], index)
                    self._know((facts["number"], index), keys)
        elif kind == "a":
            self.facts[record[2]["number"]] = record[2]
        elif kind == "j":
            number, request, index, _, keys = record[1:]
            self.places[number] = (request, index)
            self._know((request, index), self.keys.get((request, index), []) + keys)
        elif kind == "k":
            self._know(self.places[record[1]], record[2])
        elif kind == "x":
            for index, keys in record[3]:
                self._know((record[2], index), keys)
        elif kind == "e":
            self._know((record[2], record[3]), record[4])
        elif kind == "l":
            for request, index, _, _, _, _, keys in record[5]:
                self._know((request, index), keys)
            for request, index, tokens in record[6] or ():
                self.said.setdefault((request, index), []).extend(tokens)

    def has_secrets(self, place: tuple[int, int], blocks: int) -> bool:
        """Whether one of its first blocks is known of nobody else: somebody computed it who was
        still at it when the recording ended, so what that one said is not known.
        """
        if self._places_of is None:
            self._places_of = Counter(key for keys in self.keys.values() for key in set(keys))
        return any(self._places_of[key] == 1 for key in self.keys.get(place, [])[:blocks])

    def _know(self, place: tuple[int, int], keys: list[int]) -> None:
        known = self.keys.get(place, [])
        self.keys[place] = max(known, keys, key=len)


class Speech:
    """Tokens of prompts and answers, made up: a block's content is a function of its key."""

    def __init__(self, book: Book, block_size: int, vocab: int, never: frozenset[int]) -> None:
        self._book = book
        self._size = block_size
        self._allowed = [token for token in range(min(vocab, 1 << 15)) if token not in never]

    def prompt(self, number: int) -> tuple[int, ...]:
        facts = self._book.facts[number]
        if facts["tokens"]:
            return tuple(facts["tokens"])
        places = [(number, index) for index in range(n_of(facts))]
        place = max(places, key=lambda one: len(self._book.keys.get(one, ())))
        return tuple(self._tokens(place, 0, facts["prompt"]))

    def said(self, place: tuple[int, int], since: int, until: int) -> list[int]:
        """Of a sequence's tokens, prompt included, those in [since, until)."""
        known = self._book.said.get(place)
        first = self._book.facts[place[0]]["prompt"]
        if known is not None and until - first <= len(known):
            return known[since - first : until - first]
        return self._tokens(place, since, until)

    def _tokens(self, place: tuple[int, int], since: int, until: int) -> list[int]:
        keys, size = self._book.keys.get(place, []), self._size
        found: list[int] = []
        for block in range(since // size, -(-until // size)):
            name = keys[block] if block < len(keys) else f"{place} {block}"
            draw = random.Random(f"block {name}")
            tokens = draw.choices(self._allowed, k=size)
            found += tokens[max(since - block * size, 0) : until - block * size]
        return found


class Decided:
    """In place of what compiles grammars: who is let go, when the recording says so."""

    def __init__(self) -> None:
        self._outcomes: list[tuple[Constraint, Outcome]] = []

    def decide(self, number: int, outcome: Outcome) -> None:
        self._outcomes.append((constraint_of(number), outcome))

    def accept(self, constraint: Constraint) -> None:
        pass

    def ask(self, constraint: Constraint) -> None:
        pass

    def release(self, constraint: Constraint) -> None:
        pass

    def outcomes(self) -> Iterator[tuple[Constraint, Outcome]]:
        done, self._outcomes = self._outcomes, []
        return iter(done)

    @property
    def settled(self) -> bool:
        return bool(self._outcomes)

    def call_when_settled(self, ring: Callable[[], None]) -> None:
        pass

    def figures(self) -> GrammarFigures:
        raise NotImplementedError("nobody looks at a replay")

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        pass


def constraint_of(number: int) -> Constraint:
    """What stands for the grammar of a request."""
    return Constraint(str(number))


class Replay:
    """One recording and one scheduler. scheduler_of: as quire.engine.build has it."""

    def __init__(
        self,
        recording: Recording,
        scheduler_of: Callable[[EngineConfig, Grammars], Scheduler],
        executor: Executor | None = None,
    ) -> None:
        config = unbounded(recording.config)
        self._records = recording.records
        self._book = Book(recording.records)
        never = frozenset(config.sampling.eos_ids)
        self._speech = Speech(self._book, config.cache.block_size, config.model.vocab, never)
        self._size = config.cache.block_size
        self._grammars = Decided()
        self._scheduler = scheduler_of(config, self._grammars)
        self._executor = executor
        self._flights: deque[tuple[StepPlan, Step, Pending | None]] = deque()
        self._joins: list[tuple[int, int, int]] = []
        self._before: tuple[int, ...] = ()
        self._whole = True  # the recording begins with nobody here
        self._cold = True  # and with nothing in the prefix cache
        self._begun = False
        self.steps = 0
        self.differences: list[Difference] = []
        self.notes: list[str] = []

    def run(self) -> Replayed:
        """To the end of the recording, or to the first step that is another."""
        try:
            for record in self._records:
                self._obey(record)
                if self.differences:
                    break
            else:
                self._one_more()
        except Exception as error:  # noqa: BLE001 - a border: what broke is what is looked for
            self._differ(f"it raises {type(error).__name__}: {error}")
        return Replayed(self.steps, self.differences, self.notes)

    def _differ(self, what: str) -> None:
        self.differences.append(Difference(self.steps, what))

    def _one_more(self) -> None:
        """The plan that the recording lacks may be what the engine died of."""
        if not self._flights and not self._scheduler.idle:
            self._scheduler.plan()

    def _obey(self, record: list[Any]) -> None:
        kind, scheduler = record[0], self._scheduler
        if kind == "b":
            self._begin(record[1], *record[3:])
        elif kind == "a":
            scheduler.add(self._request(record[2], record[2]["spoken"]))
        elif kind == "g":
            for number in record[2]:
                self._grammars.decide(number, 0)
            for number in record[3]:
                self._grammars.decide(number, EngineError("it ended there"))
            scheduler.let_go()
        elif kind == "x":
            scheduler.abort(str(record[2]))
        elif kind == "e":
            scheduler.abort_sequence(str(record[2]), record[3])
        elif kind == "r":
            scheduler.release(str(record[2]))
        elif kind == "c":
            scheduler.reset_prefix_cache()
        elif kind == "j":
            number, index = self._book.places[record[1]]
            self._joins.append((number, index, record[4]))
        elif kind == "p":
            self._plan(self._step(record))
        elif kind == "l":
            self._land(record)
        elif kind == "f":
            self._fail(record[1])
        elif kind == "m":
            scheduler.blame(str(record[2]), record[3])

    # -- requests -------------------------------------------------------------------------------

    def _begin(
        self, step: int, available: int, here: list[dict[str, Any]] | None, order: list[int]
    ) -> None:
        """Who was here when the recording began; later ones of these are not needed."""
        if self._begun:
            return
        self._begun = True
        self._cold = not step
        if here is None:
            raise Incomplete("it begins in the middle, and had no room to say who was there")
        if not here:
            return
        self._whole = False
        running: dict[int, tuple[str, int, int]] = {}
        for facts in here:
            spoken = self._standing(facts, running)
            if any(said is not None for said in spoken):
                self._scheduler.add(self._request(facts, spoken))
        resume = self._scheduler.resume()
        for number in order:
            if number in running:
                resume.seat(*running[number])
        hidden = resume.fill_up(available)
        self.notes.append(
            f"the recording begins in the middle, with {len(here)} requests; {hidden} blocks are "
            "taken for what came before it"
        )

    def _standing(
        self, facts: dict[str, Any], running: dict[int, tuple[str, int, int]]
    ) -> list[int | None]:
        """How much each sequence of a request has said; notes who runs, by number."""
        spoken: list[int | None] = [None] * n_of(facts)
        for index in facts["alive"]:  # who waits has said what it brought along
            spoken[index] = (facts["spoken"] or [0] * len(spoken))[index]
        for number, index, computed, said, runs, _ in facts["sequences"]:
            ends = said >= facts["stop"]["max_tokens"]  # with a step in flight
            spoken[index] = None if ends else said
            if runs and not ends:
                running[number] = (str(facts["number"]), index, computed)
        return spoken

    def _request(self, facts: dict[str, Any], spoken: list[int | None]) -> Request:
        number, n = facts["number"], n_of(facts)
        prompt = self._speech.prompt(number)
        plain = {
            name: msgspec.convert(facts[name], _HINTS[name]) for name in PLAIN if name in facts
        }
        terms: Terms = plain.get("terms", FREE)
        plain["terms"] = Terms(weight=terms.weight, kv_share=terms.kv_share)
        said = tuple(
            None if length is None else tuple(self._said((number, index), len(prompt), length))
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
            constraint=constraint_of(number) if facts["kept"] else None,
            spoken=said,
            **plain,
        )

    def _said(self, place: tuple[int, int], first: int, length: int) -> list[int]:
        return self._speech.said(place, first, first + length)

    # -- steps ----------------------------------------------------------------------------------

    def _step(self, record: list[Any]) -> Step:
        _, step, at, available, starts, numbers, counts, samples, _, preempted, moved = record
        if numbers is not None:
            self._before = tuple(numbers)
        places = [self._book.places[number] for number in self._before]
        counts = counts or [1] * len(starts)
        samples = samples or [True] * len(starts)
        rows = tuple(
            (number, index, start, count, bool(sample))
            for (number, index), start, count, sample in zip(
                places, starts, counts, samples, strict=True
            )
        )
        joins, self._joins = tuple(self._joins), []
        return Step(step, at, available, rows, joins, tuple(preempted), tuple(moved))

    def _plan(self, step: Step) -> None:
        resume = self._scheduler.resume()
        for number, index, computed in step.joins:
            if not computed or not resume.waits_anew(str(number), index):
                continue
            if not self._cold or self._book.has_secrets((number, index), computed // self._size):
                resume.know(str(number), index, computed)
        self.steps = step.step
        plan = self._scheduler.plan()
        self._compare(plan, step)
        pending = None if self._executor is None else self._executor.submit(plan)
        self._flights.append((plan, step, pending))

    def _compare(self, plan: StepPlan, step: Step) -> None:
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
                self._differ(f"it {what} {told(now, then)}; recorded: {told(then, now)}")
        moved = (len(plan.swap_out), len(plan.swap_in), len(plan.copies))
        if not self.differences and self._whole and moved != step.moved:
            self._differ(f"it moves {moved} blocks (out, in, copied); recorded: {step.moved}")

    def _land(self, record: list[Any]) -> None:
        _, number, _, prompt_tokens, seconds, ends, _ = record
        if not self._flights or self._flights[0][0].step != self._plan_of(number):
            self._end_unseen(ends)
            return
        plan, step, pending = self._flights.popleft()
        if pending is not None:
            pending.wait()
        self._scheduler.apply(plan, self._result(plan, step, ends))
        self._scheduler.learn(prompt_tokens, seconds)
        if self._whole:
            self._scheduler.check()

    def _plan_of(self, number: int) -> int | None:
        """Today's number of a step: they need not begin at the same."""
        return next((plan.step for plan, step, _ in self._flights if step.step == number), None)

    def _end_unseen(self, ends: list[Any]) -> None:
        """A step landed that was planned before the recording began."""
        for request, index, *_ in ends:
            self._scheduler.abort_sequence(str(request), index)

    def _result(self, plan: StepPlan, step: Step, ends: list[Any]) -> StepResult:
        """What the model said, as far as it matters to the scheduler."""
        finished = {(request, index): end for request, index, *end in ends}
        said: list[list[int]] = []
        result = StepResult(said)
        for i, row in enumerate(plan.rows):
            place = (int(row.seq.request.id), row.seq.index)
            if row.samples:
                at = row.start + row.count
                said.append(self._harmless(row.seq.stop_ids, self._speech.said(place, at, at + 1)))
            else:
                said.append([])
            if place in finished:
                finish, _, fault, tokens, _ = finished[place]
                if finish == "error":
                    (result.refusals if fault == "request" else result.errors)[i] = "as recorded"
                elif tokens and finish in ("stop", "length"):
                    result.ends[i] = finish
        return result

    def _harmless(self, stop_ids: frozenset[int], tokens: list[int]) -> list[int]:
        """A token that does not end the text, or it would have been recorded."""
        if tokens[0] not in stop_ids:
            return tokens
        return [next(token for token in range(len(stop_ids) + 1) if token not in stop_ids)]

    def _fail(self, number: int) -> None:
        if self._flights and self._plan_of(number) == self._flights[0][0].step:
            plan, _, pending = self._flights.popleft()
            if pending is not None:
                try:
                    pending.wait()
                except Exception as error:  # noqa: BLE001 - as it was recorded
                    self.notes.append(
                        f"step {number} raises again: {type(error).__name__}: {error}"
                    )
            self._scheduler.fail(plan)


def n_of(facts: dict[str, Any]) -> int:
    """Sequences of a request."""
    return int(facts.get("n", 1))


def unbounded(config: EngineConfig) -> EngineConfig:
    """Who was let in then is let in again: how many may be here is a question of the clock."""
    said = replace(config.scheduler, max_num_queued_reqs=None, max_num_queued_tokens=None)
    return replace(config, scheduler=said)


def told(these: tuple[Any, ...], those: tuple[Any, ...]) -> str:
    """The first of these that are not at their place in those."""
    found = [one for i, one in enumerate(these) if i >= len(those) or those[i] != one]
    shown = ", ".join(_row(one) for one in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{shown or 'no others'}{more} ({len(these)} in all)"


def _row(one: Any) -> str:
    if not isinstance(one, tuple):
        return f"request {one}"
    number, index, start, count, samples = one
    name = f"request {number}" + (f".{index}" if index else "")
    return f"{name} [{start}, {start + count}){'' if samples else ' without a token'}"
