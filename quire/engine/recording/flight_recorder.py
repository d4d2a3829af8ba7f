"""Flight recorder: keeps the scheduler's last calls and plans in memory that outlives the engine.

The memory is a ring that the parent process shares. quire.engine.recording.recording_file makes a
file of it, quire.engine.recording.replay runs that again. It holds no tokens and no text: a prompt
is its length and the first bytes of its block keys. A record is a msgpack array; its first element
is its kind:

    "b" state   step, at, available blocks, requests (None: they need too much space), numbers of
                sequences in the order of joining, steps in flight (step, drafts that a model
                proposes, rows that continue others, rows: sequence, count, drafts)
    "a" added   at, facts of the request, its first sequence (number, index, block keys)
    "g" admission  at, requests queued, requests ended
    "x" abort   at, request                 "e" abort      at, request, index of the sequence
    "r" release at, request                 "c" prefix cache reset  at
    "d" rows of encoders forgotten  at
    "k" keys    sequence, block keys (two values: how many came before, and the rest)
    "p" plan    step, at, available blocks, joins (sequence, request, index, computed tokens, block
                keys), starts, sequences, counts, samples (the last three only if they differ: from
                the plan before, from all 1, from all true), slots that were left, requests
                preempted, blocks moved (to the host, from it, copied), drafts (None: of no row),
                drafts that a model proposes behind it, whether it continues the step before
    "l" result  step, at, prompt tokens, seconds, sequences that ended, tokens of rows with drafts
                (sequence, tokens)
    "f" failed  step, at                    "m" request failed  at, request, error
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import dropwhile
from typing import Any, NamedTuple

import msgspec

from quire.core.kv.cross_blocks import source_digest
from quire.core.types import Request, SequenceState, StepPlan, Update, Wants, num_known_tokens
from quire.core.types import Sequence as Seq
from quire.engine.core.step_observer import StepObserver

MAGIC = b"quireFR2"
_HEADER = struct.Struct("<8sqdqqqq")
"""Magic; the step that was submitted last, and when; the number and the length of each half."""
_SUBMITTED, _SUBMITTED_OFFSET = struct.Struct("<qd"), 8
_HALF, _HALF_OFFSETS = struct.Struct("<qq"), (24, 40)
_LENGTH = struct.Struct("<I")
KEY_BYTES = 8
"""Bytes of a block's key that are kept: enough to distinguish blocks."""
MAX_KEYS = 1 << 16
"""Block keys in a state record: writing more would delay a step."""
PRIVATE_FIELDS = (
    "adapter",
    "encoder_media",
    "encoder_prompt",
    "extra_content",
    "forced",
    "id",
    "media",
    "prediction",
    "prompt",
    "prompt_embeds",
    "params",
    "salt",
    "tenant",
    "constraint",
    "thinking",
    "parent",
    "resumed_tokens",
    "rope_delta",
    "rope_positions",
    "token_types",
)
"""Fields of a request that are not kept as they are."""
PLAIN_FIELDS = {
    one.name: one.default for one in dataclasses.fields(Request) if one.name not in PRIVATE_FIELDS
}
"""The other fields, and their values where a recording has none."""


def _source_facts(request: Request) -> dict[str, Any]:
    """The length of an encoder prompt, and a number that distinguishes it; {} without one."""
    if not request.encoder_prompt:
        return {}
    digest = source_digest(dataclasses.replace(request, salt=b"", adapter=None))
    return {"source": (len(request.encoder_prompt), int.from_bytes(digest[:4]) >> 1)}


def _media_facts(request: Request) -> dict[str, Any]:
    """Places of media items, and a number that distinguishes each; {} without any."""
    if not request.media:
        return {}
    return {
        "media": [
            (
                _number(one.digest),
                one.modality,
                one.start,
                one.length,
                one.runs,
                one.bidirectional,
                one.source_rows,
            )
            for one in request.media
        ]
    }


def _adapter_facts(request: Request) -> dict[str, Any]:
    """A number that distinguishes the adapter; {} without one."""
    if request.adapter is None:
        return {}
    return {"adapter": _number(request.adapter.digest)}


def _number(digest: bytes) -> int:
    """A number in place of a digest, which is not kept."""
    return int.from_bytes(sha256(digest).digest()[:4]) >> 1


