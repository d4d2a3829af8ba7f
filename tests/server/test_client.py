"""The engine's async client by itself: streams, aborts, deaths, idleness."""

import asyncio
import contextlib
import threading
import time

import pytest

from quire.core.params import SamplingParams
from quire.core.sequence_timing import SequenceTiming
from quire.core.types import Request, StopConditions, TokenLogprobs, Update
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.thread_transport import ThreadTransport
from quire.engine.coalesce_updates import coalesce
from quire.engine.messages import HeartbeatMessage
from quire.errors import EngineDead, Overloaded, Quarantined, RequestError, TooLong
from tests.server.harness import MAX_LEN, Executor, Reciter, make_engine


def request(name, *, n=1, max_tokens=20, prompt=(1, 2, 3)):
    params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, tuple(prompt), StopConditions(max_tokens), params, n=n)


@contextlib.asynccontextmanager
async def started(tokenizer, *, step_s=0.0, on_death=None, **engine):
    executor = Executor(Reciter(tokenizer), step_s)
    transport = ThreadTransport(make_engine(executor, check=True, **engine))
    client = EngineClient(transport, on_death=on_death)
    client.start()
    try:
        yield client, executor
    finally:
        await client.stop()


async def idle(client):
    for _ in range(2000):
        stats = await client.stats()
        if stats.running == stats.waiting == stats.held_blocks == 0:
            return stats
        await asyncio.sleep(0.002)
    raise AssertionError(stats)


def test_every_sequence_of_a_stream_ends_once(tokenizer):
    async def main():
        async with started(tokenizer) as (client, _):
            stream = await client.generate([request("a", n=3), request("b", max_tokens=5)])
            tokens, ends = {}, []
            async for updates in stream:
                for u in updates:
                    tokens.setdefault((u.request_id, u.index), []).extend(u.token_ids)
                    ends += [(u.request_id, u.index)] if u.finish else []
            assert sorted(ends) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
            assert {k: len(v) for k, v in tokens.items()} == {
                ("a", 0): 20,
                ("a", 1): 20,
                ("a", 2): 20,
                ("b", 0): 5,
            }
            stream.close()
            await idle(client)

    asyncio.run(main())


def test_closing_a_stream_early_aborts_its_requests(tokenizer):
    async def main():
        async with started(tokenizer, step_s=0.001) as (client, _):
            stream = await client.generate(
                [request("a", n=4, max_tokens=400), request("b", max_tokens=400)]
            )
            await anext(stream)
            stream.close()
            stream.close()
            assert [batch async for batch in stream] == []
            await idle(client)

    asyncio.run(main())


def test_giving_up_before_the_engine_answered_leaves_nothing(tokenizer):
    async def main():
        async with started(tokenizer, step_s=0.05) as (client, _):
            busy = await client.generate([request("busy", max_tokens=400)])
            waiting = asyncio.create_task(client.generate([request("a", max_tokens=400)]))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            busy.close()
            await idle(client)

    asyncio.run(main())


def test_a_sequence_whose_text_is_complete_ends_alone(tokenizer):
    async def main():
        async with started(tokenizer, step_s=0.001) as (client, executor):
            stream = await client.generate([request("a", n=2, max_tokens=300)])
            await anext(stream)
            stream.end_sequence("a", 0)
            updates = [u async for batch in stream for u in batch]
            assert {u.index for u in updates} == {1}
            assert executor.said < 450  # and not 600: the other one was ended in the engine too
            stream.close()
            await idle(client)

    asyncio.run(main())


def test_a_refused_request_takes_the_others_of_its_stream_with_it(tokenizer):
    async def main():
        async with started(tokenizer, blocks=20) as (client, _):
            with pytest.raises(TooLong):
                await client.generate(
                    [request("a"), request("b", prompt=range(10), max_tokens=MAX_LEN)]
                )
            stats = await idle(client)
            assert stats.prefix_query_tokens == 0  # "a" never ran
            stream = await client.generate([request("a")])
            assert [u async for batch in stream for u in batch]
            stream.close()

    asyncio.run(main())


