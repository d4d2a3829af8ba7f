"""Balanced executor: has another executor's ranks move experts between some of the steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from quire.config.engine_config import ExpertBalanceSection
from quire.core.snapshot import ExpertBalanceStats
from quire.core.types import StepPlan
from quire.errors import EngineDead
from quire.executors.base import Executor as Inner
from quire.executors.base import StepFuture
from quire.executors.forwarding import ForwardingExecutor

log = logging.getLogger(__name__)


class Executor(ForwardingExecutor):
    """Counts steps that have rows."""

    def __init__(self, inner: Inner, section: ExpertBalanceSection) -> None:
        super().__init__(inner)
        self._stats = ExpertBalanceStats()
        self._section = section
        self._steps = 0
        self._failure: Exception | None = None
        # tokens of a window longer than an interval are those of whole intervals
        self._intervals = -(-section.window // section.interval)
        inner.call("start_expert_balancing")

    def submit(self, plan: StepPlan) -> StepFuture:
        if plan.rows:
            self._before_step()
        return super().submit(plan)

    def _before_step(self) -> None:
        interval, window = self._section.interval, self._section.window
        if self._steps and self._steps % interval == 0:
            self._balance()
        elif window < interval and self._steps % interval == interval - window:
            self.inner.call("start_expert_balancing")
        self._steps += 1

    def _balance(self) -> None:
        try:
            ranks = self.inner.call("balance_experts", self._intervals)
        except Exception as error:  # weights may be where no rank expects them
            self._failure = error
            raise
        before, after = (_mean([one[i] for one in ranks if one[i]]) for i in (0, 1))
        moved = sum(one[2] for one in ranks)
        runs, total = self._stats.rebalances + 1, self._stats.moved_experts + moved
        self._stats = ExpertBalanceStats(runs, total, before, after)
        if self._section.logs:
            log.info(
                "experts: balancedness %.3f in the last steps, %.3f of the same tokens after %d "
                "experts moved",
                before,
                after,
                moved,
            )

    def stats(self) -> ExpertBalanceStats:
        """What was done so far."""
        return self._stats

    def recover(self) -> None:
        if self._failure is not None:
            raise EngineDead(f"experts could not be moved: {self._failure}")
        super().recover()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
