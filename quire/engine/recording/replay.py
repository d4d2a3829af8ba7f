"""Replay: runs a recording again, the same calls at the same steps, through the current scheduler.

Compares each plan with the recorded one and stops at the first that differs. A recording has no
tokens, so they are synthetic: blocks with one key get one content, so that shared prefixes are
shared again. Sampled tokens are synthetic too; sequences end where they ended.
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
from quire.core.scheduling.continued_steps import placed_rows
from quire.core.scheduling.drafting import RecordedDrafts
from quire.core.scheduling.grammar_wait import CompileOutcome, GrammarProvider
from quire.core.scheduling.limits.adapters import AdapterProvider, LoadOutcome
from quire.core.scheduling.scheduler import Scheduler
from quire.core.snapshot import AdapterStats, GrammarStats
from quire.core.tenant_limits import UNRESTRICTED, TenantLimits
from quire.core.types import (
    AdapterRef,
    MediaItem,
    Pooled,
    Request,
    StepPlan,
    StepResult,
    Wants,
)
from quire.engine.recording.flight_recorder import PLAIN_FIELDS
from quire.engine.recording.recording_file import Recording
from quire.errors import EngineError

_HINTS = get_type_hints(Request)
RecordedRow = tuple[int, int, int, int, bool]
"""Request, index, start, count, whether it samples."""


class RecordedStep(NamedTuple):
    """A recorded plan. joins: request, index, tokens found in the prefix cache."""

    step: int
    rows: tuple[RecordedRow, ...]
    joins: tuple[tuple[int, int, int], ...]
    preempted: tuple[int, ...]
    blocks_moved: tuple[int, int, int]  # to the host, from it, copied
    drafts: RecordedDrafts


class ReplayDifference(NamedTuple):
    """A step at which the current scheduler decides differently. step: 0 is before the first."""

    step: int
    what: str


class ReplayResult(NamedTuple):
    steps: int
    differences: list[ReplayDifference]
    notes: list[str]


class IncompleteRecording(Exception):
    """A recording lacks what a replay needs."""


class KnownBlocks:
    """Requests, sequences and block keys of the whole recording. A key is a number here."""

    def __init__(self, records: list[list[Any]]) -> None:
        self.requests: dict[int, dict[str, Any]] = {}
        self.places_by_sequence: dict[int, tuple[int, int]] = {}  # sequence -> request, index
        self.keys: dict[tuple[int, int], list[int]] = {}
        joined: set[tuple[int, int]] = set()
        for record in records:
            if record[0] == "b":
                for facts in record[4] or ():
                    self.requests.setdefault(facts["number"], facts)
                    for sequence, index, *_, keys in facts["sequences"]:
                        self._add(sequence, (facts["number"], index), keys)
            elif record[0] == "a":
                self.requests[record[2]["number"]] = record[2]
                for sequence, index, keys in record[3:]:
                    self._add(sequence, (record[2]["number"], index), keys)
            elif record[0] == "p":
                for sequence, request, index, _, keys in record[4]:
                    self._add(sequence, (request, index), keys)
                    joined.add((request, index))
            elif record[0] == "k":
                self._add(record[1], self.places_by_sequence[record[1]], record[2])
        self._key_counts = Counter(key for place in joined for key in set(self.keys[place]))

    def _add(self, sequence: int, place: tuple[int, int], keys: tuple[int, list[int]]) -> None:
        since, more = keys
        known = self.keys.get(place, [])
        self.places_by_sequence[sequence] = place
        self.keys[place] = max(known, known[:since] + more, key=len)

    def has_unknown_content(self, place: tuple[int, int], blocks: int) -> bool:
        """Whether no other sequence that joined is known to have one of its first blocks. One that
        had not ended computed it then: its last keys are not in the recording.
        """
        return any(self._key_counts[key] == 1 for key in self.keys.get(place, [])[:blocks])


class SyntheticTokens:
    """Synthetic tokens of prompts and outputs: the content of a block is a function of its key."""

    def __init__(
        self, known: KnownBlocks, block_size: int, vocab: int, never: frozenset[int]
    ) -> None:
        self._known_blocks = known
        self._block_size = block_size
        self._vocabulary = [token for token in range(min(vocab, 1 << 15)) if token not in never]

    def prompt(self, number: int) -> tuple[int, ...]:
        facts = self._known_blocks.requests[number]
        places = [(number, index) for index in range(num_sequences(facts))]
        place = max(places, key=lambda one: len(self._known_blocks.keys.get(one, ())))
        return tuple(self.between(place, 0, facts["prompt"]))

    def between(self, place: tuple[int, int], since: int, until: int) -> list[int]:
        """Tokens [since, until) of a sequence, counted from the beginning of its prompt."""
        keys, size = self._known_blocks.keys.get(place, []), self._block_size
        found: list[int] = []
        for block in range(since // size, -(-until // size)):
            name = keys[block] if block < len(keys) else f"{place} {block}"
            tokens = random.Random(f"block {name}").choices(self._vocabulary, k=size)
            found += tokens[max(since - block * size, 0) : until - block * size]
        return found


def _synthetic_source(length: int, number: int) -> tuple[int, ...]:
    """Return an encoder prompt of this length; equal ones for equal numbers."""
    return (number,) * length


def _synthetic_item(
    number: int,
    modality: str,
    start: int,
    length: int,
    runs: list[list[int]],
    bidirectional: bool,
    source_rows: int = 0,
) -> MediaItem:
    """Return an item without content; equal ones for equal numbers."""
    places = tuple([(offset, count) for offset, count in runs])
    digest = b"%d" % number
    return MediaItem(modality, digest, start, length, places, (), bidirectional, source_rows)


class RecordedGrammars:
    """Grammar provider that compiles nothing: outcomes come when they came in the recording."""

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
        raise NotImplementedError("a replay has no statistics")

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        pass


class RecordedAdapters:
    """Adapter provider that has all weights: waits for them are those of the recording."""

    has_outcomes = False

    def acquire(self, adapter: AdapterRef, tenant: bytes) -> bool:
        return True

    def release(self, adapter: AdapterRef) -> None:
        pass

    def weights(self, adapter: AdapterRef) -> object:
        return None

    def pinned_digests(self) -> tuple[bytes, ...]:
        return ()

    def stats(self) -> AdapterStats:
        raise NotImplementedError("a replay has no statistics")

    def outcomes(self) -> Iterator[tuple[bytes, LoadOutcome]]:
        return iter(())

    def set_outcome_callback(self, callback: Callable[[], None]) -> None:
        pass


def _adapter_for(number: int | None) -> AdapterRef | None:
    return None if number is None else AdapterRef(str(number), number.to_bytes(4))


def constraint_for(number: int) -> Constraint:
    """A placeholder for the grammar of a request."""
    return Constraint(str(number))


class RecordingReplay:
    """One recording and one scheduler. build_scheduler: that of quire.engine.build."""

    def __init__(
        self,
        recording: Recording,
        build_scheduler: Callable[[EngineConfig, GrammarProvider, AdapterProvider], Scheduler],
    ) -> None:
        config = without_queue_limits(recording.config)
        self._records = recording.records
        self._block_size = config.cache.block_size
        self._known_blocks = KnownBlocks(recording.records)
        never = frozenset(config.sampling.eos_ids)
        self._tokens = SyntheticTokens(
            self._known_blocks, self._block_size, config.model.vocab, never
        )
        self._grammars = RecordedGrammars()
        self._scheduler = build_scheduler(config, self._grammars, RecordedAdapters())
        self._scheduler.replay_state().set_drafts(RecordedDrafts({}))
        self._in_flight: deque[tuple[StepPlan, RecordedStep]] = deque()
        self._last_rows: tuple[int, ...] = ()
        self._starts_empty = True  # the recording begins without requests
        self._starts_with_cold_cache = True  # and with an empty prefix cache
        self._knows_tiers = True  # what tiers have depends on nothing from before
        self._has_begun = False
        self.steps = 0
        self.differences: list[ReplayDifference] = []
        self.notes: list[str] = []

    def run(self) -> ReplayResult:
        """Replay to the end of the recording, or to the first step that differs."""
        try:
            for record in self._records:
                self._apply_record(record)
                if self.differences:
                    break
            else:
                if not self._in_flight and not self._scheduler.idle:
                    self._scheduler.plan()  # the one that may have ended the engine
        except Exception as error:  # noqa: BLE001 - a border: a failure is a result
            self._add_difference(f"it raises {type(error).__name__}: {error}")
        return ReplayResult(self.steps, self.differences, self.notes)

    def _add_difference(self, what: str) -> None:
        self.differences.append(ReplayDifference(self.steps, what))

    def _apply_record(self, record: list[Any]) -> None:
        kind, scheduler = record[0], self._scheduler
        if kind == "b":
            self._begin(record[1], *record[3:])
        elif kind == "a":
            scheduler.add(self._request(record[2], record[2]["resumed"]))
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
        elif kind == "d":
            scheduler.observe_memory_release()
        elif kind == "p":
            self._plan_step(self._read_step(record))
        elif kind == "l":
            self._finish_step(record)
        elif kind == "f":
            if self._is_oldest(record[1]):
                scheduler.fail_step(self._in_flight.popleft()[0])
        elif kind == "m":
            scheduler.fail_request(str(record[2]), record[3])

    # -- requests -------------------------------------------------------------------------------

    def _begin(
        self,
        step: int,
        available: int,
        requests: list[dict[str, Any]] | None,
        order: list[int],
        in_flight: list[Any],
    ) -> None:
        """Restore the state at the beginning of the recording. Later state records are skipped."""
        if self._has_begun:
            return
        self._has_begun = True
        self._starts_with_cold_cache = self._knows_tiers = not step
        if requests is None:
            raise IncompleteRecording(
                "the recording begins in the middle, with more requests than it could store"
            )
        if not requests:
            return
        self._starts_empty = False
        running: dict[int, tuple[str, int, int]] = {}
        for facts in requests:
            resumed = self._resume_lengths(facts, running)
            if any(length is not None for length in resumed):
                self._scheduler.add(self._request(facts, resumed))
        state = self._scheduler.replay_state()
        for number in order:
            if number in running:
                state.start_running(*running[number])
        state.fork_followers()
        for number, proposals, continued, rows in in_flight:
            restored = [(*running[one][:2], count, drafts) for one, count, drafts in rows]
            plan = state.restore_step(restored, proposals, continued)
            nothing = RecordedDrafts({})
            self._in_flight.append((plan, RecordedStep(number, (), (), (), (0, 0, 0), nothing)))
        hidden = state.fill_pool(available)
        self.notes.append(
            f"the recording begins in the middle, with {len(requests)} requests; {hidden} blocks "
            "are reserved for content from before"
        )

    def _resume_lengths(
        self, facts: dict[str, Any], running: dict[int, tuple[str, int, int]]
    ) -> list[int | None]:
        """How many tokens each sequence had generated; adds those that ran to `running`."""
        resumed: list[int | None] = [None] * num_sequences(facts)
        for index in facts["live"]:
            resumed[index] = (facts["resumed"] or [0] * len(resumed))[index]
        for number, index, computed, generated, runs, _ in facts["sequences"]:
            ended = generated >= facts["stop"]["max_tokens"]  # in the step that is reported next
            resumed[index] = None if ended else generated
            if runs:
                running[number] = (str(facts["number"]), index, computed)
        return resumed

    def _request(self, facts: dict[str, Any], resumed: list[int | None]) -> Request:
        number, prompt = facts["number"], self._tokens.prompt(facts["number"])
        plain = {
            name: msgspec.convert(facts[name], _HINTS[name])
            for name in PLAIN_FIELDS
            if name in facts
        }
        limits: TenantLimits = plain.get("tenant_limits", UNRESTRICTED)
        plain["tenant_limits"] = TenantLimits(weight=limits.weight, kv_share=limits.kv_share)
        first = len(prompt)
        media = tuple([_synthetic_item(*one) for one in facts.get("media", ())])
        tokens = tuple(
            None if n is None else tuple(self._tokens.between((number, index), first, first + n))
            for index, n in enumerate(resumed[: num_sequences(facts)])
        )
        parent = facts["parent"]
        return Request(
            id=str(number),
            prompt=prompt,
            params=SamplingParams(prompt_logprobs=0 if facts["prompt_logprobs"] else None),
            salt=repr(facts["salt"]).encode(),
            tenant=repr(facts["tenant"]).encode(),
            parent=None if parent is None else str(parent),
            constraint=constraint_for(number) if facts["kept"] else None,
            adapter=_adapter_for(facts.get("adapter")),
            resumed_tokens=tokens,
            encoder_prompt=_synthetic_source(*facts.get("source", (0, 0))),
            media=media,
            extra_content=tuple([(item.start, item.digest) for item in media]),
            **plain,
        )

    # -- steps ----------------------------------------------------------------------------------

    def _read_step(self, record: list[Any]) -> RecordedStep:
        _, step, _, _, joins, starts, numbers, counts, samples, _, preempted, moved = record[:12]
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
        joined = tuple((request, index, computed) for _, request, index, computed, _ in joins)
        drafts, *more = record[12:] or (None,)
        of_rows = {(str(row[0]), row[1]): n for row, n in zip(rows, drafts or ()) if n}
        recorded = RecordedDrafts(of_rows, *more)
        return RecordedStep(step, rows, joined, tuple(preempted), tuple(moved), recorded)

    def _plan_step(self, step: RecordedStep) -> None:
        state = self._scheduler.replay_state()
        for number, index, computed in step.joins:
            if not computed or not state.waits_without_blocks(str(number), index):
                continue
            if not self._starts_with_cold_cache or self._known_blocks.has_unknown_content(
                (number, index), computed // self._block_size
            ):
                state.restore_prefix(str(number), index, computed)
                self._knows_tiers = False
        self.steps = step.step
        state.set_drafts(step.drafts)
        plan = self._scheduler.plan()
        self._compare(plan, step)
        self._in_flight.append((plan, step))

    def _compare(self, plan: StepPlan, step: RecordedStep) -> None:
        rows = tuple(
            (int(row.seq.request.id), row.seq.index, row.start, row.count, row.wants is Wants.TOKEN)
            for row in plan.rows
        )
        preempted = tuple(int(one) for one in plan.preempted)
        for verb, then, now in (
            ("preempts", step.preempted, preempted),
            ("has rows of", step.rows, rows),
        ):
            if then != now:
                replayed, recorded = describe_missing(now, then), describe_missing(then, now)
                self._add_difference(f"it {verb} {replayed}; recorded: {recorded}")
        moved = (len(plan.swap_out), len(plan.swap_in), len(plan.copies))
        compared = slice(0 if self._knows_tiers else 2, 3)  # tiers move what they have
        differs = moved[compared] != step.blocks_moved[compared]
        if not self.differences and self._starts_empty and differs:
            self._add_difference(
                f"it moves {moved} blocks (out, in, copied); recorded: {step.blocks_moved}"
            )

    def _finish_step(self, record: list[Any]) -> None:
        _, number, _, prompt_tokens, seconds, ends, *more = record
        places = self._known_blocks.places_by_sequence
        kept = {places[sequence]: count for sequence, count in (more[0] if more else ())}
        if not self._is_oldest(number):  # it was applied before the recording began
            for request, index, *_ in ends:
                self._scheduler.abort_sequence(str(request), index)
            return
        plan, _ = self._in_flight.popleft()
        self._scheduler.apply(plan, self._step_result(plan, ends, kept))
        self._scheduler.observe_step(prompt_tokens, seconds)
        if self._starts_empty:
            self._scheduler.check()

    def _is_oldest(self, number: int) -> bool:
        """Whether the oldest step in flight has this number in the recording."""
        return bool(self._in_flight) and self._in_flight[0][1].step == number

    def _step_result(
        self, plan: StepPlan, ends: list[Any], kept: dict[tuple[int, int], int]
    ) -> StepResult:
        """A result of the model, as far as the scheduler uses it. kept: tokens of sequences that
        had drafts."""
        finished = {(request, index): end for request, index, *end in ends}
        generated: list[list[int]] = []
        result = StepResult(generated)
        for i, row in enumerate(placed_rows(plan)):
            place = (int(row.seq.request.id), row.seq.index)
            at = row.start + row.count - row.drafts
            count = kept.get(place, 0) if row.drafts else 1
            tokens = self._tokens.between(place, at, at + count) if row.wants is Wants.TOKEN else []
            generated.append(self._without_stop(row.seq.stop_ids, tokens))
            if row.wants is Wants.POOLED:
                result.pooled[i] = Pooled((0,), b"")
            if place in finished:
                finish, _, fault, count = finished[place]
                if finish == "error":
                    errors = result.request_errors if fault == "request" else result.errors
                    errors[i] = "as recorded"
                elif count and finish in ("stop", "length"):
                    result.finish_reasons[i] = finish
        return result

    def _without_stop(self, stop_ids: frozenset[int], tokens: list[int]) -> list[int]:
        """The tokens, but none that would end the sequence: its end is in the recording."""
        if stop_ids.isdisjoint(tokens):
            return tokens
        other = next(token for token in range(len(stop_ids) + 1) if token not in stop_ids)
        return [other if token in stop_ids else token for token in tokens]


def num_sequences(facts: dict[str, Any]) -> int:
    """The number of sequences of a request."""
    return int(facts.get("n", 1))


def without_queue_limits(config: EngineConfig) -> EngineConfig:
    """The config without limits of the queue: they depend on the clock."""
    section = replace(config.scheduler, max_num_queued_reqs=None, max_num_queued_tokens=None)
    return replace(config, scheduler=section)


def describe_missing(these: tuple[Any, ...], those: tuple[Any, ...]) -> str:
    """The first of `these` that differ from `those` at their place."""
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
