"""Rounds of faults: each hook in turns, at a call that nobody chose; and how long streams waited.

The one idea: how often a hook is called is learnt first, of streams that nothing disturbs, so a
fault that did not happen is a mistake of the round and not its luck.
"""

import json
import time
from itertools import pairwise
from typing import NamedTuple

from tests.faults.arming import Fault
from tests.server.test_survive import Said, Scene

SURELY = 0.75
"""So many of the calls that were counted come in any round: plans differ by when requests come."""
KILL_EVERY = 5


class Patient(Scene):
    """One whose streams may be refused, or end with an error; it knows when their chunks came."""

    def __init__(self, url):
        super().__init__(url)
        self.came = []
        """Of each stream, moments of time.monotonic()."""

    async def stream(self, client, body):
        said, came = Said(), []
        self.came.append(came)
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                said.error = json.loads(await response.aread())["error"]
                return said.told()
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    said.take(line)
                    came.append(time.monotonic())
                    self.chunks += 1
        return said.told()


class Round(NamedTuple):
    """What is to happen in one."""

    point: str
    do: str
    faults: tuple[Fault, ...]

    def __str__(self):
        return ", then ".join(f"{one.point} {one.do} at call {one.at}" for one in self.faults)


def learn(faults, hooks, run):
    """How often each hook is called at least while run() runs, which is done twice."""
    found = []
    for _ in range(2):
        faults.arm(*(Fault(hook, "count") for hook in hooks))
        run()
        found.append(faults.calls)
    faults.clear()
    least = dict(zip(hooks, map(min, *found)))
    assert all(least.values()), f"streams that do not pass a hook: {least}"
    return least


def draw(rng, number, calls):
    """Round `number`: hooks in turns, and each is the place of a kill in one of KILL_EVERY turns.

    calls: of each hook, as learnt. A "start" is that of an engine whose predecessor was killed.
    """
    hooks = [*calls, "start"]
    turn, place = divmod(number, len(hooks))
    do = "kill" if (turn + place) % KILL_EVERY == KILL_EVERY - 1 else "raise"
    point = hooks[place]
    if point == "start":
        return Round(point, do, (_at_random(rng, "plan", "kill", calls), Fault(point, do)))
    return Round(point, do, (_at_random(rng, point, do, calls),))


def mixed(some, others):
    """Both, each spread evenly over the whole."""
    places = {one: (i + 0.5) / len(part) for part in (some, others) for i, one in enumerate(part)}
    return sorted(places, key=places.__getitem__)


def _at_random(rng, point, do, calls):
    return Fault(point, do, at=rng.randint(1, max(1, int(calls[point] * SURELY))))


class Wait(NamedTuple):
    """What a death cost, in seconds from the fault."""

    first: float
    """To the first chunk that any stream got from the next engine."""
    last: float
    """To the first chunk of the stream that waited longest."""


def wait_of(came, fault_at):
    """The longest silence behind the fault: what comes before it was on its way already.

    came: of each stream, when its chunks came. None: nothing came any more.
    """
    after = [[at for at in one if at > fault_at] for one in came]
    moments = sorted(at for one in after for at in one)
    if not moments:
        return None
    _, back = max((b - a, b) for a, b in pairwise([fault_at, *moments]))
    firsts = [min(at for at in one if at >= back) for one in after if one and one[-1] >= back]
    return Wait(back - fault_at, max(firsts) - fault_at)


def spread(seconds):
    """Of figures: how many, their median, ninth tenth, and the longest."""
    ranks = sorted(seconds)
    if not ranks:
        return {"count": 0}
    at = {"median": 0.5, "p90": 0.9, "longest": 1.0}
    found = {name: round(ranks[round(part * (len(ranks) - 1))], 2) for name, part in at.items()}
    return {"count": len(ranks), **found}
