"""Whatever a request is doing when it is cancelled, all it held is free when the steps under way
have landed: no step is planned for it any more.

With --long 10,000 are cancelled.
"""

import random

import pytest

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.kv_cache import KVCache
from quire.core.kv.tiers.host import HostTier
from quire.core.scheduling.grammar_wait import GrammarWait
from quire.core.scheduling.limits.base import by_contract
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.scheduling.limits.token_budget import TokenBudget
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.scheduler import Scheduler
from quire.core.types import Request, StopConditions
from quire.engine.core.engine_core import EngineCore
from quire.executors.fake import Executor
from tests import tiers
from tests.pure.core.builders import FakeGrammars, fake_constraint

CANCELS = tiers.amount(2000, 10_000)
BLOCKS, HOST, SEQS = 40, 20, 4


class Scene:
    """An engine of few blocks, and the plans it made."""

    def __init__(self, depth=1, *, host=HOST):
        self.executor = Executor(lambda tokens: (sum(tokens) * 31 + len(tokens)) % 50)
        self.grammars = FakeGrammars()
        self.kv = KVCache(BlockPool(BLOCKS), 4, host=HostTier(host) if host else None)
        self.scheduler = Scheduler(
            self.kv,
            Fifo(),
            **by_contract([TokenBudget(16), MaxSeqsLimit(SEQS), GrammarWait(self.grammars, 100)]),
            max_seqs=SEQS,
            max_len=100,
            steps_in_flight=depth,
        )
        self.plans = []
        submit = self.executor.submit
        self.executor.submit = lambda plan: (self.plans.append(plan), submit(plan))[1]
        self.engine = EngineCore(self.scheduler, self.executor, steps_in_flight=depth, check=True)

    def add(self, name, prompt=6, max_tokens=40, **more):
        self.engine.add(Request(name, (*range(prompt),), StopConditions(max_tokens), **more))

    def steps(self, count):
        return [update for _ in range(count) for update in self.engine.step()]

    def rows_of(self, name):
        """How many rows of a request were planned so far."""
        return sum(row.seq.request.id == name for plan in self.plans for row in plan.rows)

    @property
    def is_free(self):
        stats = self.engine.stats()
        held = stats.held_blocks, stats.held_host_blocks
        return held == (0, 0) and not +self.grammars.held and self.engine.empty


def waiting_behind_others(scene):
    for i in range(SEQS):
        scene.add(f"other{i}", max_tokens=4)
    scene.add("it")
    scene.steps(2)
    assert scene.rows_of("it") == 0


def kept_for_its_grammar(scene):
    scene.add("it", constraint=fake_constraint(100))
    scene.steps(2)
    assert scene.engine.stats().waiting_for_resources == 1


def in_the_middle_of_its_prompt(scene):
    scene.add("it", prompt=60)
    scene.steps(2)
    assert 16 <= next(scene.scheduler.sequences()).planned < 60


def with_followers(scene):
    scene.add("it", prompt=40, n=3)
    scene.steps(2)
    assert scene.engine.stats().following == 2


def forked(scene):
    scene.add("it", n=3)
    scene.steps(5)
    assert scene.engine.stats().running == 3


def decoding(scene):
    scene.add("it")
    scene.steps(6)
    assert scene.rows_of("it") > 4


def bound_and_decoding(scene):
    scene.add("it", constraint=fake_constraint(0))
    scene.steps(6)
    assert scene.rows_of("it") > 4


def on_the_host(scene):
    scene.add("other", prompt=60, max_tokens=40)
    scene.add("it", prompt=40, max_tokens=50, salt=b"it")
    for _ in range(60):
        scene.steps(1)
        if scene.engine.stats().preemptions:
            break
    assert [s.request.id for s in scene.scheduler.sequences() if s.slot < 0] == ["it"]


def held_for_others(scene):
    scene.add("it", max_tokens=1, hold=True)
    scene.steps(4)
    assert scene.engine.stats().running == 0


STAGES = [
    waiting_behind_others,
    kept_for_its_grammar,
    in_the_middle_of_its_prompt,
    with_followers,
    forked,
    decoding,
    bound_and_decoding,
    on_the_host,
    held_for_others,
]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_blocks_of_cancelled_requests_are_free_when_steps_in_flight_are_applied(stage, depth):
    scene = Scene(depth)
    stage(scene)
    planned = scene.rows_of("it")
    scene.engine.abort("it")
    others = [one.request.id for one in scene.scheduler.sequences()]
    for other in others:
        scene.engine.abort(other)
    taken = 0
    while not scene.is_free:
        assert taken < depth, f"{taken} steps, and something is held"
        scene.steps(1)
        taken += 1
    assert scene.rows_of("it") == planned, "it was given more rows"


@pytest.mark.parametrize("depth", [1, 2])
def test_one_sequence_that_ends_early_frees_its_own_blocks_alone(depth):
    scene = Scene(depth)
    scene.add("it", n=3)
    scene.steps(8)
    before = scene.engine.stats().held_blocks
    scene.engine.abort_sequence("it", 1)
    scene.steps(depth)
    assert scene.engine.stats().running == 2
    assert scene.engine.stats().held_blocks < before + 2
    scene.engine.abort("it")
    scene.steps(depth)
    assert scene.is_free


def at_random(draw, number):
    prompt, n = draw.choice([1, 3, 9, 30]), draw.choice([1, 1, 1, 3])
    more = {"n": n, "hold": draw.random() < 0.1}
    if draw.random() < 0.3:
        more["constraint"] = fake_constraint(draw.randrange(6), fails=draw.random() < 0.1)
    return f"r{number}", prompt, draw.randrange(1, 30), more


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("host", [0, HOST])
def test_whatever_is_cancelled_whenever_nothing_stays(depth, host):
    draw, scene, alive, ended = random.Random(7), Scene(depth, host=host), [], {}
    cancelled = number = 0
    while cancelled < CANCELS / 4:
        while len(alive) < 10:
            name, prompt, most, more = at_random(draw, number)
            scene.add(name, prompt, most, **more)
            alive.append(name)
            number += 1
        for update in scene.engine.step():
            if update.finish:
                place = update.request_id, update.index
                assert place not in ended, f"{place} ended twice"
                ended[place] = update.finish
        scene.grammars.tick()
        if draw.random() < 0.4:
            name = alive.pop(draw.randrange(len(alive)))
            for update in scene.engine.abort(name):
                ended[update.request_id, update.index] = update.finish
            cancelled += 1
    for name in alive:
        scene.engine.abort(name)
    scene.steps(depth)
    assert scene.is_free
    assert {"abort", "length"} <= {*ended.values()}
    for i in range(SEQS):
        scene.add(f"after{i}", prompt=2)
    scene.steps(2)
    assert scene.engine.stats().running == SEQS, "a seat is lost"
