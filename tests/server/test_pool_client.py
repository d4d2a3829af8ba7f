"""Pooling requests through the engine's client: order, failures, aborts, and an engine that dies."""

import asyncio
import contextlib
import signal
from array import array
from dataclasses import replace

import psutil
import pytest
from numpy import frombuffer

from quire.core.types import Pooling, Request, StopConditions
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_pool import EnginePool
from quire.engine.client.pooling import pool
from quire.engine.client.thread_transport import ThreadTransport
from quire.engine.core.engine_core import EngineCore
from quire.errors import EngineError, TooLong
from quire.executors.fake import Executor
from quire.llm import async_llm
from tests.pure.core.workload import Setup

LAST = Pooling("embed")


def pooled(name, prompt=(1, 2, 3)):
    prompt = tuple(prompt)
    return Request(name, prompt, StopConditions(1), pooling=LAST, read_prefix_cache=False)


class FailingExecutor(Executor):
    """Ends the request "bad" with an error; runs no step before it is released."""

    def __init__(self):
        super().__init__(lambda tokens: 1)
        self.is_held = False

    def submit(self, plan):
        done = super().submit(plan)
        bad = {i: "its row" for i, row in enumerate(plan.rows) if row.seq.request.id == "bad"}
        return type(done)(replace(done.wait(), errors=bad))


@contextlib.asynccontextmanager
async def started(max_len=100, **setup):
    scheduler, _, _ = Setup(**setup).build(max_len)
    engine = EngineCore(scheduler, FailingExecutor(), check=True)
    client = EnginePool([EngineClient(ThreadTransport(engine))])
    client.start()
    try:
        yield client
    finally:
        await client.stop()


async def wait_idle(client):
    for _ in range(2000):
        (stats,) = await client.stats()
        if stats.running == stats.waiting == stats.held_blocks == 0:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(stats)


def test_results_come_in_the_order_of_requests():
    async def main():
        async with started(budget=7) as client:
            work = [pooled(f"r{i}", range(1, 2 + i * 7 % 20)) for i in range(50)]
            updates = await pool(client, work)
            assert [u.request_id for u in updates] == [one.id for one in work]
            for one, update in zip(work, updates):
                assert update.pooled.shape == (len(one.prompt),)
                assert update.pooled.data == array("f", one.prompt).tobytes()
            await wait_idle(client)

    asyncio.run(main())


def test_one_refused_request_keeps_all_from_running():
    async def main():
        async with started(max_len=10) as client:
            with pytest.raises(TooLong):
                await pool(client, [pooled("a"), pooled("long", range(11)), pooled("b")])
            (stats,) = await client.stats()
            assert stats.running == stats.waiting == 0

    asyncio.run(main())


def test_one_failed_request_aborts_its_siblings():
    async def main():
        async with started(budget=4, slots=1) as client:
            work = [pooled("bad"), *(pooled(f"r{i}", range(40)) for i in range(20))]
            with pytest.raises(EngineError, match="its row"):
                await pool(client, work)
            await wait_idle(client)
            assert len(await pool(client, [pooled("again")])) == 1

    asyncio.run(main())


def test_a_cancelled_caller_aborts_its_requests():
    async def main():
        async with started(budget=2, slots=1) as client:
            work = [pooled(f"r{i}", range(90)) for i in range(100)]
            task = asyncio.create_task(pool(client, work))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await wait_idle(client)

    asyncio.run(main())


@pytest.mark.long("tests/server/test_survive.py kills engines every day")
@pytest.mark.usefixtures("forked")
@pytest.mark.slow("an engine process that is killed, and its successor")
def test_requests_of_a_killed_engine_are_answered_by_the_next_and_equal():
    """Killed with some of 64 requests answered."""
    work = [pooled(f"r{i}", range(5, 30 + i * 7 % 200)) for i in range(64)]

    async def main():
        engine = async_llm.AsyncLLM.from_engine_args(
            {
                "model": "embedded",
                "kv_cache_memory_bytes": 1 << 26,
                "max_num_batched_tokens": 256,
            }
        )
        try:
            client = engine._on_this_loop()
            want = await pool(client, work)
            (child,) = engine._end.peek()[1].__self__._group.children
            process = psutil.Process(child.process.pid)
            task = asyncio.create_task(
                pool(client, [replace(one, id=f"b{one.id}") for one in work])
            )
            while not 0 < (await client.stats())[0].waiting < 60:
                assert not task.done()
            process.send_signal(signal.SIGKILL)
            got = await task
            assert client.restarts == 1
            assert [one.pooled for one in got] == [one.pooled for one in want]
            assert len({one.pooled for one in got}) > 40
            prompt = {"prompt_token_ids": list(work[3].prompt)}
            (alone,) = [one async for one in engine.encode(prompt, request_id="mine")]
            assert alone.request_id == "mine"
            raw = frombuffer(want[3].pooled.data, "f4")
            assert abs(alone.outputs.data.numpy() - raw).max() < 1e-6
        finally:
            engine.shutdown()

    asyncio.run(main())
