"""An engine all of whose requests wait for a grammar sleeps, and wakes at once, wherever it runs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest
import zmq

from quire.core.params import SamplingParams
from quire.core.types import Request, StopConditions
from quire.engine import message_codec
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.thread_transport import ThreadTransport
from quire.engine.client.zmq_transport import engine_address
from quire.engine.core.engine_rpc import EngineRpc
from quire.engine.core.process import EngineCoreProcess
from quire.engine.messages import PROTOCOL_VERSION, AddRequests, Hello, OutputBatch, request_to_wire
from quire.errors import RequestError
from tests.pure.core.builders import FakeGrammars, fake_constraint
from tests.server.harness import Executor, Reciter, make_engine
from tests.server.test_processes import Bell

BEAT_S = 60.0
"""An idle engine looks around no more often here, so that it wakes because it is woken."""


class Turns(FakeGrammars):
    """Counts the steps of its engine."""

    def __init__(self):
        super().__init__()
        self.engine = None
        self.steps = 0
        self.end = "stop"

    def count(self, engine):
        step = engine.step

        def counted():
            self.steps += 1
            return step()

        engine.step = counted

    @contextlib.contextmanager
    def sleeping(self):
        """The engine makes no more steps here than its beat asks for."""
        before = self.steps
        yield
        assert self.steps - before <= 2, "it spins"

    def text(self, constraint, index):
        return "ok"


@pytest.fixture
def engine(tokenizer, monkeypatch):
    monkeypatch.setattr("quire.engine.client.thread_transport.HEARTBEAT_INTERVAL_S", BEAT_S)
    monkeypatch.setattr("quire.engine.core.process.HEARTBEAT_INTERVAL_S", BEAT_S)
    model = Reciter(tokenizer)
    model.bound = grammars = Turns()
    made = make_engine(Executor(model), check=True)
    grammars.count(made)
    return made, grammars


def request(name="a", **constraint):
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    return Request(
        name, (1, 2, 3), StopConditions(5), params, constraint=fake_constraint(1, **constraint)
    )


async def rest(stream):
    return [one async for batch in stream for one in batch]


def test_an_engine_in_a_thread_sleeps_and_is_woken(engine):
    made, grammars = engine

    async def main():
        client = EngineClient(ThreadTransport(made))
        client.start()
        stream = await client.generate([request()])
        await asyncio.sleep(0.05)
        with grammars.sleeping():
            await asyncio.sleep(0.1)
        threading.Thread(target=grammars.tick).start()
        updates = await asyncio.wait_for(rest(stream), BEAT_S / 2)
        assert updates[-1].finish == "stop"
        stream.close()
        await client.stop()

    asyncio.run(main())


def test_a_grammar_that_fails_ends_the_stream_with_the_requests_fault(engine):
    made, grammars = engine

    async def main():
        client = EngineClient(ThreadTransport(made))
        client.start()
        stream = await client.generate([request(fails=True)])
        grammars.tick()
        [update] = await asyncio.wait_for(rest(stream), BEAT_S / 2)
        assert isinstance(update.to_exception(), RequestError)
        stream.close()
        await client.stop()

    asyncio.run(main())


def test_a_client_that_gives_up_while_it_waits_leaves_nothing_behind(engine):
    made, grammars = engine

    async def main():
        client = EngineClient(ThreadTransport(made))
        client.start()
        stream = await client.generate([request()])
        stream.close()
        stats = await client.stats()
        assert (stats.waiting, stats.waiting_for_resources) == (0, 0)
        assert not +grammars.held
        await client.stop()

    asyncio.run(main())


def test_an_engine_in_a_process_sleeps_and_is_woken(engine, tmp_path):
    made, grammars = engine
    starter = Bell()
    server = EngineCoreProcess(EngineRpc(made), str(tmp_path), starter)
    thread = threading.Thread(target=server.run)
    thread.start()
    context = zmq.Context()
    asker = context.socket(zmq.DEALER)
    asker.setsockopt(zmq.RCVTIMEO, int(BEAT_S / 2 * 1000))
    asker.setsockopt(zmq.LINGER, 0)
    asker.connect(engine_address(tmp_path))
    try:
        asker.send(message_codec.encode(Hello(PROTOCOL_VERSION, "test")))
        asker.send(message_codec.encode(AddRequests(1, [request_to_wire(request())])))
        assert news(asker).replies[0].error is None
        with grammars.sleeping():
            time.sleep(0.1)
        grammars.tick()
        assert news(asker).updates[0].request_id == "a"
    finally:
        starter.ring()
        thread.join(60)
        asker.close()
        context.term()
    assert made.stats().waiting_for_resources == 0


def news(asker):
    """The next, past signs of life."""
    while True:
        message = message_codec.decode_from_engine(asker.recv())
        if isinstance(message, OutputBatch):
            return message
