"""What the processes of a server say to each other."""

import asyncio

import pytest

from quire.engine.link import Away, Condemned, Link, RunServer, Stop
from quire.engine.pulse import Phase, Reader, page
from quire.engine.remote import EngineSocket
from quire.server.crew import Heart

PRINT = bytes(range(32))


@pytest.fixture
def ends():
    ours, theirs = Link.pair()
    pair = ours, Link(theirs)
    yield pair
    for one in pair:
        one.close()


def test_a_fingerprint_is_the_same_over_there(ends):
    ours, theirs = ends
    assert ours.offer(Condemned(fingerprint=PRINT))
    assert theirs.receive(5) == Condemned(fingerprint=PRINT)
    orders = RunServer(
        options={},
        folder="",
        index=0,
        count=2,
        sockets=[],
        log_level="INFO",
        condemned=((PRINT, 3.5),),
    )
    ours.send(orders)
    assert theirs.receive(5).condemned == ((PRINT, 3.5),)


def test_who_does_not_read_is_not_waited_for(ends):
    ours, theirs = ends
    with pytest.raises(TimeoutError):
        ours.receive(0.001)  # what it waited for before does not matter
    sent = 0
    while ours.offer(Condemned(fingerprint=PRINT)):
        sent += 1
        assert sent < 10_000
    for _ in range(sent):
        assert theirs.receive(5) == Condemned(fingerprint=PRINT)
    assert ours.offer(Stop())
    assert theirs.receive(5) == Stop()  # no half of a word is between


def test_who_is_gone_is_offered_nothing(ends):
    ours, theirs = ends
    theirs.close()
    assert ours.offer(Stop())


def test_words_that_are_not_of_the_engine_come_to_who_asked_for_them(ends, tmp_path):
    ours, theirs = ends
    heard, away = [], []

    async def main():
        engine = EngineSocket(tmp_path, "test", theirs, on_word=heard.append)
        engine.start(lambda said: None, lambda dead: None, away.append, lambda: None)
        for word in (Condemned(fingerprint=PRINT), Away(why="x", expected_s=1.0), Stop()):
            ours.send(word)
        async with asyncio.timeout(5):
            while len(heard) < 2:
                await asyncio.sleep(0.001)
        await engine.stop()

    asyncio.run(main())
    assert heard == [Condemned(fingerprint=PRINT), Stop()]
    assert [one.why for one in away] == ["x"]


def test_an_api_process_beats_while_its_loop_turns(monkeypatch):
    monkeypatch.setattr("quire.server.crew.BEAT_S", 0.001)
    descriptor = page()
    read = Reader(descriptor).read
    orders = RunServer(
        options={}, folder="", index=0, count=1, sockets=[], log_level="INFO", beat=descriptor
    )
    heart = Heart(orders)
    assert read().phase == Phase.STARTING

    async def main():
        heart.turn()
        for _ in range(3):
            before = read().progress_at
            async with asyncio.timeout(5):
                while read().progress_at == before:
                    await asyncio.sleep(0.001)
        return read()

    beat = asyncio.run(main())
    assert (beat.phase, beat.working) == (Phase.SERVING, 0)
