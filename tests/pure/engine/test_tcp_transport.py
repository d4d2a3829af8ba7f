"""Connections to engines on other machines: what breaks them, and clocks of two machines."""

import asyncio
import gc
import sys
import time

import pytest
import zmq
import zmq.asyncio

from quire.core.sequence_timing import SequenceTiming
from quire.core.types import MediaItem, MediaTensor
from quire.distributed.cluster_secret import ClusterSecret
from quire.engine import message_codec
from quire.engine.client import tcp_transport
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_pool import EnginePool
from quire.engine.client.tcp_transport import TcpTransport
from quire.engine.client.zmq_transport import EngineEvents
from quire.engine.messages import (
    PROTOCOL_VERSION,
    AddRequests,
    CallReply,
    EngineReady,
    Hello,
    OutputBatch,
)
from quire.engine.supervise.process_pipe import (
    EngineRestored,
    EngineUnavailable,
    ProcessPipe,
)
from tests.pure.engine.test_recovery import request, rest, says

SECRET = ClusterSecret(b"a secret of the tests of nodes")


class Engine:
    """An engine's end of a connection: it says what the test says. clock: of its machine."""

    def __init__(self, ahead_s=0.0, secret=SECRET):
        self.context = zmq.asyncio.Context()
        self.authenticator = secret.accept_clients(self.context)
        self.ahead_s = ahead_s
        self.seen, self.frames, self.client = [], [], b""
        self.open()

    def open(self, address="tcp://127.0.0.1:*"):
        self.socket = self.context.socket(zmq.ROUTER)
        SECRET.secure_server(self.socket)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.bind(address)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.task = asyncio.create_task(self._read())

    async def _read(self):
        while True:
            self.client, *frames = await self.socket.recv_multipart()
            message = message_codec.decode_to_engine(frames)
            self.frames.append(frames)
            self.seen.append(message)
            if isinstance(message, Hello):
                self.send(EngineReady(PROTOCOL_VERSION, time.monotonic() + self.ahead_s))
            elif isinstance(message, AddRequests):
                self.send(OutputBatch([], [CallReply(message.call_id)]))

    def send(self, message):
        self.socket.send_multipart((self.client, message_codec.encode(message)), zmq.NOBLOCK)

    def say(self, *updates):
        self.send(OutputBatch(list(updates), []))

    def added(self):
        return [one for m in self.seen if isinstance(m, AddRequests) for one in m.requests]

    def cut(self):
        """Close the connection, as a machine does that is gone."""
        self.task.cancel()
        self.socket.close()

    def end(self):
        self.cut()
        self.authenticator.stop()
        self.context.term()


class Scene:
    """A pool with one engine on another machine, and the pipe of its supervisor."""

    def __init__(self, engine, secret=SECRET):
        self.engine = engine
        ours, theirs = ProcessPipe.create_pair()
        self.supervisor, self.link = ours, ProcessPipe(theirs)
        transport = TcpTransport(engine.address, "api-0", EngineEvents(self.link), 0, secret)
        self.client = EngineClient(transport)
        self.pool = EnginePool([self.client])
        self.losses = []
        told = self.client._on_engine_unavailable
        self.client._on_engine_unavailable = lambda loss: (self.losses.append(loss), told(loss))
        self.pool.start()

    async def end(self):
        await self.pool.stop()
        self.supervisor.close()
        self.link.close()
        self.engine.end()


async def until(true):
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.002)


def run(body, monkeypatch=None, **how):
    async def main():
        scene = Scene(Engine(**how))
        try:
            await body(scene)
        finally:
            await scene.end()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(tcp_transport, "REPORT_WAIT_S", 0.05)
    monkeypatch.setattr(tcp_transport, "RETRY_S", 0.02)


