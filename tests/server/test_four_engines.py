"""Four engines behind one front: each is killed under 100 streams, which continue on others."""

import asyncio

import httpx
import pytest

from tests.server.running import SMALL, serving
from tests.server.test_engines import counts, engines_of
from tests.server.test_survive import Scene, asked

ENGINES, OPEN = 4, 100
TRIED = 12
"""Chunks after which a stream whose engine died is no suspect any more (fault isolation)."""


class Load:
    """Streams of which each begins again when it has ended, until `ending`."""

    def __init__(self, url, bodies, want):
        self._url, self._bodies, self._want = url, bodies, want
        self._runs = [[] for _ in bodies]
        self.ending = False

    async def repeat(self, client, i):
        while not self.ending:
            self._runs[i].append(Scene(self._url))
            found = await self._runs[i][-1].stream(client, self._bodies[i])
            assert found == self._want[i], self._bodies[i]

    def now(self):
        """Of each stream, how many times it has begun, and its chunks this time."""
        return [(len(runs), runs[-1].chunks if runs else 0) for runs in self._runs]

    async def passed(self, mark, chunks=float("inf")):
        """Wait until each stream has ended since now() was `mark`, or has got so many chunks."""
        while any(
            times == before and got - had < chunks
            for (times, got), (before, had) in zip(self.now(), mark)
        ):
            await asyncio.sleep(0.01)


async def all_answer(client, url):
    """Wait until no engine is away."""
    for rank in range(ENGINES):
        while (await client.get(f"{url}/ready?engine={rank}")).status_code != 200:
            await asyncio.sleep(0.05)


@pytest.mark.long("four engines, each killed and started again under 100 streams")
@pytest.mark.timeout(600)
def test_four_engines_are_killed_in_turn_under_100_streams():
    """No stream runs in three engines that die: it would end, as one that kills them."""
    bodies = [asked(i) | {"max_tokens": 30 + i % 15} for i in range(OPEN)]
    more = ("--max-engine-restarts", 100, "--enable-prompt-embeds", "-dp", ENGINES)
    with serving("embedded", *SMALL, *more) as made:
        made.read_log([])
        want, _ = asyncio.run(Scene(made.url).all(bodies))
        assert not any(error for *_, error in want)
        work, running = counts(made.url, "prompt_tokens_total"), []
        assert len(work) == ENGINES
        assert min(work.values()) > max(work.values()) / 4

        async def kill_in_turn(client, load):
            before, last = [(0, 0)] * OPEN, [(1, 0)] * OPEN
            for victim in engines_of(made):
                await load.passed(last, TRIED)
                await load.passed(before)
                rows = await asyncio.to_thread(counts, made.url, "num_requests_running")
                running.append(min(rows.values()))
                before, last = last, load.now()
                victim.kill()
                while victim in engines_of(made):
                    await asyncio.sleep(0.01)
                await all_answer(client, made.url)
            await load.passed(last)
            load.ending = True

        async def scene():
            load, limits = Load(made.url, bodies, want), httpx.Limits(max_connections=None)
            async with (
                httpx.AsyncClient(timeout=120, limits=limits) as client,
                asyncio.TaskGroup() as group,
            ):
                for i in range(OPEN):
                    group.create_task(load.repeat(client, i))
                group.create_task(kill_in_turn(client, load))

        asyncio.run(scene())
        assert len(running) == ENGINES
        assert all(running)  # requests, on the engine with the fewest, before each was killed
        one = bodies[0] | {"stream": False}
        del one["stream_options"]
        for rank in range(ENGINES):
            headers = {"X-data-parallel-rank": str(rank)}
            answer = httpx.post(f"{made.url}/v1/completions", json=one, headers=headers, timeout=60)
            assert answer.json()["choices"][0]["text"] == want[0][0][0]
