"""Adapter store: the names of adapters, and copies of their weights in host memory.

A name means one generation at a time: the content that was read when it was registered. Requests
hold the generation they began with, so a name that is removed or replaced changes none of them.
Copies beyond the capacity are dropped, of those that no request holds; a request for a dropped one
waits until a thread has read it again. Its content must be the same. While requests hold copies up
to the capacity, further ones wait.

A copy counts for the tenant that used it last. Dropped is a copy of the tenant that has most, the
one used longest ago; read next is what a tenant wants that holds fewest. So no tenant can push out
more of another's copies than its own share of the capacity.

All methods are called by the engine's thread; only the reading runs in another.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from quire.core.scheduling.limits.adapters import LoadOutcome
from quire.core.snapshot import AdapterStats
from quire.core.types import AdapterRef
from quire.engine.messages import AdapterCard, AdapterLoad
from quire.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    RequestError,
    UnknownAdapter,
    UnknownModel,
)
from quire.weights.adapters.adapter import Adapter
from quire.weights.adapters.folder import resolve_adapter_folder

log = logging.getLogger(__name__)

ReadAdapter = Callable[[Path], Adapter]
LOAD_THREADS = 2
StartScaling = Callable[[Adapter], Iterator[Adapter | None] | None]
"""Of quire.engine.core.adapter_scaling.AdapterScaling."""
FindFolder = Callable[..., Path]
"""Of quire.weights.adapters.folder.resolve_adapter_folder."""


class ReadResult(NamedTuple):
    """An adapter that was read, and how long that took."""

    folder: Path
    adapter: Adapter
    seconds: float


class AdapterStore:
    """capacity: copies in host memory."""

    def __init__(
        self, read: ReadAdapter, capacity: int, find: FindFolder = resolve_adapter_folder
    ) -> None:
        assert capacity > 0, capacity
        self._read, self._find = read, find
        self._capacity = capacity
        self._names: dict[tuple[bytes, str], AdapterCard] = {}  # by tenant and name
        self._copies: OrderedDict[bytes, Adapter] = OrderedDict()  # the least recently used first
        self._holds: Counter[bytes] = Counter()
        self._users: dict[bytes, bytes] = {}  # of copies, and of what is held: the last tenant
        self._pinned: set[tuple[bytes, str]] = set()  # names
        self._wanted: OrderedDict[bytes, AdapterRef] = OrderedDict()  # held, and not read yet
        self._reading: set[bytes] = set()
        self._read_results: queue.SimpleQueue[tuple[AdapterRef, Adapter | Exception]] = (
            queue.SimpleQueue()
        )
        self._scaling: OrderedDict[bytes, Iterator[Adapter | None]] = OrderedDict()  # of `_reading`
        self._start_scaling: StartScaling = lambda _: None
        self._on_outcome: Callable[[], None] = lambda: None
        self._lock = threading.Lock()  # of counts, which threads that read change
        self._loads, self._load_seconds, self._failures, self._evictions = 0, 0.0, 0, 0
        self._reader = ThreadPoolExecutor(1, "quire-adapters")  # for requests
        # Loads do not hold requests up: a download may take minutes.
        self._loader = ThreadPoolExecutor(LOAD_THREADS, "quire-adapter-loads")

    # -- names ----------------------------------------------------------------------------------

    def card(self, name: str, tenant: bytes = b"") -> AdapterCard | None:
        """Return what a name means now, for all (b"") or for a tenant alone."""
        return self._names.get((tenant, name))

    def find(self, name: str) -> AdapterRef | None:
        """Return the generation that a name means now for all."""
        card = self.card(name)
        return None if card is None else card.ref

    def cards(self) -> list[AdapterCard]:
        """Return what every name means, in the order of registration."""
        return list(self._names.values())

    def start_reading(self, wanted: AdapterLoad) -> Future[ReadResult]:
        """Find and read an adapter in a thread, for register(). Its end is an outcome."""
        future = self._loader.submit(self._find_and_read, wanted)
        future.add_done_callback(lambda _: self._on_outcome())
        return future

    def register(
        self,
        name: str,
        given: str,
        base_model_name: str | None = None,
        found: ReadResult | None = None,
        *,
        tenant: bytes = b"",
    ) -> AdapterRef:
        """Let a name mean an adapter, in place of what it meant. given: a folder, or a name of
        the hub.

        found: what start_reading() has read; None: it is read now. tenant: the only one that may
        use it; b"": all may. Raises RequestError.
        """
        folder, adapter, seconds = found or self._find_and_read(AdapterLoad(name, given))
        digest = bytes.fromhex(adapter.digest)
        before = self._names.pop((tenant, name), None)
        card = AdapterCard(name, digest, str(folder), base_model_name, int(time.time()), tenant)
        self._names[tenant, name] = card
        self._users.setdefault(digest, tenant)
        self._keep(digest, adapter)
        if before is not None:
            self._drop_unnamed(before.digest)
        log.info(
            "adapter %r: rank %d, %d layers, %.1f MB, read in %.3f s from %s",
            name,
            adapter.rank,
            len(adapter.deltas),
            adapter.nbytes / 1e6,
            seconds,
            folder,
        )
        for warning in adapter.warnings:
            log.warning("adapter %r: %s", name, warning)
        return card.ref

    def remove(self, name: str, tenant: bytes = b"") -> bool:
        """Let a name mean nothing any longer. Returns whether it meant something."""
        card = self._names.pop((tenant, name), None)
        self._pinned.discard((tenant, name))
        if card is not None:
            self._drop_unnamed(card.digest)
        return card is not None

    def pin(self, name: str) -> None:
        """Keep a copy of what a name means while it means something. Raises RequestError."""
        card = self.card(name)
        if card is None:
            raise RequestError(f"the adapter {name!r} is not loaded", param="lora_id")
        pinned = self._pinned | {(card.tenant, name)}
        if len(pinned) >= self._capacity:
            raise RequestError(
                f"{len(pinned)} adapters cannot be pinned: host memory holds {self._capacity}, "
                "and others need a place; raise max_cpu_loras",
                param="lora_id",
            )
        self._pinned = pinned
        if card.digest not in self._copies and card.digest not in self._reading:
            self._wanted[card.digest] = card.ref
            self._read_wanted()

    def pinned_digests(self) -> set[bytes]:
        """Return the generations that pinned names mean."""
        return {self._names[key].digest for key in self._pinned}

    # -- copies (AdapterProvider) ---------------------------------------------------------------

    def acquire(self, adapter: AdapterRef, tenant: bytes = b"") -> bool:
        digest = adapter.digest
        self._holds[digest] += 1
        self._users[digest] = tenant
        if digest in self._copies:
            self._copies.move_to_end(digest)
            return True
        if digest not in self._reading:
            self._wanted[digest] = adapter
            self._read_wanted()
        return False

    def release(self, adapter: AdapterRef) -> None:
        digest = adapter.digest
        self._holds[digest] -= 1
        if self._holds[digest]:
            return
        del self._holds[digest]
        self._wanted.pop(digest, None)
        if digest not in self._copies:
            self._users.pop(digest, None)
        self._drop_unnamed(digest)
        self._read_wanted()

    def weights(self, adapter: AdapterRef) -> Adapter:
        self._copies.move_to_end(adapter.digest)
        return self._copies[adapter.digest]

    def stats(self) -> AdapterStats:
        with self._lock:
            loads, seconds, failures = self._loads, self._load_seconds, self._failures
        return AdapterStats(
            names=len(self._names),
            host_copies=len(self._copies),
            loads=loads,
            load_seconds=seconds,
            load_failures=failures,
            evictions=self._evictions,
        )

    @property
    def has_outcomes(self) -> bool:
        return bool(self._scaling) or not self._read_results.empty()

    def outcomes(self) -> Iterator[tuple[bytes, LoadOutcome]]:
        """Also does a piece of the scaling of an adapter, if some wait for that."""
        while not self._read_results.empty():
            ref, result = self._read_results.get()
            self._reading.discard(ref.digest)
            outcome = self._accept(ref, result)
            if ref.digest not in self._scaling:
                yield ref.digest, outcome
        if self._scaling:
            digest, pieces = next(iter(self._scaling.items()))
            ended, outcome = self._scale(digest, pieces)
            if ended:
                yield digest, outcome
        self._read_wanted()

    def set_outcome_callback(self, callback: Callable[[], None]) -> None:
        self._on_outcome = callback

    def set_scaling(self, start: StartScaling) -> None:
        """Let what is read be scaled before requests get it."""
        self._start_scaling = start

    def close(self) -> None:
        """Read no more."""
        for pool in (self._reader, self._loader):
            pool.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert len(self._copies) <= self._capacity, "too many copies"
        assert not self._reading & self._copies.keys(), "a copy is read again"
        assert self._scaling.keys() <= self._reading, "an adapter is scaled that is there"
        for digest in self._holds:
            there = digest in self._copies or digest in self._reading or digest in self._wanted
            assert there, "a held adapter is neither there nor wanted"

    # -- reading --------------------------------------------------------------------------------

    def _accept(self, ref: AdapterRef, result: Adapter | Exception) -> LoadOutcome:
        if isinstance(result, (RequestError, EngineError)):
            return result
        if isinstance(result, Exception):
            return EngineError(f"adapter {ref.name!r} could not be read: {result}")
        if bytes.fromhex(result.digest) != ref.digest:
            message = f"the files of adapter {ref.name!r} have changed since it was loaded"
            return RequestError(f"{message}: load it again (load_inplace)", param="model")
        self._keep(ref.digest, result)
        return None

    def _read_wanted(self) -> None:
        """Read what requests wait for, as far as held copies leave room."""
        while self._wanted and self._num_pinned < self._capacity:
            held = Counter(
                self._users.get(one)
                for one in [*self._copies, *self._reading]
                if one in self._holds
            )
            digest = min(self._wanted, key=lambda one: held[self._users.get(one)])
            ref = self._wanted.pop(digest)
            self._reading.add(digest)
            self._drop_excess(self._capacity - len(self._reading))
            future = self._reader.submit(self._timed_read, Path(ref.folder))
            future.add_done_callback(lambda done, ref=ref: self._finish_read(ref, done))  # type: ignore[misc]

    def _finish_read(self, ref: AdapterRef, done: Future[Adapter]) -> None:
        """In the thread."""
        if done.cancelled():
            return
        error = done.exception()
        if error is not None and not isinstance(error, Exception):
            error = EngineError(f"{type(error).__name__} while an adapter was read")
        self._read_results.put((ref, done.result() if error is None else error))
        self._on_outcome()

    def _find_and_read(self, wanted: AdapterLoad) -> ReadResult:
        allowed = wanted.allowed
        try:
            folder = self._find(
                wanted.given,
                allowed=None if allowed is None else [Path(one) for one in allowed],
                remote=wanted.remote,
                subfolder=wanted.subfolder,
            )
        except UnknownAdapter as error:
            raise UnknownModel(str(error), param="lora_path") from error
        except ConfigError as error:
            raise RequestError(str(error), param="lora_path") from error
        began = time.perf_counter()
        adapter = self._timed_read(folder)
        return ReadResult(folder, adapter, time.perf_counter() - began)

    def _timed_read(self, folder: Path) -> Adapter:
        began = time.perf_counter()
        try:
            adapter = self._read(folder)
        except Exception as error:
            with self._lock:
                self._failures += 1
            if isinstance(error, ConfigError):
                raise RequestError(str(error), param="lora_request") from error
            raise
        seconds = time.perf_counter() - began
        with self._lock:
            self._loads += 1
            self._load_seconds += seconds
        log.debug("%s was read in %.3f s", folder, seconds)
        return adapter

    @property
    def _num_pinned(self) -> int:
        """Copies that cannot be dropped, with those that are being read."""
        pinned = self.pinned_digests()
        kept = sum(1 for one in self._copies if one in self._holds or one in pinned)
        return len(self._reading) + kept

    def _keep(self, digest: bytes, adapter: Adapter) -> None:
        """Keep a copy if there is room. Requests that wait for it wait no longer then."""
        if digest in self._copies or digest in self._reading or self._num_pinned >= self._capacity:
            return
        self._drop_excess(self._capacity - len(self._reading) - 1)
        pieces = self._start_scaling(adapter)
        if pieces is not None:
            self._reading.add(digest)
            self._scaling[digest] = pieces
            self._wanted.pop(digest, None)
            self._on_outcome()
            return
        self._copies[digest] = adapter
        if (ref := self._wanted.pop(digest, None)) is not None:
            self._read_results.put((ref, adapter))
            self._on_outcome()

    def _scale(self, digest: bytes, pieces: Iterator[Adapter | None]) -> tuple[bool, LoadOutcome]:
        """Do the next piece. Returns whether it was the last, and its outcome then."""
        outcome: LoadOutcome = None
        try:
            scaled = next(pieces)
        except EngineDead:
            raise
        except Exception as error:  # noqa: BLE001 - it ends the wait of the adapter's requests
            outcome = EngineError(f"an adapter could not be scaled: {error}")
        else:
            if scaled is None:
                return False, None
            self._copies[digest] = scaled
        del self._scaling[digest]
        self._reading.discard(digest)
        self._drop_unnamed(digest)
        return True, outcome

    def _drop_excess(self, most: int) -> None:
        """Drop copies until there are at most so many, or the others are kept."""
        pinned = self.pinned_digests()
        while len(self._copies) > most:
            loose = [one for one in self._copies if one not in self._holds and one not in pinned]
            if not loose:
                return
            copies = Counter(self._users.get(one) for one in self._copies)
            digest = max(loose, key=lambda one: copies[self._users.get(one)])  # of those the oldest
            del self._copies[digest]
            self._users.pop(digest, None)
            self._evictions += 1

    def _drop_unnamed(self, digest: bytes) -> None:
        """Drop a copy that no name means and no request holds."""
        if digest not in self._holds and all(r.digest != digest for r in self._names.values()):
            self._copies.pop(digest, None)
            self._users.pop(digest, None)
