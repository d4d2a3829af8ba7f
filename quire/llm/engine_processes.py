"""Engines in processes of their own: connections for AsyncLLM, and several engines for LLM.

LLM has one engine in its own process and steps it. Several engines step themselves; to LLM they
look like one (`PooledEngines`), whose step() waits for what any of them has computed.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from quire.config.data_parallel import check_one_server
from quire.config.engine_config import EngineConfig
from quire.config.options import Options
from quire.core.snapshot import Snapshot
from quire.core.types import AdapterRef, Request, Update
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_pool import EnginePool
from quire.engine.client.stream import RequestStream
from quire.engine.client.zmq_transport import EngineEvents, ZmqTransport
from quire.engine.messages import AdapterCard, AdapterLoad
from quire.engine.startup.text_setup import build_input_processor, load_engine_tokenizer
from quire.engine.supervise.engine_group_thread import EngineGroupThread
from quire.errors import EngineCrashed, EngineDead, Quarantined, RequestError, Unsupported
from quire.text.input_processor import InputProcessor
from quire.text.tokenizing.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")

STEP_WAIT_S = 0.05
"""A step without outputs ends after so many seconds, so that Ctrl-C is noticed."""
QUEUED_STEPS = 2
"""Engines are sent so many times the sequences that they run at once; others are placed later, when
it is known which engine has less to do."""


class PoolConnector:
    """Makes a new pool of connections to the engines each time it is called."""

    def __init__(self, engines: EngineGroupThread, config: EngineConfig) -> None:
        self._engines, self._config = engines, config
        self._numbers = itertools.count()

    def __call__(self) -> EnginePool:
        name, config = f"llm-{next(self._numbers)}", self._config
        events = EngineEvents(self._engines.pipe)
        clients = []
        for index, address in enumerate(self._engines.addresses):
            client = EngineClient(ZmqTransport(address, name, events, index))
            client.restart_wait_s = config.recovery.wait_s
            clients.append(client)
        return EnginePool(clients, cache_tokens=config.cache.num_blocks * config.cache.block_size)


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """Engines that are ready, and the text side in this process."""

    config: EngineConfig
    tokenizer: Tokenizer | None
    connect: PoolConnector
    engines: EngineGroupThread

    @classmethod
    def start(cls, options: Options, *, log_level: str) -> EngineProcesses:
        """Start the engines that the options describe. Raises ConfigError, NoRoom, EngineDead."""
        check_one_server(options, "this program")
        engines = EngineGroupThread.for_options(options, log_level=log_level)
        try:
            found = engines.wait_model_located()
            folder = None if found.tokenizer_folder is None else Path(found.tokenizer_folder)
            tokenizer = load_engine_tokenizer(found.config, folder)
            config = engines.wait_started().config
        except BaseException:
            engines.stop()
            raise
        return cls(config, tokenizer, PoolConnector(engines, config), engines)


class PooledBundle:
    """Several engines for LLM, with the attributes of EngineBundle that LLM reads."""

    def __init__(self, started: EngineProcesses) -> None:
        self.config, self.tokenizer = started.config, started.tokenizer
        self.engine = PooledEngines(started)
        self.input_processor: InputProcessor = build_input_processor(self.config, self.tokenizer)
        self.adapters = None if self.config.adapters is None else PooledAdapters(self.engine)
        self.seconds: dict[str, float] = {}


class PooledEngines:
    """Several engines, with the methods of EngineCore that LLM calls. One thread calls them.

    Another thread runs the event loop of the pool. Requests are placed when engines have room.
    """

    idle = False

    def __init__(self, started: EngineProcesses) -> None:
        config = started.config
        self._limit = QUEUED_STEPS * config.scheduler.max_num_seqs * config.parallel.engines
        self._numbers = itertools.count()
        self._updates: queue.SimpleQueue[list[Update] | Exception] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, Request]] = []  # a heap: by priority, then in order
        self._unfinished: set[str] = set()  # ids
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of the event loop, by request
        self._streams: dict[str, RequestStream] = {}  # as well
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="quire-pool", daemon=True
        )
        self._thread.start()
        self._pool = self.run(_connect(started.connect))
        weakref.finalize(self, _stop, self._pool, self._loop, self._thread, started.engines)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the pool's event loop. Raises what it raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def pool(self) -> EnginePool:
        """The engines, for coroutines that run() runs."""
        return self._pool

    # -- as EngineCore --------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """Whether there are no requests."""
        return not self._unfinished

    def add(self, request: Request) -> None:
        """Queue a request. What an engine refuses ends with an update that has the error."""
        if request.params.logits_processors:
            raise Unsupported(
                "logits_processors that are functions need one engine: data_parallel_size=1",
                param="logits_processors",
            )
        with self._lock:
            heapq.heappush(self._waiting, (request.priority, next(self._numbers), request))
        self._unfinished.add(request.id)

    def abort(self, request_id: str) -> None:
        """End a request now. Unknown ids are ignored."""
        self._unfinished.discard(request_id)
        self._soon(self._cancel, request_id)

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one sequence: its text is complete. No update follows."""
        self._soon(self._end_sequence, request_id, index)

    def release(self, request_id: str) -> None:
        """Release the blocks of a request that has hold=True."""
        self._fill()  # its children first: they need the blocks
        self._soon(lambda: self._loop.create_task(self._pool.abort([request_id])))

    def step(self) -> list[Update]:
        """Wait for outputs, for a short time. Raises EngineDead if no engine is left."""
        self._fill()
        updates: list[Update] = []
        with suppress(queue.Empty):
            found = self._updates.get(timeout=STEP_WAIT_S)
            while True:
                if isinstance(found, Exception):
                    raise found
                updates += found
                found = self._updates.get_nowait()
        return updates

    def wait(self, seconds: float) -> None:
        """Nothing: step() waits."""

    def drain(self) -> None:
        """Nothing: engines apply their steps themselves."""

    def apply_model(self, function: Callable[[Any], Any]) -> NoReturn:
        """Raise Unsupported: no code is sent to other processes."""
        raise Unsupported(
            "the models of several engines are in other processes, which take no functions: use "
            "data_parallel_size=1"
        )

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix caches. Returns False if blocks are in use."""
        return self.run(self._pool.reset_prefix_cache())

    def reset_encoder_cache(self) -> None:
        """Forget what encoders made of images, video and audio."""
        self.run(self._pool.reset_encoder_cache())

    def release_kv_memory(self) -> bool:
        """Empty the prefix caches and free the KV memory until the next request."""
        self.run(self._pool.sleep(1, "abort"))
        return self.run(self._pool.wake_up())

    def snapshots(self) -> list[Snapshot]:
        """The state of each engine that lives."""
        return self.run(self._pool.call_each(Snapshot, "snapshot", 0, False))

    # -- on the event loop ----------------------------------------------------------------------

    def _soon(self, function: Callable[..., object], *args: object) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def _fill(self) -> None:
        if self._waiting:
            self._soon(self._start_waiting)

    def _start_waiting(self) -> None:
        while self._waiting and len(self._tasks) < self._limit:
            with self._lock:
                request = heapq.heappop(self._waiting)[-1]
            if request.id in self._unfinished:
                self._tasks[request.id] = self._loop.create_task(self._generate(request))

    async def _generate(self, request: Request) -> None:
        """Run a request to its end."""
        try:
            stream = await self._pool.generate([request])
            assert isinstance(stream, RequestStream)  # of one request
            self._streams[request.id] = stream
            async for updates in stream:
                self._updates.put(updates)
        except (RequestError, EngineCrashed, Quarantined) as error:
            fault = "request" if isinstance(error, RequestError) else "engine"
            param = error.param if isinstance(error, RequestError) else None
            self._updates.put(
                [
                    Update(request.id, i, (), "error", error=str(error), fault=fault, param=param)  # type: ignore[arg-type]
                    for i in range(request.n)
                ]
            )
        except Exception as error:  # noqa: BLE001 - a border: step() raises it
            self._updates.put(error)
        finally:
            self._close(request.id)
            self._start_waiting()

    def _close(self, request_id: str) -> None:
        self._tasks.pop(request_id, None)
        self._unfinished.discard(request_id)
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.close()

    def _cancel(self, request_id: str) -> None:
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    def _end_sequence(self, request_id: str, index: int) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.end_sequence(request_id, index)
            if not stream.unfinished_ids:
                stream.close()  # which ends _generate()


async def _connect(connect: PoolConnector) -> EnginePool:
    pool = connect()
    pool.start()
    return pool


def _stop(
    pool: EnginePool,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    engines: EngineGroupThread,
) -> None:
    async def end() -> None:
        pool.fail_streams(EngineDead("the engines were shut down"))
        await pool.stop()

    asyncio.run_coroutine_threadsafe(end(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    engines.stop()


class PooledAdapters:
    """Adapters of several engines, with the methods of AdapterStore that LLM calls."""

    def __init__(self, engines: PooledEngines) -> None:
        self._engines = engines
        self._refs: dict[str, AdapterRef] = {}

    def find(self, name: str) -> AdapterRef | None:
        """Return the adapter that a name means."""
        if name not in self._refs:
            call = self._engines.pool.call(list[AdapterCard], "adapters")
            cards = self._engines.run(call)  # of the start
            self._refs.update({one.name: one.ref for one in cards if one.name == name})
        return self._refs.get(name)

    def register(self, name: str, given: str, base_model_name: str | None = None) -> AdapterRef:
        """Load an adapter in all engines. Raises RequestError."""
        wanted = AdapterLoad(name, given, base_model_name, if_loaded="replace")
        call = self._engines.pool.call(AdapterCard, "load_adapter", *wanted)
        self._refs[name] = self._engines.run(call).ref
        return self._refs[name]

    def remove(self, name: str) -> bool:
        """Unload an adapter. Returns whether it was loaded."""
        found = self._refs.pop(name, None)
        if found is not None:
            self._engines.run(self._engines.pool.call(bool, "unload_adapter", name))
        return found is not None

    def pin(self, name: str) -> None:
        """Keep an adapter in host memory of all engines. Raises RequestError."""
        self._engines.run(self._engines.pool.call(type(None), "pin_adapter", name))
