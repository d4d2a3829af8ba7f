"""External-launcher executor: one rank of a model, in a program that torchrun started for it.

Each program has an engine of its own, with all requests, and plans the same steps: nothing is sent
between them but the model's collectives and a checksum of each step, which is compared while the
step runs. Programs that make different calls are found by it before a token is published.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch

from quire.core.snapshot import LateWorkCounts
from quire.core.types import StepPlan, StepResult
from quire.errors import EngineDead
from quire.executors.base import StepFuture
from quire.executors.inline import Executor as Inline
from quire.executors.rank_group import RankCollectives, end_collectives
from quire.kernels.collectives import Group
from quire.runner import model_input
from quire.runner.model_input import ModelInputBuilder

log = logging.getLogger(__name__)


class CollectivesLease:
    """Ends this rank's collectives when nothing refers to it any longer. What joined the ranks
    does, and each executor: a GPU's start builds one to measure with, and then another."""

    def __init__(self, collectives: RankCollectives) -> None:
        self._finish: list[Callable[[], object]] = []
        self.end = weakref.finalize(self, _end, collectives, self._finish)

    def set_finish(self, finish: Callable[[], object]) -> None:
        """finish(): waits for this rank's steps, and drops its graphs. It must not refer to this
        object."""
        self._finish[:] = [finish]


def _end(collectives: RankCollectives, finish: list[Callable[[], object]]) -> None:
    try:
        for one in finish:
            one()
    except Exception as error:  # noqa: BLE001 - it ends in any case
        log.debug("this rank ends without its last steps: %s", error)
    finish.clear()
    end_collectives(collectives, failed=False)


class Executor:
    """Runs plans with the rank of this process."""

    def __init__(
        self,
        inputs: ModelInputBuilder,
        local: Inline,
        checks: Group,
        lease: CollectivesLease,
    ) -> None:
        """checks: a gloo group of the ranks that nothing else uses."""
        self._inputs = inputs
        self._local = local
        self._checks = checks
        self._lease = lease
        self._divergence: str | None = None

    def submit(self, plan: StepPlan) -> StepFuture:
        step = self._inputs.build(plan)
        own = torch.tensor([zlib.crc32(model_input.encode(step))])
        all_ranks = torch.empty(self._checks.size(), dtype=own.dtype)
        compared = self._checks._allgather_base(all_ranks, own)
        local = self._local.launch(step)
        return _CheckedStep(lambda: self._compare(plan.step, compared, all_ranks), local)

    def _compare(self, number: int, compared: Any, all_ranks: torch.Tensor) -> None:
        """Raise EngineDead if the ranks have different steps."""
        compared.wait()
        if len(set(all_ranks.tolist())) > 1:
            self._divergence = (
                f"the programs of the ranks have different steps {number}: with "
                "distributed_executor_backend='external_launcher' all must make the same calls, "
                "in the same order, with the same requests"
            )
            raise EngineDead(self._divergence)

    def call(self, name: str, *args: Any) -> list[Any]:
        return self._local.call(name, *args)

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return self._local.apply_model(function)

    def late_work(self) -> LateWorkCounts:
        return self._local.late_work()

    def release_kv_memory(self) -> None:
        self._local.release_kv_memory()

    def recover(self) -> None:
        if self._divergence is not None:
            raise EngineDead(self._divergence)
        self._local.recover()

    def set_failure_callback(self, callback: Callable[[], None]) -> None:
        """Do nothing: torchrun ends all programs when one fails."""

    def shutdown(self) -> None:
        self._lease.end()
        self._local.shutdown()


class _CheckedStep:
    """A step whose input is compared among ranks while it runs."""

    def __init__(self, compare: Callable[[], None], local: StepFuture) -> None:
        self._compare = compare
        self._local = local

    def wait(self) -> StepResult:
        self._compare()
        return self._local.wait()
