"""The messages between the processes of a server."""

import asyncio

import pytest

from quire.engine.client.zmq_transport import EngineEvents, ZmqTransport, engine_address
from quire.engine.heartbeat_page import EnginePhase, HeartbeatReader, create_page
from quire.engine.supervise.process_pipe import (
    EngineUnavailable,
    InputBlocked,
    ProcessPipe,
    RunApiProcess,
    StopProcess,
)
from quire.server.process.api_process_monitor import HeartbeatTask

PRINT = bytes(range(32))


@pytest.fixture
def ends():
    ours, theirs = ProcessPipe.create_pair()
    pair = ours, ProcessPipe(theirs)
    yield pair
    for one in pair:
        one.close()


def test_a_fingerprint_is_the_same_over_there(ends):
    ours, theirs = ends
    assert ours.try_send(InputBlocked(fingerprint=PRINT))
    assert theirs.receive(5) == InputBlocked(fingerprint=PRINT)
    orders = RunApiProcess(
        options={},
        folder="",
        index=0,
        count=2,
        socket_fds=[],
        log_level="INFO",
        blocked_inputs=((PRINT, 3.5),),
    )
    ours.send(orders)
    assert theirs.receive(5).blocked_inputs == ((PRINT, 3.5),)


def test_sending_does_not_wait_for_a_reader(ends):
    ours, theirs = ends
    with pytest.raises(TimeoutError):
        ours.receive(0.001)  # what it waited for before does not matter
    sent = 0
    while ours.try_send(InputBlocked(fingerprint=PRINT)):
        sent += 1
        assert sent < 10_000
    for _ in range(sent):
        assert theirs.receive(5) == InputBlocked(fingerprint=PRINT)
    assert ours.try_send(StopProcess())
    assert theirs.receive(5) == StopProcess()  # no half of a word is between


def test_no_grammar_is_offered_to_a_request_that_is_gone(ends):
    ours, theirs = ends
    theirs.close()
    assert ours.try_send(StopProcess())


def test_other_messages_of_the_pipe_reach_on_message(ends, tmp_path):
    ours, theirs = ends
    heard, away = [], []

    async def main():
        engine = ZmqTransport(
            engine_address(tmp_path), "test", EngineEvents(theirs, on_message=heard.append)
        )
        engine.start(lambda said: None, lambda dead: None, away.append, lambda: None)
        for word in (
            InputBlocked(fingerprint=PRINT),
            EngineUnavailable(reason="x", expected_restart_s=1.0),
            StopProcess(),
        ):
            ours.send(word)
        async with asyncio.timeout(60):
            while len(heard) < 2:
                await asyncio.sleep(0.001)
        await engine.stop()

    asyncio.run(main())
    assert heard == [InputBlocked(fingerprint=PRINT), StopProcess()]
    assert [one.reason for one in away] == ["x"]


def test_an_api_process_sends_heartbeats_while_its_loop_runs(monkeypatch):
    monkeypatch.setattr("quire.server.process.api_process_monitor.HEARTBEAT_INTERVAL_S", 0.001)
    descriptor = create_page()
    read = HeartbeatReader(descriptor).read
    orders = RunApiProcess(
        options={},
        folder="",
        index=0,
        count=1,
        socket_fds=[],
        log_level="INFO",
        heartbeat_fd=descriptor,
    )
    heart = HeartbeatTask(orders)
    assert read().phase == EnginePhase.STARTING

    async def main():
        heart.start_on_loop()
        for _ in range(3):
            before = read().progress_at
            async with asyncio.timeout(60):
                while read().progress_at == before:
                    await asyncio.sleep(0.001)
        return read()

    beat = asyncio.run(main())
    assert (beat.phase, beat.working) == (EnginePhase.SERVING, 0)
