"""A pool of engines: where requests run, and what happens to streams when engines die."""

import asyncio

import pytest

from quire.core.scheduler_stats import EngineLoad
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_pool import EnginePool
from quire.engine.messages import (
    AbortRequests,
    AddRequests,
    CallReply,
    OutputBatch,
    UtilityCall,
    error_to_wire,
)
from quire.errors import EngineAway, EngineDead, RequestError
from tests.pure.engine.test_recovery import Watcher, Wire, another, request, rest, says, soon


def run(body, engines=3):
    async def main():
        wires = [Wire() for _ in range(engines)]
        dead = []
        pool = EnginePool([EngineClient(wire) for wire in wires], on_death=dead.append)
        pool.start()
        await body(pool, wires)
        await pool.stop()
        return dead

    return asyncio.run(main())


def wire_of(wires, name):
    (found,) = [wire for wire in wires if name in [one.id for one in wire.added()]]
    return found


async def opened(pool, wires, *requests):
    task = asyncio.create_task(pool.generate(requests))
    await soon()
    wire = wire_of(wires, requests[0].id)
    wire.accept()
    return await task, wire


def test_requests_are_spread_over_engines():
    async def body(pool, wires):
        for i in range(6):
            await opened(pool, wires, request(f"r{i}"))
        assert [len(wire.added()) for wire in wires] == [2, 2, 2]

    run(body)


def test_an_engine_with_less_to_do_gets_the_request():
    async def body(pool, wires):
        for wire, queued in zip(wires, (500, 100, 900)):
            wire.deliver(OutputBatch([], [], EngineLoad(queued, 1)))
        _, wire = await opened(pool, wires, request("a"))
        assert wire is wires[1]

    run(body)


def test_another_engine_continues_the_streams_of_a_dead_one():
    async def body(pool, wires):
        pool.observer = watcher = Watcher()
        stream, first = await opened(pool, wires, request("a", n=2))
        other, second = await opened(pool, wires, another("b"))
        first.say(says("a", 5, 6), says("a", 7, index=1, finish="stop"))
        first.lose(aboard=["a"])
        heir = wire_of(wires, "a")
        assert heir is not first
        (again,) = [one for one in heir.added() if one.id == "a"]
        assert (again.resumed_tokens, again.engine_crashes) == (((5, 6), None), 1)
        assert watcher.kept == ["a", "b"]
        heir.say(says("a", 8, finish="stop"))
        told = await rest(stream)
        assert [u.token_ids for u in told if u[:2] == ("a", 0)] == [[5, 6, 8]]
        first.back()
        assert first.added() == []
        second.say(says("b", 1, finish="stop"))
        assert [u.token_ids for u in await rest(other)] == [[1]]
        assert pool.restarts == 1

    run(body)


def test_a_closed_stream_is_aborted_where_it_is():
    async def body(pool, wires):
        stream, first = await opened(pool, wires, request("a"))
        first.lose()
        heir = wire_of(wires, "a")
        stream.close()
        assert heir.sent[-1] == AbortRequests(["a"])
        assert first.sent == []
        assert not pool.request_ids()

    run(body)


def test_a_request_that_was_not_accepted_is_sent_to_another_engine():
    async def body(pool, wires):
        task = asyncio.create_task(pool.generate([request("a"), request("b")]))
        await soon()
        second = wire_of(wires, "b")
        second.accept()
        first = wire_of(wires, "a")
        first.lose()
        await soon()
        heir = wire_of([wire for wire in wires if wire is not first], "a")
        heir.accept()
        stream = await task
        heir.say(says("a", 1, finish="stop"))
        second.say(says("b", 2, finish="stop"))
        assert len(await rest(stream)) == 2

    run(body)


def test_a_refusal_is_the_answer():
    async def body(pool, wires):
        task = asyncio.create_task(pool.generate([request("a")]))
        await soon()
        wire = wire_of(wires, "a")
        (number,) = [m.call_id for m in wire.sent if isinstance(m, AddRequests)]
        wire.say(answers=[CallReply(number, error=error_to_wire(RequestError("no")))])
        with pytest.raises(RequestError, match="no"):
            await task
        assert sum(len(one.added()) for one in wires) == 1

    run(body)