def test_an_engine_refuses_without_dying(tokenizer):
    async def main():
        async with started(tokenizer) as (client, _):
            with pytest.raises(RequestError):
                await client.generate([Request("a", (1,), StopConditions(1), parent="nobody")])
            assert client.dead_error is None

    asyncio.run(main())


def test_a_failed_step_ends_its_requests_and_no_others(tokenizer, caplog):
    async def main():
        async with started(tokenizer) as (client, executor):
            executor.fail_with = ValueError("a kernel is broken")
            stream = await client.generate([request("a")])
            (update,) = [u async for batch in stream for u in batch]
            assert update.finish == "error"
            assert "a kernel is broken" in update.error
            executor.fail_with = None
            with pytest.raises(Quarantined):
                await client.generate([request("again")])
            good = await client.generate([request("b", prompt=(4, 5))])
            assert sum([len(u.token_ids) async for batch in good for u in batch]) == 20

    asyncio.run(main())


def test_death_reaches_everyone_who_waits_and_everyone_who_comes_later(tokenizer, caplog):
    deaths = []

    async def main():
        async with started(tokenizer, step_s=0.001, on_death=deaths.append) as (client, _):
            streams = [await client.generate([request(f"{i}", max_tokens=400)]) for i in range(5)]
            client.transport.engine.step = lambda: 1 / 0
            for stream in streams:
                with pytest.raises(EngineDead, match="ZeroDivisionError"):
                    async for _ in stream:
                        pass
                stream.close()
            for late in (
                client.generate([request("late")]),
                client.stats(),
                client.reset_prefix_cache(),
            ):
                with pytest.raises(EngineDead):
                    await late
            await client.abort(["late"])
            assert client.dead_error is deaths[0]

    asyncio.run(main())


def test_questions_asked_while_it_dies_are_answered(tokenizer, caplog):
    async def main():
        async with started(tokenizer) as (client, _):
            dying, go = threading.Event(), threading.Event()

            def last_step():
                dying.set()
                go.wait(60)
                raise ValueError("broken")

            client.transport.engine.step = last_step
            first = asyncio.create_task(client.generate([request("a")]))
            await asyncio.to_thread(dying.wait, 10)
            asked = [asyncio.create_task(client.stats()) for _ in range(20)]
            await asyncio.sleep(0)  # they are in the inbox of a thread that will not read it
            go.set()
            answers = await asyncio.wait_for(
                asyncio.gather(first, *asked, return_exceptions=True), 10
            )
            assert all(isinstance(one, EngineDead) for one in answers)

    asyncio.run(main())


def test_stopping_fails_what_is_open(tokenizer):
    async def main():
        async with started(tokenizer, step_s=0.001) as (client, _):
            stream = await client.generate([request("a", max_tokens=400)])
            await client.stop()
            with pytest.raises(EngineDead, match="shut down"):
                async for _ in stream:
                    pass

    asyncio.run(main())


def test_an_idle_engine_takes_no_processor_time(tokenizer):
    async def main():
        async with started(tokenizer) as (client, _):
            stream = await client.generate([request("a")])
            assert [u async for batch in stream for u in batch]
            before = time.process_time()
            await asyncio.sleep(0.3)
            assert time.process_time() - before < 0.05
            assert any(t.name == "quire-engine" for t in threading.enumerate())

    asyncio.run(main())


def test_a_step_makes_one_call_into_the_event_loop(tokenizer):
    async def main():
        async with started(tokenizer) as (client, _):
            calls = []
            real = client.transport._call_soon
            client.transport._call_soon = lambda f, *a: (calls.append(f), real(f, *a))
            stream = await client.generate([request(f"{i}", n=2) for i in range(20)])
            assert sum([len(u.token_ids) async for batch in stream for u in batch]) == 800
            stream.close()
            assert len(calls) < 40  # 20 steps and some for the prompts

    asyncio.run(main())


def test_steps_in_flight_change_nothing(tokenizer):
    async def main(depth):
        async with started(tokenizer, depth=depth) as (client, _):
            stream = await client.generate([request(f"{i}", n=2, prompt=(5, i)) for i in range(6)])
            tokens = {}
            async for updates in stream:
                for u in updates:
                    tokens.setdefault((u.request_id, u.index), []).extend(u.token_ids)
            stream.close()
            await idle(client)
            return tokens

    assert asyncio.run(main(1)) == asyncio.run(main(2))


