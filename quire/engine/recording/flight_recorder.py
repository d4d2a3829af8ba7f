"""The flight recorder: what the scheduler was told and what it decided, of the last steps.

A witness that writes to memory which the process that started the engine has too, so it is there
when the engine is not. Two halves are filled in turn; each begins with who was here then, so that
the other may be overwritten. quire.engine.recording.recording_file makes a file of it,
quire.engine.recording.replay runs it.

No text, and no tokens unless asked for: of a prompt its length is kept and the beginning of the
keys of its blocks, which tell only what two prompts share. A record is an array of msgpack; the
first element says which:

    "b" begin    step, at, available blocks, requests that are here (nothing, if they need too
                 much room): facts, and of each sequence that has joined its number, index, tokens
                 planned, tokens said, whether it runs, keys; all as if steps in flight had landed.
                 Then the numbers in the order of joining
    "a" added    at, facts of the request
    "g" let go   at, numbers of requests queued, numbers of those ended
    "x" abort    at, number, keys by index  "e" end      at, number, index, keys
    "r" release  at, number                 "c" forgot   at
    "j" joined   sequence, request, index, computed, keys of its blocks
    "k" keys     sequence, keys: of one that had none when it joined
    "p" planned  step, at, available blocks, starts, sequences, counts, samples (the last three
                 only if they differ: from the plan before, from all 1, from all true), slots left,
                 requests preempted, numbers of blocks moved
    "l" landed   step, at, prompt tokens, seconds, ends, tokens (if asked for)
    "f" failed   step, at                   "m" blamed   at, number, message
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from quire.core.types import Request, SequenceState, StepPlan, Update
from quire.core.types import Sequence as Seq
from quire.engine.core.step_observer import StepObserver

MAGIC = b"quireFR1"
_HEADER = struct.Struct("<8sqqqqqqd")
"""Magic; half that is written; of each half its number and its length; step submitted, and when."""
_LENGTH = struct.Struct("<I")
KEY_BYTES = 8
"""Bytes of a block's key that are kept: enough to tell blocks apart."""
PRIVATE_FIELDS = (
    "id",
    "prompt",
    "params",
    "salt",
    "tenant",
    "constraint",
    "thinking",
    "parent",
    "resumed_tokens",
)
"""Fields of a request that are not kept as they are."""
PLAIN_FIELDS = {
    one.name: one.default for one in dataclasses.fields(Request) if one.name not in PRIVATE_FIELDS
}
"""The others, and what they are if a recording does not say."""
MAX_KEYS = 1 << 16
"""At the beginning of a half: to write more would hold a step up."""
_DIGESTED_FIELDS = "salt", "tenant"