def test_without_another_engine_streams_wait_for_the_next():
    async def body(pool, wires):
        stream, _ = await opened(pool, wires, request("a"))
        for wire in wires:
            wire.lose(aboard=[])
        assert pool.restart_reason == "it was killed"
        waiting = asyncio.create_task(pool.generate([another("b")]))
        await soon()
        (last,) = {wire for wire in wires if "a" in wire_streams(pool, wires, wire)}
        for wire in wires:
            wire.back()
        await soon()
        assert last.added()[0].id == "a"
        wire_of(wires, "b").accept()
        await waiting
        last.say(says("a", 4, finish="stop"))
        assert [u.token_ids for u in await rest(stream)] == [[4]]

    run(body)


def wire_streams(pool, wires, wire):
    return list(pool.clients[wires.index(wire)].request_ids())


def test_a_culprit_ends_and_is_blocked_everywhere():
    async def body(pool, wires):
        blocked = []
        pool.on_input_blocked = blocked.append
        stream, wire = await opened(pool, wires, request("a"))
        for _ in range(2):
            wire.lose(aboard=["a"])
            left = [one for one in wires if "a" in [r.id for r in one.added()]]
            wire = left[0] if left else wire
        with pytest.raises(Exception, match="the engine died twice"):
            await rest(stream)
        assert len(blocked) == 1
        with pytest.raises(Exception, match="is not tried again"):
            await pool.generate([request("again")])

    run(body)


def test_the_pool_lives_as_long_as_an_engine_does():
    async def body(pool, wires):
        stream, first = await opened(pool, wires, request("a"))
        first.die(EngineDead("no memory"))
        heir = wire_of([one for one in wires if one is not first], "a")
        assert pool.dead_error is None
        for wire in wires:
            if wire not in (first, heir):
                wire.die(EngineDead("nor here"))
        heir.say(says("a", 4, finish="stop"))
        assert [u.token_ids for u in await rest(stream)] == [[4]]
        heir.die(EngineDead("the last"))
        assert pool.dead_error is not None
        with pytest.raises(EngineDead):
            await pool.generate([request("b")])

    assert [str(one) for one in run(body)] == ["the last"]


def test_a_request_with_a_parent_goes_where_the_parent_is():
    async def body(pool, wires):
        _, wire = await opened(pool, wires, request("a", hold=True))
        for i in range(5):
            _, same = await opened(pool, wires, request(f"b{i}", parent="a"))
            assert same is wire
        wire.say(says("a", 1, finish="stop"))
        wire.lose()
        _, other = await opened(pool, wires, request("c", parent="a"))
        assert other is not wire
        assert other.added()[-1].parent is None

    run(body)


def test_a_request_waits_for_one_engine_only_if_none_answers():
    async def body(pool, wires):
        for wire in wires:
            wire.lose(aboard=[])
        waits = []
        for client in pool.clients:
            client.restart_wait_s = 0.01
            real = client._restart.wait
            client._restart.wait = lambda n, limit, real=real: waits.append(n) or real(n, limit)
        with pytest.raises(EngineAway):
            await pool.generate([request("a")])
        assert waits == [1]
        assert not pool.request_ids()

    run(body)


def test_requests_are_cancelled_while_an_engine_is_away():
    async def body(pool, wires):
        stream, first = await opened(pool, wires, request("cmpl-1-0"))
        first.say(says("cmpl-1-0", 4))
        first.lose(aboard=[])
        assert not pool.clients[wires.index(first)]._prior_timings
        heir = wire_of(wires, "cmpl-1-0")
        task = asyncio.create_task(pool.abort_named(["cmpl-1"]))
        for wire in wires:
            await soon()
            for call in [m for m in wire.sent if isinstance(m, UtilityCall)]:
                wire.say(answers=[CallReply(call.call_id, int(wire is heir))])
        await soon()
        assert await task == 1
        stream.close()

    run(body)


def test_calls_reach_every_engine():
    async def body(pool, wires):
        task = asyncio.create_task(pool.sleep(1))
        await soon()
        for wire in wires:
            (call,) = wire.sent
            assert isinstance(call, UtilityCall)
            wire.say(answers=[CallReply(call.call_id, ["kv_cache"])])
        await task
        assert pool.is_sleeping
        wires[0].lose()
        with pytest.raises(EngineAway):
            await pool.reset_prefix_cache()

    run(body)