def test_what_piles_up_is_handed_over_as_one_update_a_sequence(tokenizer):
    async def main():
        async with started(tokenizer) as (client, _):
            stream = await client.generate([request("a", n=2), request("b")])
            await idle(client)  # nobody has read so far
            batches = [batch async for batch in stream]
            assert len(batches) == 1
            sizes = {(u.request_id, u.index): len(u.token_ids) for u in batches[0]}
            assert sizes == {("a", 0): 20, ("a", 1): 20, ("b", 0): 20}
            assert {u.finish for u in batches[0]} == {"length"}

    asyncio.run(main())


def test_merged_updates_say_what_the_single_ones_said():
    first, last = TokenLogprobs([1], [-0.5], [1]), TokenLogprobs([2], [-1.5], [2])
    timing = SequenceTiming(1.0, 2.0, 1.5, *[0.0] * (len(SequenceTiming._fields) - 3))
    updates = [
        Update("a", 0, (1,), None, None, [first], [last], 16, None, timing),
        Update("a", 0, [2], None, None, [last], None, 16),
        Update("a", 0, (), "abort", cached_tokens=16),
    ]
    one = Update("a", 0, [1, 2], "abort", None, [first, last], [last], 16, None, timing)
    assert coalesce(updates) == one
    assert coalesce(updates[1:2]) is updates[1]


class Watcher:
    """An observer that remembers."""

    def __init__(self):
        self.open, self.said, self.ends = [], [], []

    def on_requests_accepted(self, requests):
        self.open += [r.id for r in requests]

    def on_updates(self, updates):
        assert {u.request_id for u in updates} <= set(self.open)
        self.said += updates

    def retain_requests(self, request_ids):
        self.left = sorted(request_ids)

    def on_sequence_ended(self, request_id, index):
        self.ends.append((request_id, index))


def test_an_observer_is_told_of_all_that_passes(tokenizer):
    async def main():
        async with started(tokenizer, step_s=0.001) as (client, _):
            watcher = client.observer = Watcher()
            stream = await client.generate([request("a", n=2), request("b", max_tokens=400)])
            await anext(stream)
            stream.end_sequence("a", 0)
            stream.end_sequence("a", 0)
            with pytest.raises(TooLong):
                await client.generate([request("c", prompt=range(MAX_LEN + 1))])
            while not any(u.finish for u in watcher.said):
                await anext(stream)
            stream.close()
            await idle(client)
            assert watcher.open == ["a", "b"]
            assert watcher.ends == [("a", 0)]
            ends = {(u.request_id, u.index): u.finish for u in watcher.said if u.finish}
            assert ends == {("a", 1): "length", ("b", 0): "abort"}

    asyncio.run(main())


def test_an_idle_engine_gives_signs_of_life(tokenizer, monkeypatch):
    monkeypatch.setattr("quire.engine.client.thread_transport.HEARTBEAT_INTERVAL_S", 0.02)

    async def main():
        async with started(tokenizer) as (client, _):
            for _ in range(3):
                before = client.last_heartbeat_at
                while client.last_heartbeat_at == before:
                    await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_all_who_ask_one_engine_know_that_it_sleeps(tokenizer):
    async def main():
        async with started(tokenizer) as (client, _):
            await client.sleep(1)
            assert client.sleeping_tags
            with pytest.raises(Overloaded):
                await client.generate([request("a")])
            assert not await client.wake_up(["weights"])
            assert await client.wake_up(["kv_cache"])
            assert not client.sleeping_tags
            await client.pause()
            assert "scheduling" in client.sleeping_tags
            await client.wake_up()
            client._deliver(
                HeartbeatMessage(("kv_cache", "scheduling", "weights"))
            )  # another sent it there
            assert client.sleeping_tags
            stream = await client.generate([request("a")])
            assert [u async for batch in stream for u in batch]

    asyncio.run(main())