class RecordRing:
    """Shared memory of two halves, filled in turn. Each begins with a state record, or a plan and
    a state record, so that the other half may be overwritten.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        self.half_bytes = (size - _HEADER.size) // 2
        self._current = self._length = self._number = 0
        _HEADER.pack_into(self._memory, 0, MAGIC, 0, 0.0, 0, 0, -1, 0)

    def append(self, data: bytes) -> bool:
        """Add a record. Returns False if this half is full."""
        end = self._length + _LENGTH.size + len(data)
        if end > self.half_bytes:
            return False
        begin = _HEADER.size + self._current * self.half_bytes + self._length
        _LENGTH.pack_into(self._memory, begin, len(data))
        begin += _LENGTH.size
        self._memory[begin : begin + len(data)] = data
        self._length = end
        _HALF.pack_into(self._memory, _HALF_OFFSETS[self._current], self._number, end)
        return True

    def switch_half(self) -> None:
        """Overwrite the other half from now on."""
        self._number += 1
        self._current, self._length = 1 - self._current, 0
        _HALF.pack_into(self._memory, _HALF_OFFSETS[self._current], self._number, 0)

    def mark_submitted(self, step: int, at: float) -> None:
        """Record the step that the executor was given last."""
        _SUBMITTED.pack_into(self._memory, _SUBMITTED_OFFSET, step, at)


class RingContents(NamedTuple):
    """The contents of a ring. submitted_step: the last step that the executor was given."""

    submitted_step: int
    submitted_at: float
    records: list[list[Any]]


def read_ring(descriptor: int) -> RingContents | None:
    """The records, oldest first, from a state record on. None if nothing was written."""
    size = os.fstat(descriptor).st_size
    if size < _HEADER.size:
        return None
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as memory:
        magic, step, at, n0, l0, n1, l1 = _HEADER.unpack_from(memory, 0)
        if magic != MAGIC:
            return None
        half = (size - _HEADER.size) // 2
        halves = sorted([(n0, _HEADER.size, l0), (n1, _HEADER.size + half, l1)])
        records = [
            record
            for number, begin, length in halves
            if number >= 0
            for record in _read_half(memory, begin, min(length, half))
        ]
    return RingContents(step, at, list(dropwhile(lambda record: record[0] != "b", records)))


def _read_half(memory: mmap.mmap, begin: int, length: int) -> Iterator[list[Any]]:
    at = 0
    while at + _LENGTH.size <= length:
        (size,) = _LENGTH.unpack_from(memory, begin + at)
        at += _LENGTH.size
        yield msgspec.msgpack.decode(memory[begin + at : begin + at + size])
        at += size


class _RequestState:
    """A request that has not ended: its facts, the indexes of its live sequences, and those of its
    sequences that have a number: the first, and others that have joined.
    """

    __slots__ = ("facts", "live_indexes", "sequences")

    def __init__(self, facts: dict[str, Any], live_indexes: set[int], first: Seq) -> None:
        self.facts = facts
        self.live_indexes = live_indexes
        self.sequences = {first.index: first}


class FlightRecorder(StepObserver):
    """Writes the ring. One per engine, from its first request on."""

    def __init__(
        self,
        ring: RecordRing,
        available: Callable[[], int],
        extend_keys: Callable[[Seq], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """available: returns how many blocks could be allocated now. extend_keys: makes the block
        keys of a sequence that waits."""
        self._ring = ring
        self._available = available
        self._extend_keys = extend_keys
        self._clock = clock
        self._encode = msgspec.msgpack.Encoder().encode
        self._request_count = self._sequence_count = self._step = 0
        self._active: dict[str, _RequestState] = {}
        self._numbers: dict[str, int] = {}  # of requests that are active or held
        self._held: set[str] = set()
        self._sequences: dict[Seq, int] = {}  # numbers; those that run in the order of joining
        self._keys_written: dict[Seq, int] = {}
        self._keyless: dict[Seq, None] = {}  # joined without a lookup in the prefix cache
        self._last_rows: tuple[Seq, ...] | None = None  # of the plan before
        self._in_flight: deque[StepPlan] = deque()
        self._write_state()

    # -- as an observer -------------------------------------------------------------------------

    def on_request_added(self, request: Request, seq: Seq, *, kept: bool) -> None:
        self._request_count += 1
        self._sequence_count += 1
        self._extend_keys(seq)
        facts, number = self._request_facts(request, kept), self._sequence_count
        self._append("a", self._clock(), facts, (number, seq.index, self._new_keys(seq)))
        ended = {i for i, tokens in enumerate(request.resumed_tokens) if tokens is None}
        self._active[request.id] = _RequestState(facts, set(range(request.n)) - ended, seq)
        self._sequences[seq] = number
        self._numbers[request.id] = self._request_count
        if request.hold:
            self._held.add(request.id)

    def on_admission_change(self, queued: Sequence[str], ended: Sequence[Update]) -> None:
        gone = list(dict.fromkeys([update.request_id for update in ended]))
        numbers = self._numbers
        for one in queued:
            self._active[one].facts["kept"] = False
        self._append("g", self._clock(), [numbers[i] for i in queued], [numbers[i] for i in gone])
        for request_id in gone:
            self._remove_request(request_id)

    def on_request_abort(self, request_id: str) -> None:
        if request_id in self._numbers:
            state = self._active.get(request_id)
            for seq in () if state is None else state.sequences.values():
                self._write_late_keys(seq)
            self._append("x", self._clock(), self._numbers[request_id])
            self._held.discard(request_id)
            self._remove_request(request_id)

    def on_sequence_abort(self, request_id: str, index: int) -> None:
        state = self._active.get(request_id)
        if state is not None and index in state.live_indexes:
            self._write_late_keys(state.sequences.get(index))
            self._append("e", self._clock(), self._numbers[request_id], index)
            self._remove_sequence(request_id, index)

    def on_request_release(self, request_id: str) -> None:
        if request_id in self._numbers:
            self._append("r", self._clock(), self._numbers[request_id])
            self._held.discard(request_id)
            if request_id not in self._active:
                del self._numbers[request_id]

    def on_prefix_cache_reset(self) -> None:
        self._append("c", self._clock())

    def on_memory_release(self) -> None:
        self._append("d", self._clock())

    def on_step_planned(self, plan: StepPlan) -> None:
        self._step = plan.step
        self._in_flight.append(plan)
        joins = [self._join(seq) for seq in plan.joins]
        sequences, starts, counts, wants, drafts = zip(*plan.rows) if plan.rows else ((),) * 5
        begin = "p", plan.step, self._clock(), self._available(), joins, starts
        same = sequences == self._last_rows
        rest = (
            None if sum(counts) == len(counts) else counts,
            None if wants.count(Wants.TOKEN) == len(wants) else [w is Wants.TOKEN for w in wants],
            plan.leaves,
            [self._numbers.get(one, 0) for one in plan.preempted],
            (len(plan.swap_out), len(plan.swap_in), len(plan.copies)),
            drafts if plan.num_drafts else None,
            plan.proposals,
            bool(plan.continues),
        )
        numbers = None if same else [self._sequences[seq] for seq in sequences]
        self._last_rows = sequences
        if not self._ring.append(self._encode((*begin, numbers, *rest))):
            self._ring.switch_half()
            numbers = [self._sequences[seq] for seq in sequences]
            self._ring.append(self._encode((*begin, numbers, *rest)))
            self._last_rows = None
            self._write_state()  # after the plan: it is in flight

    def on_step_submitted(self, plan: StepPlan) -> None:
        self._ring.mark_submitted(plan.step, self._clock())

    def on_step_finished(
        self, plan: StepPlan, updates: Sequence[Update], prompt_tokens: int, seconds: float
    ) -> None:
        self._in_flight.popleft()  # its results are in the sequences
        ended = [update for update in updates if update[3] is not None]  # its finish
        ends = [self._describe_end(update) for update in ended] if ended else ()
        kept = self._kept_tokens(plan, updates) if plan.num_drafts else ()
        self._append("l", plan.step, self._clock(), prompt_tokens, seconds, ends, kept)
        for update in ended:
            self._remove_sequence(update.request_id, update.index)
        for seq in [one for one in self._keyless if one.computed >= one.prompt_len]:
            del self._keyless[seq]
            self._write_late_keys(seq)

    def on_step_failed(self, plan: StepPlan) -> None:
        self._in_flight.popleft()
        self._append("f", plan.step, self._clock())

    def on_request_failed(self, request_id: str, message: str) -> None:
        if request_id in self._numbers:
            self._append("m", self._clock(), self._numbers[request_id], message.partition(":")[0])
            self._remove_request(request_id)

    # -- records --------------------------------------------------------------------------------

    def _append(self, *record: Any) -> None:
        data = self._encode(record)
        if not self._ring.append(data):
            self._ring.switch_half()
            self._last_rows = None
            self._write_state()
            self._ring.append(data)  # a record larger than a half is not kept

    def _write_state(self) -> None:
        """Write the requests that are here, with the keys of so many blocks as there is space."""
        self._keys_written.clear()
        left = min(MAX_KEYS, self._ring.half_bytes // (4 * KEY_BYTES))
        requests = []
        for state in self._active.values():
            sequences = []
            for index, seq in state.sequences.items():
                left -= len(seq.keys)
                runs = seq.state is SequenceState.RUNNING
                numbers = self._sequences[seq], index, seq.computed if runs else 0
                generated = num_known_tokens(seq) - seq.prompt_len
                keys = self._new_keys(seq) if left >= 0 else (0, b"")
                sequences.append((*numbers, generated, runs, keys))
            live = sorted(state.live_indexes)
            requests.append({**state.facts, "live": live, "sequences": sequences})
        begin = "b", self._step, self._clock(), self._available()
        steps = [self._step_in_flight(plan) for plan in self._in_flight]
        whole = requests, list(self._sequences.values()), steps
        if not self._ring.append(self._encode((*begin, *whole))):
            self._ring.append(self._encode((*begin, None, (), ())))

    def _step_in_flight(self, plan: StepPlan) -> tuple[Any, ...]:
        """Describe a step for a state record, without the rows of sequences that run no more."""
        live = [
            row.seq.state is SequenceState.RUNNING and row.seq in self._sequences
            for row in plan.rows
        ]
        rows = [
            (self._sequences[row.seq], row.count, row.drafts)
            for row, lives in zip(plan.rows, live)
            if lives
        ]
        return plan.step, plan.proposals, sum(live[: len(plan.continues)]), rows

    def _request_facts(self, request: Request, kept: bool) -> dict[str, Any]:
        facts = {
            name: getattr(request, name)
            for name, default in PLAIN_FIELDS.items()
            if getattr(request, name) != default
        }
        return facts | {
            "number": self._request_count,
            "digest": request_digest(request.id),
            "prompt": len(request.prompt),
            **_source_facts(request),
            **_adapter_facts(request),
            **_media_facts(request),
            "resumed": [None if one is None else len(one) for one in request.resumed_tokens],
            "parent": self._numbers.get(request.parent or ""),
            "kept": kept,
            "prompt_logprobs": request.params.prompt_logprobs is not None,
            "salt": sha256(request.cache_root).digest()[:KEY_BYTES],
            "tenant": sha256(request.tenant).digest()[:KEY_BYTES],
        }

    def _kept_tokens(self, plan: StepPlan, updates: Sequence[Update]) -> list[tuple[int, int]]:
        """The number and the tokens of each sequence that had drafts."""
        tokens = {(update.request_id, update.index): len(update.token_ids) for update in updates}
        return [
            (self._sequences[row.seq], tokens.get((row.seq.request.id, row.seq.index), 0))
            for row in plan.rows
            if row.drafts and row.seq in self._sequences
        ]

    def _join(self, seq: Seq) -> tuple[Any, ...]:
        request_id, number = seq.request.id, self._sequences.pop(seq, None)
        if number is None:
            self._sequence_count += 1
            number = self._sequence_count
            self._active[request_id].sequences[seq.index] = seq
        self._sequences[seq] = number  # the last in the order, also after a preemption
        if not seq.keys:
            self._keyless[seq] = None
        return number, self._numbers[request_id], seq.index, seq.computed, self._new_keys(seq)

    def _new_keys(self, seq: Seq) -> tuple[int, bytes]:
        """How many keys of its blocks were written before, and the others."""
        since = self._keys_written.get(seq, 0)
        self._keys_written[seq] = len(seq.keys)
        return since, b"".join([key[:KEY_BYTES] for key in seq.keys[since:]])

    def _write_late_keys(self, seq: Seq | None) -> None:
        """Write the keys of blocks that were filled since a sequence joined."""
        if seq is not None and len(seq.keys) > self._keys_written.get(seq, 0):
            self._append("k", self._sequences[seq], self._new_keys(seq))

    def _describe_end(self, update: Update) -> tuple[Any, ...]:
        state = self._active.get(update.request_id)
        self._write_late_keys(None if state is None else state.sequences.get(update.index))
        number = self._numbers.get(update.request_id, 0)
        text = update.last_token_is_text
        return number, update.index, update.finish, text, update.fault, len(update.token_ids)

    # -- requests and sequences that have not ended ---------------------------------------------

    def _remove_sequence(self, request_id: str, index: int) -> None:
        state = self._active.get(request_id)
        if state is None:
            return
        self._drop_sequence(state.sequences.pop(index, None))
        state.live_indexes.discard(index)
        if not state.live_indexes:
            self._remove_request(request_id)

    def _remove_request(self, request_id: str) -> None:
        state = self._active.pop(request_id, None)
        for seq in () if state is None else state.sequences.values():
            self._drop_sequence(seq)
        if request_id not in self._held:
            self._numbers.pop(request_id, None)

    def _drop_sequence(self, seq: Seq | None) -> None:
        if seq is not None:
            self._sequences.pop(seq, None)
            self._keys_written.pop(seq, None)
            self._keyless.pop(seq, None)


def request_digest(request_id: str) -> str:
    """The name of a request in a recording, to find it by its id."""
    return sha256(request_id.encode()).hexdigest()[:12]