def test_requests_of_one_call_are_spread_and_read_as_one_stream():
    async def body(pool, wires):
        task = asyncio.create_task(pool.generate([request("a"), another("b"), another("c")]))
        await soon()
        assert [len(wire.added()) for wire in wires] == [1, 1, 1]
        for wire in wires:
            wire.accept()
        stream = await task
        assert stream.request_ids == ("a", "b", "c")
        for name in "cab":
            wire_of(wires, name).say(says(name, 1), says(name, 2, finish="stop"))
        told = await rest(stream)
        assert sorted((u.request_id, tuple(u.token_ids)) for u in told) == [
            (name, (1, 2)) for name in "abc"
        ]

    run(body)


def test_none_of_a_spread_call_runs_if_one_is_refused():
    async def body(pool, wires):
        task = asyncio.create_task(pool.generate([request("a"), another("b"), another("c")]))
        await soon()
        for name in "ac":
            wire_of(wires, name).accept()
        wire = wire_of(wires, "b")
        (number,) = [m.call_id for m in wire.sent if isinstance(m, AddRequests)]
        wire.say(answers=[CallReply(number, error=error_to_wire(RequestError("no")))])
        with pytest.raises(RequestError, match="no"):
            await task
        for name in "ac":
            assert wire_of(wires, name).sent[-1] == AbortRequests([name])
        assert not pool.request_ids()

    run(body)


def test_a_spread_call_that_is_cancelled_leaves_nothing():
    async def body(pool, wires):
        task = asyncio.create_task(pool.generate([request("a"), another("b")]))
        await soon()
        wire_of(wires, "a").accept()
        await soon()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for name in "ab":
            assert wire_of(wires, name).sent[-1] == AbortRequests([name])
        assert not pool.request_ids()

    run(body)


def test_a_rank_pins_requests():
    async def body(pool, wires):
        for i in range(3):
            task = asyncio.create_task(pool.generate([request(f"r{i}"), another(f"s{i}")], 2))
            await soon()
            wires[2].accept()
            await task
        assert len(wires[2].added()) == 6
        with pytest.raises(RequestError, match=r"must be in \[0, 2\], got 3"):
            await pool.generate([request("x")], 3)

    run(body)


def test_streams_of_a_drained_engine_move_and_lose_nothing():
    async def body(pool, wires):
        pool.observer = watcher = Watcher()
        published = []
        pool.on_draining = lambda *given: published.append(given)
        stream, first = await opened(pool, wires, request("a", n=2))
        first.say(says("a", 5, 6), says("a", 7, index=1, finish="stop"))
        engine = wires.index(first)
        pool.drain(engine, 0.0)
        await soon()
        heir = wire_of([wire for wire in wires if wire is not first], "a")
        (again,) = [one for one in heir.added() if one.id == "a"]
        assert (again.resumed_tokens, again.engine_crashes) == (((5, 6), None), 0)
        assert first.sent[-1] == AbortRequests(["a"])
        first.say(says("a", 8), says("a", finish="abort"))  # it had gone on meanwhile
        heir.say(says("a", 8, finish="stop"))
        told = await rest(stream)
        assert [u.token_ids for u in told if u[:2] == ("a", 0)] == [[5, 6, 8]]
        assert [u.finish for u in watcher.said if u.finish] == ["stop", "stop"]
        for i in range(4):
            await opened(pool, [wire for wire in wires if wire is not first], request(f"r{i}"))
        assert len(first.added()) == 1
        pool.drain(engine, None)
        assert published == [(engine, 0.0), (engine, None)]

    run(body)


def test_the_last_engine_cannot_be_drained_of_its_streams():
    async def body(pool, wires):
        stream, wire = await opened(pool, wires, request("a"))
        for engine in range(3):
            pool.set_draining(engine, 0.0)
        await soon()
        assert len(wire.added()) == 1
        await opened(pool, wires, another("b"))
        wire.say(says("a", 8, finish="stop"))
        assert [u.token_ids for u in await rest(stream)] == [[8]]

    run(body)
