"""A health probe step tests the device, and is in no statistics."""

import pytest

from quire.core.types import StepResult
from quire.engine.core.engine_core import EngineCore
from quire.errors import EngineError
from quire.executors.fake import Executor
from tests.pure.core.workload import Setup
from tests.pure.engine.test_engine_core import (
    Faulty,
    drain,
    engine_over,
    expected,
    next_token,
    request,
)


class Wrong(Executor):
    """Reports that every row failed."""

    def submit(self, plan):
        done = super().submit(plan)
        errors = dict.fromkeys(range(len(plan.rows)), "not a number")
        done._result = StepResult(done._result.token_ids, errors=errors)
        return done


@pytest.mark.parametrize("depth", [1, 2])
def test_a_canary_leaves_nothing_behind(depth):
    engine = engine_over(Executor(next_token), depth)
    engine.add(request("one", max_tokens=6))
    drain(engine)
    before, counters = engine.stats(), engine.snapshot().counters
    assert engine.health_probe_step()
    assert engine.stats() == before
    assert engine.snapshot().counters == counters
    engine.check()


def test_a_canary_leaves_nothing_in_the_prefix_cache():
    """Not even where one token fills a block."""
    scheduler = Setup(block_size=1).build()[0]
    engine = EngineCore(scheduler, Executor(next_token))
    assert engine.health_probe_step()
    assert engine.stats().cached_blocks == 0


def test_what_comes_after_a_canary_is_as_without_one():
    engine = engine_over(Executor(next_token))
    assert engine.health_probe_step()
    engine.add(request("one"))
    said = [token for update in drain(engine) for token in update.token_ids]
    assert said == expected((1, 2, 3), 5)


def test_a_canary_goes_through_the_executor():
    executor = Executor(next_token)
    assert engine_over(executor).health_probe_step()
    assert executor.steps == 1


def test_no_health_probe_runs_while_there_are_requests():
    executor = Executor(next_token)
    engine = engine_over(executor)
    engine.add(request("one"))
    assert not engine.health_probe_step()
    assert executor.steps == 0


def test_no_canary_takes_blocks_that_are_held_for_others():
    engine = engine_over(Executor(next_token))
    engine.add(request("one", hold=True))
    drain(engine)
    assert not engine.health_probe_step()
    engine.release("one")
    assert engine.health_probe_step()


@pytest.mark.parametrize("faults", [{"submit": (0,)}, {"wait": (0,)}])
def test_a_canary_that_fails_raises(faults):
    with pytest.raises(RuntimeError):
        engine_over(Faulty(**faults)).health_probe_step()


def test_a_canary_whose_row_came_to_nothing_raises():
    with pytest.raises(EngineError, match="not a number"):
        engine_over(Wrong(next_token)).health_probe_step()