class RecordRing:
    """The memory, of who writes it."""

    def __init__(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        self._half_bytes = (size - _HEADER.size) // 2
        self._current = self._offset = 0
        self._numbers = [0, -1]
        self._lengths = [0, 0]
        self._submitted = (0, 0.0)
        self._write_header()

    def append(self, data: bytes) -> bool:
        """Add a record. False: this half is full."""
        length = len(data) + _LENGTH.size
        if self._offset + length > self._half_bytes:
            return False
        begin = _HEADER.size + self._current * self._half_bytes + self._offset
        _LENGTH.pack_into(self._memory, begin, len(data))
        self._memory[begin + _LENGTH.size : begin + length] = data
        self._offset += length
        _INT64.pack_into(self._memory, _LENGTH_OFFSETS[self._current], self._offset)
        return True

    def switch_half(self) -> None:
        """Go on in the other half, whose records are forgotten."""
        number = self._numbers[self._current] + 1
        self._lengths[self._current] = self._offset
        self._current, self._offset = 1 - self._current, 0
        self._numbers[self._current] = number
        self._lengths[self._current] = 0
        self._write_header()

    def mark_submitted(self, step: int, at: float) -> None:
        """The executor has this step."""
        _SUBMITTED.pack_into(self._memory, _SUBMITTED_OFFSET, step, at)
        self._submitted = (step, at)

    def _write_header(self) -> None:
        (n0, n1), (l0, l1) = self._numbers, self._lengths
        _HEADER.pack_into(self._memory, 0, MAGIC, self._current, n0, l0, n1, l1, *self._submitted)


_INT64 = struct.Struct("<q")
_LENGTH_OFFSETS = (24, 40)  # of the lengths, in _HEAD
_SUBMITTED = struct.Struct("<qd")
_SUBMITTED_OFFSET = 48


class RingContents(NamedTuple):
    """What a ring had."""

    submitted_step: int  # the last step that the executor was given
    submitted_at: float
    records: list[list[Any]]


def read_ring(descriptor: int) -> RingContents | None:
    """The records, oldest first. None: nobody has written any."""
    size = os.fstat(descriptor).st_size
    if size < _HEADER.size:
        return None
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as memory:
        magic, _, n0, l0, n1, l1, step, at = _HEADER.unpack_from(memory, 0)
        if magic != MAGIC:
            return None
        half = (size - _HEADER.size) // 2
        found = sorted([(n0, _HEADER.size, l0), (n1, _HEADER.size + half, l1)])
        records = [
            record
            for number, begin, length in found
            if number >= 0
            for record in _records(memory, begin, min(length, half))
        ]
    return RingContents(step, at, records)


def _records(memory: mmap.mmap, begin: int, length: int) -> Iterator[list[Any]]:
    at = 0
    while at + _LENGTH.size <= length:
        (size,) = _LENGTH.unpack_from(memory, begin + at)
        at += _LENGTH.size
        yield msgspec.msgpack.decode(memory[begin + at : begin + at + size])
        at += size


class _RequestState:
    """A request that has not ended."""

    __slots__ = ("facts", "live_indexes", "sequences")

    def __init__(self, facts: dict[str, Any], alive: set[int]) -> None:
        self.facts = facts
        self.live_indexes = alive  # indexes of its sequences
        self.sequences: dict[int, Seq] = {}  # those that have joined, by index


class FlightRecorder(StepObserver):
    """The writer. One for an engine, from its first request on."""

    def __init__(
        self,
        ring: RecordRing,
        available: Callable[[], int],
        *,
        prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """available: how many blocks could be had now. prompts: keep tokens, too."""
        self._ring = ring
        self._available = available
        self._record_tokens = prompts
        self._clock = clock
        self._encode = msgspec.msgpack.Encoder(enc_hook=_to_list).encode
        self._request_count = 0  # requests so far
        self._active: dict[str, _RequestState] = {}
        self._numbers: dict[str, int] = {}  # of requests that are here or held
        self._held: set[str] = set()
        self._sequences: dict[Seq, int] = {}  # their numbers
        self._sequence_count = 0
        self._keys_written: dict[Seq, int] = {}  # how many were written
        self._keyless: dict[Seq, None] = {}  # joined without a look into the prefix cache
        self._last_rows: tuple[Seq, ...] | None = None  # rows of the plan before
        self._step = 0
        self._unwritten_plan: StepPlan | None = None  # made, and not written yet
        self._write_state()

    # -- as a witness ---------------------------------------------------------------------------

    def on_request_added(self, request: Request, *, kept: bool) -> None:
        self._request_count += 1
        facts = self._request_facts(request, self._request_count, kept)
        self._append("a", self._clock(), facts)
        on_sequence_abort = {i for i, said in enumerate(request.resumed_tokens) if said is None}
        self._active[request.id] = _RequestState(facts, set(range(request.n)) - on_sequence_abort)
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
            here = self._active.get(request_id)
            sequences = {} if here is None else here.sequences
            keys = [(index, self._truncated_keys(seq, 0)) for index, seq in sequences.items()]
            self._append("x", self._clock(), self._numbers[request_id], keys)
            self._held.discard(request_id)
            self._remove_request(request_id)

    def on_sequence_abort(self, request_id: str, index: int) -> None:
        here = self._active.get(request_id)
        if here is not None and index in here.live_indexes:
            seq = here.sequences.get(index)
            keys = b"" if seq is None else self._truncated_keys(seq, 0)
            self._append("e", self._clock(), self._numbers[request_id], index, keys)
            self._remove_sequence(request_id, index)

    def on_request_release(self, request_id: str) -> None:
        if request_id in self._numbers:
            self._append("r", self._clock(), self._numbers[request_id])
            self._held.discard(request_id)
            if request_id not in self._active:
                del self._numbers[request_id]

    def on_prefix_cache_reset(self) -> None:
        self._append("c", self._clock())

    def on_step_planned(self, plan: StepPlan) -> None:
        self._unwritten_plan = plan
        for seq in plan.joins:
            self._record_join(seq)
        if plan.rows:
            sequences, starts, counts, samples = zip(*plan.rows)
        else:
            sequences = starts = counts = samples = ()
        same = sequences == self._last_rows
        record = (
            "p",
            plan.step,
            self._clock(),
            self._available(),
            starts,
            None if same else [self._sequences[seq] for seq in sequences],
            None if sum(counts) == len(counts) else counts,
            None if all(samples) else samples,
            plan.leaves,
            [self._numbers.get(one, 0) for one in plan.preempted],
            (len(plan.swap_out), len(plan.swap_in), len(plan.copies)),
        )
        if not self._ring.append(self._encode(record)):
            self._switch_half()
            numbers = [self._sequences[seq] for seq in sequences]
            self._ring.append(self._encode((*record[:5], numbers, *record[6:])))
        self._last_rows = sequences
        self._unwritten_plan, self._step = None, plan.step

    def on_step_submitted(self, plan: StepPlan) -> None:
        self._ring.mark_submitted(plan.step, self._clock())

    def on_step_finished(
        self, plan: StepPlan, updates: Sequence[Update], prompt_tokens: int, seconds: float
    ) -> None:
        on_sequence_abort = [update for update in updates if update[3] is not None]
        ends = (
            [self._describe_end(update) for update in on_sequence_abort]
            if on_sequence_abort
            else ()
        )
        said = (
            [self._describe_tokens(update) for update in updates] if self._record_tokens else None
        )
        self._append("l", plan.step, self._clock(), prompt_tokens, seconds, ends, said)
        for update in on_sequence_abort:
            self._remove_sequence(update.request_id, update.index)
        if self._keyless:
            self._write_late_keys()

    def on_step_failed(self, plan: StepPlan, updates: Sequence[Update]) -> None:
        self._append("f", plan.step, self._clock())
        for update in updates:
            if update.finish is not None:
                self._remove_sequence(update.request_id, update.index)

    def on_request_failed(self, request_id: str, message: str) -> None:
        if request_id in self._numbers:
            self._append("m", self._clock(), self._numbers[request_id], message.partition(":")[0])
            self._remove_request(request_id)

    # -- records --------------------------------------------------------------------------------

    def _append(self, *record: Any) -> None:
        data = self._encode(record)
        if not self._ring.append(data):
            self._switch_half()
            self._ring.append(data)  # what is larger than a half is not kept

    def _switch_half(self) -> None:
        self._ring.switch_half()
        self._last_rows = None
        self._write_state()

    def _write_state(self) -> None:
        """Write who is here: with keys of blocks, or without, or nothing if there is no room."""
        self._keys_written = {}
        begin = "b", self._step, self._clock(), self._available()
        later = self._unwritten_changes()
        for most in (MAX_KEYS, 0):
            left = [most]
            here = [self._describe_request(one, later, left) for one in self._active.values()]
            if self._ring.append(self._encode((*begin, here, list(self._sequences.values())))):
                return
        self._ring.append(self._encode((*begin, None, ())))

    def _unwritten_changes(self) -> dict[Seq, tuple[int, int, bool]]:
        """What a plan that is not written yet has changed: tokens planned, said, who joined."""
        plan = self._unwritten_plan
        if plan is None:
            return {}
        joined = frozenset(plan.joins)
        changes = {row.seq: (row.count, int(row.samples), row.seq in joined) for row in plan.rows}
        return dict.fromkeys(joined, (0, 0, True)) | changes

    def _describe_request(
        self, here: _RequestState, later: dict[Seq, tuple[int, int, bool]], left: list[int]
    ) -> dict[str, Any]:
        """A request for who begins to read here: as it is when steps in flight have landed.

        left: how many keys may still be written.
        """
        found = []
        for index, seq in here.sequences.items():
            on_step_planned, said, joined = later.get(seq, (0, 0, False))
            runs = seq.state is SequenceState.RUNNING and not joined
            place = self._sequences[seq], index, seq.planned - on_step_planned if runs else 0
            known = len(seq.tokens) - seq.prompt_len - said
            left[0] -= len(seq.keys)
            keys = self._truncated_keys(seq, 0) if left[0] >= 0 else b""
            found.append((*place, known, runs, keys))
        return {**here.facts, "alive": sorted(here.live_indexes), "sequences": found}

    def _request_facts(self, request: Request, number: int, kept: bool) -> dict[str, Any]:
        parent = None if request.parent is None else self._numbers.get(request.parent)
        facts: dict[str, Any] = {}
        for name, usual in PLAIN_FIELDS.items():
            value = getattr(request, name)
            if value != usual:
                facts[name] = value
        facts |= {
            name: sha256(getattr(request, name)).digest()[:KEY_BYTES] for name in _DIGESTED_FIELDS
        }
        return facts | {
            "number": number,
            "digest": request_digest(request.id),
            "prompt": len(request.prompt),
            "spoken": [None if one is None else len(one) for one in request.resumed_tokens],
            "parent": parent,
            "kept": kept,
            "judged": request.params.prompt_logprobs is not None,
            "tokens": request.prompt if self._record_tokens else None,
        }

    def _record_join(self, seq: Seq) -> None:
        request_id = seq.request.id
        number = self._sequences.get(seq)
        if number is None:
            self._sequence_count += 1
            number = self._sequences[seq] = self._sequence_count
            self._active[request_id].sequences[seq.index] = seq
        else:  # it comes behind those who came while it was out
            self._sequences[seq] = self._sequences.pop(seq)
        keys = self._truncated_keys(seq, self._keys_written.get(seq, 0))
        self._keys_written[seq] = len(seq.keys)
        if not seq.keys:
            self._keyless[seq] = None
        place = self._numbers[request_id], seq.index
        self._append("j", number, *place, seq.computed, keys)

    def _write_late_keys(self) -> None:
        """Write keys of those who had none when they joined, once their prompts are computed."""
        for seq in [one for one in self._keyless if one.computed >= one.prompt_len]:
            del self._keyless[seq]
            self._keys_written[seq] = len(seq.keys)
            if seq.keys:
                self._append("k", self._sequences[seq], self._truncated_keys(seq, 0))

    def _truncated_keys(self, seq: Seq, since: int) -> bytes:
        return b"".join([key[:KEY_BYTES] for key in seq.keys[since:]])

    def _describe_end(self, update: Update) -> tuple[Any, ...]:
        here = self._active.get(update.request_id)
        seq = None if here is None else here.sequences.get(update.index)
        keys = b"" if seq is None else self._truncated_keys(seq, 0)
        place = self._numbers.get(update.request_id, 0), update.index
        return (
            *place,
            update.finish,
            update.last_token_is_text,
            update.fault,
            len(update.token_ids),
            keys,
        )

    def _describe_tokens(self, update: Update) -> tuple[int, int, Sequence[int]]:
        return self._numbers.get(update.request_id, 0), update.index, update.token_ids

    # -- who is here ----------------------------------------------------------------------------

    def _remove_sequence(self, request_id: str, index: int) -> None:
        here = self._active.get(request_id)
        if here is None:
            return
        self._drop_sequence(here.sequences.pop(index, None))
        here.live_indexes.discard(index)
        if not here.live_indexes:
            self._remove_request(request_id)

    def _remove_request(self, request_id: str) -> None:
        here = self._active.pop(request_id, None)
        for seq in () if here is None else here.sequences.values():
            self._drop_sequence(seq)
        if request_id not in self._held:
            self._numbers.pop(request_id, None)

    def _drop_sequence(self, seq: Seq | None) -> None:
        if seq is not None:
            self._sequences.pop(seq, None)
            self._keys_written.pop(seq, None)
            self._keyless.pop(seq, None)


def request_digest(request_id: str) -> str:
    """What a recording calls a request: who has its id finds it there."""
    return sha256(request_id.encode()).hexdigest()[:12]


def _to_list(value: object) -> object:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"a recording has no {type(value).__name__}")