def test_a_broken_connection_loses_and_doubles_nothing():
    async def body(scene):
        engine = scene.engine
        stream = await scene.pool.generate([request("a")])
        engine.say(says("a", 5, 6))
        assert [u.token_ids for u in await anext(stream)] == [[5, 6]]
        engine.say(says("a", 7))
        engine.cut()
        await until(lambda: scene.losses)
        assert scene.losses[0].running_ids == []  # no request is to blame
        engine.open(engine.address)
        await until(lambda: len(engine.added()) == 2)
        (resumed,) = engine.added()[1].resumed_tokens
        assert resumed in ((5, 6), (5, 6, 7))  # it has come, or is computed again
        engine.say(says("a", *(7, 8)[len(resumed) - 2 :], finish="stop"))
        assert [token for u in await rest(stream) for token in u.token_ids] == [7, 8]
        assert scene.pool.restarts == 1

    run(body)


def test_large_tensors_are_sent_again_to_another_engine_and_then_freed():
    data = bytes(range(256)) * 4000
    references = sys.getrefcount(data)

    async def body(scene):
        engine = scene.engine
        tensor = MediaTensor("pixels", "uint8", (len(data),), data)
        given = request("a", media=(MediaItem("image", b"d", 0, 1, ((0, 1),), (tensor,)),))
        stream = await scene.pool.generate([given])
        engine.cut()
        await until(lambda: scene.losses)
        engine.open(engine.address)
        await until(lambda: len(engine.added()) == 2)
        assert [one.media[0].tensors[0].data == data for one in engine.added()] == [True, True]
        assert all(len(frames[0]) < 2000 for frames in engine.frames)
        engine.say(says("a", 8, finish="stop"))
        await rest(stream)

    run(body)
    gc.collect()
    assert sys.getrefcount(data) == references


def test_the_death_that_the_supervisor_reports_has_its_culprits(monkeypatch):
    monkeypatch.setattr(tcp_transport, "REPORT_WAIT_S", 20.0)

    async def body(scene):
        engine = scene.engine
        stream = await scene.pool.generate([request("a")])
        engine.cut()
        death = EngineUnavailable(reason="it was killed", expected_restart_s=1.0, running_ids=["a"])
        scene.supervisor.send(death)
        await until(lambda: scene.losses)
        assert scene.losses == [death]
        engine.open()  # at another port
        scene.supervisor.send(EngineRestored(address=engine.address))
        await until(lambda: len(engine.added()) == 2)
        assert engine.added()[1].engine_crashes == 1
        engine.say(says("a", 8, finish="stop"))
        assert [u.token_ids for u in await rest(stream)][-1] == [8]

    run(body)


@pytest.mark.parametrize("ahead_s", [0.0, -5e5, 5e5])
def test_times_are_those_of_each_machine(ahead_s):
    async def body(scene):
        now, engine = time.monotonic(), scene.engine
        given = request("a", arrived_at=now, deadline_at=now + 9.0)
        stream = await scene.pool.generate([given])
        (found,) = engine.added()
        near = pytest.approx(now + ahead_s, abs=1.0)
        assert found.arrived_at == near
        assert found.deadline_at - found.arrived_at == pytest.approx(9.0, abs=1e-6)
        if not ahead_s:
            assert found.arrived_at == now
        theirs = now + ahead_s
        timing = SequenceTiming.starting_at(theirs)._replace(
            ended_at=theirs + 2, first_token_at=theirs + 1, step_before=(theirs - 1, theirs)
        )
        engine.say(says("a", 8, finish="stop")._replace(timing=timing))
        ((update,),) = [await anext(stream)]
        ours = update.timing
        assert ours.accepted_at == pytest.approx(now, abs=1.0)
        assert ours.total == pytest.approx(2.0, abs=1e-6)
        assert ours.first_token_at - ours.accepted_at == pytest.approx(1.0, abs=1e-6)
        assert ours.step_before[1] == pytest.approx(ours.accepted_at, abs=1e-6)

    run(body, ahead_s=ahead_s)


def test_an_engine_of_another_secret_gets_no_request(monkeypatch):
    monkeypatch.setattr(tcp_transport, "ANSWER_LIMIT_S", 0.2)

    async def main():
        scene = Scene(Engine(), ClusterSecret(b"another secret of others"))
        await until(lambda: scene.losses)
        assert scene.engine.seen == []
        await scene.end()

    asyncio.run(main())
