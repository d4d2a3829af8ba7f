"""What an engine's loop does when its own books raise: it ends, and streams go on with the next.
And what it does when its steps raise: it makes them again.

As in a server (tests.server.test_blame), but for the processes: an engine is a thread here, so a
death costs nothing and each hook can raise at many calls.
"""

import asyncio
import shutil
import socket
import tempfile
import threading
from collections import deque
from contextlib import closing

import pytest

from quire.engine.client import zmq_transport
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.zmq_transport import EngineEvents, ZmqTransport, engine_address
from quire.engine.core import running_list_shm
from quire.engine.core.engine_rpc import EngineRpc
from quire.engine.core.process import EngineCoreProcess
from quire.engine.supervise.process_pipe import EngineRestored, EngineUnavailable, ProcessPipe
from quire.errors import EngineDead
from quire.executors.fake import Executor
from tests import tiers
from tests.cpu import engine_of as embedded
from tests.faults import arming
from tests.faults.arming import Fault
from tests.pure.engine.test_engine_core import engine_over, next_token, request

BOOKS = ("obey", "plan", "grow", "planned", "apply", "landed", "turn", "route", "send")
STEPS = ("submit", "inputs", "gather", "launch", "leave", "tables", "compute", "forward")
STEPS += ("recipe", "sample", "prompt_logprobs", "result")
ROUNDS = tiers.amount(6, 12)
"""Calls of a hook that raise, each in a run of its own."""


def requests():
    """One says twice, one needs several blocks and steps for its prompt, one ends early."""
    return [
        request("one", max_tokens=12),
        request("two", (4, 5), 9, n=2),
        request("three", range(6, 46), 12),
        request("four", max_tokens=3),
    ]


class Starter:
    """In place of who started the process of an engine."""

    def __init__(self):
        self.wakeup_socket, self.bell = socket.socketpair()
        self.wakeup_socket.setblocking(False)
        self.gone_clients = deque()
        self.stop_requested = False

    def clear(self):
        pass

    def stop(self):
        self.stop_requested = True
        self.bell.send(b"!")

    def close(self):
        self.wakeup_socket.close()
        self.bell.close()


class Engines(threading.Thread):
    """One after the other, each in a folder of its own, until stop(). Tells over `link`."""

    def __init__(self):
        super().__init__()
        self.starter = Starter()
        self.link, theirs = ProcessPipe.create_pair()
        self._mouth = ProcessPipe(theirs)
        self._page = running_list_shm.create_running_list()
        self.folders = [tempfile.mkdtemp(prefix="quire-")]
        self._server = self._made()
        self.start()

    def _made(self):
        engine = engine_over(Executor(next_token), depth=2)
        engine.set_running_callback(running_list_shm.RunningListWriter(self._page.fileno()).write)
        return EngineCoreProcess(EngineRpc(engine), self.folders[-1], self.starter)

    def run(self):
        while self._server.run():
            names = running_list_shm.read_running_list(self._page)
            self._mouth.send(
                EngineUnavailable(
                    reason=self._server.death_reason, expected_restart_s=1.0, running_ids=names
                )
            )
            self.folders.append(tempfile.mkdtemp(prefix="quire-"))
            self._server = self._made()
            self._mouth.send(EngineRestored(address=engine_address(self.folders[-1])))

    def close(self):
        self.starter.stop()
        self.join()
        for one in (self.link, self._mouth, self.starter, self._page):
            one.close()
        for folder in self.folders:
            shutil.rmtree(folder)


async def said(engines, messages):
    """What each sequence said, and how it ended. messages: the requests that each carries."""
    client = EngineClient(
        ZmqTransport(engine_address(engines.folders[0]), "api", EngineEvents(engines.link))
    )
    client.start()
    found = {}

    async def listen(message):
        stream = await client.generate(message)
        async for updates in stream:
            for update in updates:
                tokens, ends = found.setdefault((update.request_id, update.index), ([], []))
                tokens.extend(update.token_ids)
                ends.extend([update.finish] if update.finish else ())

    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*map(listen, messages))
    finally:
        await client.stop()
    return found


def listened(messages=None):
    """What was said, and how many engines there were. messages: one for each request."""
    messages = messages or [[one] for one in requests()]
    with closing(Engines()) as engines:
        return asyncio.run(said(engines, messages)), len(engines.folders)


@pytest.fixture(scope="module")
def undisturbed():
    """What is said, and how often each hook is called at least: with all requests in one message.

    Requests that come one after the other share fewer steps, so how many there are depends on time.
    """
    with arming.here() as faults:
        faults.arm(*(Fault(name, "count") for name in BOOKS))
        found, engines = listened([requests()])
        calls = dict(zip(BOOKS, faults.calls)) | {"obey": len(requests())}
    assert engines == 1
    assert listened() == (found, 1)
    assert {tuple(ends) for _, ends in found.values()} == {("length",)}
    return found, calls


def spread(most, times):
    """So many calls at which to raise, of these: the first, the last, and between."""
    return sorted({1 + (most - 1) * i // (times - 1) for i in range(times)})


@pytest.mark.parametrize("hook", BOOKS)
def test_streams_say_the_same_wherever_the_books_of_their_engine_break(undisturbed, hook):
    want, calls = undisturbed
    for at in spread(calls[hook] * 3 // 4, ROUNDS):  # later ones may come when all is said
        with arming.here() as faults:
            faults.arm(Fault(hook, at=at))
            found, engines = listened()
            assert faults.fired == 1, (hook, at)
            assert (found, engines) == (want, 2), (hook, at)


def test_an_engine_of_another_version_is_no_death_that_another_engine_mends(monkeypatch):
    monkeypatch.setattr(zmq_transport, "PROTOCOL_VERSION", -1)
    with pytest.raises(EngineDead, match="two versions of quire are mixed"):
        listened()


def made(*faults):
    """What a model says while these happen, and what it thinks of a prompt; how often each did."""
    wanted = [
        embedded.request("one", [1, 2, 3], 20, frequency_penalty=0.5),
        embedded.request("two", [4, 5], 9, n=2, seed=5, logprobs=1),
        embedded.request("three", range(6, 46), 12, temperature=1.0, seed=9),
        embedded.request("four", [1, 2, 3], 3, prompt_logprobs=1),
    ]
    with arming.here() as armed:
        armed.arm(*faults)
        said, updates = embedded.run(embedded.engine_of(depth=2), wanted)
        fired, calls = armed.fired, armed.calls
    assert {one.finish for one in updates} == {None, "length"}
    return (said, [one.prompt_logprobs for one in updates if one.prompt_logprobs]), fired, calls


@pytest.fixture(scope="module")
def untroubled():
    """What is said, and how often each hook is called meanwhile."""
    found, _, calls = made(*(Fault(name, "count") for name in STEPS))
    return found, dict(zip(STEPS, calls))


@pytest.mark.parametrize("hook", STEPS)
def test_requests_say_the_same_whichever_step_raises_wherever(untroubled, hook):
    want, calls = untroubled
    for at in spread(calls[hook], tiers.amount(2, 5)):
        found, fired, _ = made(Fault(hook, at=at))
        assert (found, fired) == (want, 1), at
