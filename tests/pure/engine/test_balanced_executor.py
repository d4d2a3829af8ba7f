"""When experts are counted anew and moved, and what happens if that fails."""

from types import SimpleNamespace

import pytest

from quire.config.engine_config import ExpertBalanceSection
from quire.core.snapshot import ExpertBalanceStats
from quire.errors import EngineDead
from quire.executors.balanced import Executor


class Ranks:
    """An executor that notes steps and calls."""

    def __init__(self, error=None):
        self.seen, self.error = [], error

    def submit(self, plan):
        self.seen.append("step" if plan.rows else "empty step")

    def call(self, name, *args):
        self.seen.append((name, *args))
        if name == "balance_experts":
            if self.error is not None:
                raise self.error
            return [(0.5, 0.75, 3), (0.25, 0.25, 1), (0.0, 0.0, 0)]
        return []

    def recover(self):
        self.seen.append("recover")


def run(section, steps, rows=(1,)):
    ranks = Ranks()
    executor = Executor(ranks, ExpertBalanceSection(**section))
    for _ in range(steps):
        executor.submit(SimpleNamespace(rows=rows))
    return ranks.seen, executor.stats()


RESET, STEP = ("start_expert_balancing",), "step"


def test_a_window_is_the_last_steps_of_an_interval():
    seen, stats = run({"interval": 3, "window": 1}, 7)
    balance = ("balance_experts", 1)
    turn = [STEP, STEP, RESET, STEP, balance]
    assert seen == [RESET, *turn, *turn, STEP]
    assert stats == ExpertBalanceStats(2, 8, 0.375, 0.5)


def test_a_longer_window_has_whole_intervals():
    seen, _ = run({"interval": 2, "window": 5}, 5)
    balance = ("balance_experts", 3)
    assert seen == [RESET, STEP, STEP, balance, STEP, STEP, balance, STEP]


def test_steps_without_rows_do_not_count():
    seen, stats = run({"interval": 1, "window": 1}, 3, rows=())
    assert seen == [RESET, *["empty step"] * 3]
    assert stats == ExpertBalanceStats()


def test_weights_that_may_be_half_moved_end_the_engine():
    ranks = Ranks(MemoryError("no room"))
    executor = Executor(ranks, ExpertBalanceSection(interval=1, window=1))
    executor.submit(SimpleNamespace(rows=(1,)))
    with pytest.raises(MemoryError):
        executor.submit(SimpleNamespace(rows=(1,)))
    with pytest.raises(EngineDead, match="experts could not be moved: no room"):
        executor.recover()
    assert "recover" not in ranks.seen
