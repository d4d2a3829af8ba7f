"""The flight recorder: what the scheduler was told and what it decided, of the last steps.

A witness that writes to memory which the process that started the engine has too, so it is there
when the engine is not. Two halves are filled in turn; each begins with who was here then, so that
the other may be overwritten. quire.engine.bundle makes a file of it, quire.engine.replay runs it.

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

from quire.core.types import Request, State, StepPlan, Update
from quire.core.types import Sequence as Seq
from quire.engine.witness import Witness

MAGIC = b"quireFR1"
_HEAD = struct.Struct("<8sqqqqqqd")
"""Magic; half that is written; of each half its number and its length; step submitted, and when."""
_LENGTH = struct.Struct("<I")
KEY = 8
"""Bytes of a block's key that are kept: enough to tell blocks apart."""
PRIVATE = ("id", "prompt", "params", "salt", "tenant", "constraint", "thinking", "parent", "spoken")
"""Fields of a request that are not kept as they are."""
PLAIN = {one.name: one.default for one in dataclasses.fields(Request) if one.name not in PRIVATE}
"""The others, and what they are if a recording does not say."""
MOST_KEYS = 1 << 16
"""At the beginning of a half: to write more would hold a step up."""
_SALTED = "salt", "tenant"


class Ring:
    """The memory, of who writes it."""

    def __init__(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        self._half = (size - _HEAD.size) // 2
        self._current = self._at = 0
        self._numbers = [0, -1]
        self._lengths = [0, 0]
        self._submitted = (0, 0.0)
        self._head()

    def put(self, data: bytes) -> bool:
        """Add a record. False: this half is full."""
        length = len(data) + _LENGTH.size
        if self._at + length > self._half:
            return False
        begin = _HEAD.size + self._current * self._half + self._at
        _LENGTH.pack_into(self._memory, begin, len(data))
        self._memory[begin + _LENGTH.size : begin + length] = data
        self._at += length
        _WORD.pack_into(self._memory, _PLACES[self._current], self._at)
        return True

    def turn(self) -> None:
        """Go on in the other half, whose records are forgotten."""
        number = self._numbers[self._current] + 1
        self._lengths[self._current] = self._at
        self._current, self._at = 1 - self._current, 0
        self._numbers[self._current] = number
        self._lengths[self._current] = 0
        self._head()

    def submitted(self, step: int, at: float) -> None:
        """The executor has this step."""
        _SUBMITTED.pack_into(self._memory, _SUBMITTED_AT, step, at)
        self._submitted = (step, at)

    def _head(self) -> None:
        (n0, n1), (l0, l1) = self._numbers, self._lengths
        _HEAD.pack_into(self._memory, 0, MAGIC, self._current, n0, l0, n1, l1, *self._submitted)


_WORD = struct.Struct("<q")
_PLACES = (24, 40)  # of the lengths, in _HEAD
_SUBMITTED = struct.Struct("<qd")
_SUBMITTED_AT = 48


class Taken(NamedTuple):
    """What a ring had."""

    submitted: int  # the last step that the executor was given
    submitted_at: float
    records: list[list[Any]]


def read(descriptor: int) -> Taken | None:
    """The records, oldest first. None: nobody has written any."""
    size = os.fstat(descriptor).st_size
    if size < _HEAD.size:
        return None
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as memory:
        magic, _, n0, l0, n1, l1, step, at = _HEAD.unpack_from(memory, 0)
        if magic != MAGIC:
            return None
        half = (size - _HEAD.size) // 2
        found = sorted([(n0, _HEAD.size, l0), (n1, _HEAD.size + half, l1)])
        records = [
            record
            for number, begin, length in found
            if number >= 0
            for record in _records(memory, begin, min(length, half))
        ]
    return Taken(step, at, records)


def _records(memory: mmap.mmap, begin: int, length: int) -> Iterator[list[Any]]:
    at = 0
    while at + _LENGTH.size <= length:
        (size,) = _LENGTH.unpack_from(memory, begin + at)
        at += _LENGTH.size
        yield msgspec.msgpack.decode(memory[begin + at : begin + at + size])
        at += size


class _Here:
    """A request that has not ended."""

    __slots__ = ("alive", "facts", "sequences")

    def __init__(self, facts: dict[str, Any], alive: set[int]) -> None:
        self.facts = facts
        self.alive = alive  # indexes of its sequences
        self.sequences: dict[int, Seq] = {}  # those that have joined, by index


class Recorder(Witness):
    """The writer. One for an engine, from its first request on."""

    def __init__(
        self,
        ring: Ring,
        available: Callable[[], int],
        *,
        prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """available: how many blocks could be had now. prompts: keep tokens, too."""
        self._ring = ring
        self._available = available
        self._prompts = prompts
        self._clock = clock
        self._encode = msgspec.msgpack.Encoder(enc_hook=_listed).encode
        self._count = 0  # requests so far
        self._here: dict[str, _Here] = {}
        self._numbers: dict[str, int] = {}  # of requests that are here or held
        self._held: set[str] = set()
        self._sequences: dict[Seq, int] = {}  # their numbers
        self._joined = 0
        self._keys: dict[Seq, int] = {}  # how many were written
        self._keyless: dict[Seq, None] = {}  # joined without a look into the prefix cache
        self._before: tuple[Seq, ...] | None = None  # rows of the plan before
        self._step = 0
        self._planning: StepPlan | None = None  # made, and not written yet
        self._begin()

    # -- as a witness ---------------------------------------------------------------------------

    def added(self, request: Request, *, kept: bool) -> None:
        self._count += 1
        facts = self._facts(request, self._count, kept)
        self._put("a", self._clock(), facts)
        ended = {i for i, said in enumerate(request.spoken) if said is None}
        self._here[request.id] = _Here(facts, set(range(request.n)) - ended)
        self._numbers[request.id] = self._count
        if request.hold:
            self._held.add(request.id)

    def let_go(self, queued: Sequence[str], ended: Sequence[Update]) -> None:
        gone = list(dict.fromkeys([update.request_id for update in ended]))
        numbers = self._numbers
        for one in queued:
            self._here[one].facts["kept"] = False
        self._put("g", self._clock(), [numbers[i] for i in queued], [numbers[i] for i in gone])
        for request_id in gone:
            self._forget(request_id)

    def aborted(self, request_id: str) -> None:
        if request_id in self._numbers:
            here = self._here.get(request_id)
            sequences = {} if here is None else here.sequences
            keys = [(index, self._news_of_keys(seq, 0)) for index, seq in sequences.items()]
            self._put("x", self._clock(), self._numbers[request_id], keys)
            self._held.discard(request_id)
            self._forget(request_id)

    def ended(self, request_id: str, index: int) -> None:
        here = self._here.get(request_id)
        if here is not None and index in here.alive:
            seq = here.sequences.get(index)
            keys = b"" if seq is None else self._news_of_keys(seq, 0)
            self._put("e", self._clock(), self._numbers[request_id], index, keys)
            self._leave(request_id, index)

    def released(self, request_id: str) -> None:
        if request_id in self._numbers:
            self._put("r", self._clock(), self._numbers[request_id])
            self._held.discard(request_id)
            if request_id not in self._here:
                del self._numbers[request_id]

    def forgot(self) -> None:
        self._put("c", self._clock())

    def planned(self, plan: StepPlan) -> None:
        self._planning = plan
        for seq in plan.joins:
            self._join(seq)
        if plan.rows:
            sequences, starts, counts, samples = zip(*plan.rows)
        else:
            sequences = starts = counts = samples = ()
        same = sequences == self._before
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
        if not self._ring.put(self._encode(record)):
            self._turn()
            numbers = [self._sequences[seq] for seq in sequences]
            self._ring.put(self._encode((*record[:5], numbers, *record[6:])))
        self._before = sequences
        self._planning, self._step = None, plan.step

    def submitted(self, plan: StepPlan) -> None:
        self._ring.submitted(plan.step, self._clock())

    def landed(
        self, plan: StepPlan, updates: Sequence[Update], prompt_tokens: int, seconds: float
    ) -> None:
        ended = [update for update in updates if update[3] is not None]
        ends = [self._end(update) for update in ended] if ended else ()
        said = [self._said(update) for update in updates] if self._prompts else None
        self._put("l", plan.step, self._clock(), prompt_tokens, seconds, ends, said)
        for update in ended:
            self._leave(update.request_id, update.index)
        if self._keyless:
            self._name_late()

    def failed(self, plan: StepPlan, updates: Sequence[Update]) -> None:
        self._put("f", plan.step, self._clock())
        for update in updates:
            if update.finish is not None:
                self._leave(update.request_id, update.index)

    def blamed(self, request_id: str, message: str) -> None:
        if request_id in self._numbers:
            self._put("m", self._clock(), self._numbers[request_id], message.partition(":")[0])
            self._forget(request_id)

    # -- records --------------------------------------------------------------------------------

    def _put(self, *record: Any) -> None:
        data = self._encode(record)
        if not self._ring.put(data):
            self._turn()
            self._ring.put(data)  # what is larger than a half is not kept

    def _turn(self) -> None:
        self._ring.turn()
        self._before = None
        self._begin()

    def _begin(self) -> None:
        """Write who is here: with keys of blocks, or without, or nothing if there is no room."""
        self._keys = {}
        begin = "b", self._step, self._clock(), self._available()
        later = self._undone()
        for most in (MOST_KEYS, 0):
            left = [most]
            here = [self._standing(one, later, left) for one in self._here.values()]
            if self._ring.put(self._encode((*begin, here, list(self._sequences.values())))):
                return
        self._ring.put(self._encode((*begin, None, ())))

    def _undone(self) -> dict[Seq, tuple[int, int, bool]]:
        """What a plan that is not written yet has changed: tokens planned, said, who joined."""
        plan = self._planning
        if plan is None:
            return {}
        joined = frozenset(plan.joins)
        changes = {row.seq: (row.count, int(row.samples), row.seq in joined) for row in plan.rows}
        return dict.fromkeys(joined, (0, 0, True)) | changes

    def _standing(
        self, here: _Here, later: dict[Seq, tuple[int, int, bool]], left: list[int]
    ) -> dict[str, Any]:
        """A request for who begins to read here: as it is when steps in flight have landed.

        left: how many keys may still be written.
        """
        found = []
        for index, seq in here.sequences.items():
            planned, said, joined = later.get(seq, (0, 0, False))
            runs = seq.state is State.RUNNING and not joined
            place = self._sequences[seq], index, seq.planned - planned if runs else 0
            known = len(seq.tokens) - seq.prompt_len - said
            left[0] -= len(seq.keys)
            keys = self._news_of_keys(seq, 0) if left[0] >= 0 else b""
            found.append((*place, known, runs, keys))
        return {**here.facts, "alive": sorted(here.alive), "sequences": found}

    def _facts(self, request: Request, number: int, kept: bool) -> dict[str, Any]:
        parent = None if request.parent is None else self._numbers.get(request.parent)
        facts: dict[str, Any] = {}
        for name, usual in PLAIN.items():
            value = getattr(request, name)
            if value != usual:
                facts[name] = value
        facts |= {name: sha256(getattr(request, name)).digest()[:KEY] for name in _SALTED}
        return facts | {
            "number": number,
            "digest": digest_of(request.id),
            "prompt": len(request.prompt),
            "spoken": [None if one is None else len(one) for one in request.spoken],
            "parent": parent,
            "kept": kept,
            "judged": request.params.prompt_logprobs is not None,
            "tokens": request.prompt if self._prompts else None,
        }

    def _join(self, seq: Seq) -> None:
        request_id = seq.request.id
        number = self._sequences.get(seq)
        if number is None:
            self._joined += 1
            number = self._sequences[seq] = self._joined
            self._here[request_id].sequences[seq.index] = seq
        else:  # it comes behind those who came while it was out
            self._sequences[seq] = self._sequences.pop(seq)
        keys = self._news_of_keys(seq, self._keys.get(seq, 0))
        self._keys[seq] = len(seq.keys)
        if not seq.keys:
            self._keyless[seq] = None
        place = self._numbers[request_id], seq.index
        self._put("j", number, *place, seq.computed, keys)

    def _name_late(self) -> None:
        """Write keys of those who had none when they joined, once their prompts are computed."""
        for seq in [one for one in self._keyless if one.computed >= one.prompt_len]:
            del self._keyless[seq]
            self._keys[seq] = len(seq.keys)
            if seq.keys:
                self._put("k", self._sequences[seq], self._news_of_keys(seq, 0))

    def _news_of_keys(self, seq: Seq, since: int) -> bytes:
        return b"".join([key[:KEY] for key in seq.keys[since:]])

    def _end(self, update: Update) -> tuple[Any, ...]:
        here = self._here.get(update.request_id)
        seq = None if here is None else here.sequences.get(update.index)
        keys = b"" if seq is None else self._news_of_keys(seq, 0)
        place = self._numbers.get(update.request_id, 0), update.index
        return (*place, update.finish, update.whole, update.fault, len(update.token_ids), keys)

    def _said(self, update: Update) -> tuple[int, int, Sequence[int]]:
        return self._numbers.get(update.request_id, 0), update.index, update.token_ids

    # -- who is here ----------------------------------------------------------------------------

    def _leave(self, request_id: str, index: int) -> None:
        here = self._here.get(request_id)
        if here is None:
            return
        self._drop(here.sequences.pop(index, None))
        here.alive.discard(index)
        if not here.alive:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        here = self._here.pop(request_id, None)
        for seq in () if here is None else here.sequences.values():
            self._drop(seq)
        if request_id not in self._held:
            self._numbers.pop(request_id, None)

    def _drop(self, seq: Seq | None) -> None:
        if seq is not None:
            self._sequences.pop(seq, None)
            self._keys.pop(seq, None)
            self._keyless.pop(seq, None)


def digest_of(request_id: str) -> str:
    """What a recording calls a request: who has its id finds it there."""
    return sha256(request_id.encode()).hexdigest()[:12]


def _listed(value: object) -> object:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"a recording has no {type(value).__name__}")
