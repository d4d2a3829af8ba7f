"""Multi-process executor: runs each step on several ranks; rank 0 is in this process.

Each rank holds its share of the model and gets the ModelInput of its data-parallel rank: rank 0 as
it is, the others as msgpack through shared memory (rank_group). Every rank of the last pipeline
stage samples. The first of these of each data-parallel rank gives the result, the others a checksum
of their tokens, so ranks that diverge are found before a token is published. A rank that ends,
hangs or fails alone is EngineDead: the others would wait for it in a collective.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.config.engine_config import ParallelSection
from quire.core.accounting.step_time import StepTimeEstimate, step_cost
from quire.core.snapshot import LateWorkCounts
from quire.core.step_results import combine_results
from quire.core.types import StepPlan, StepResult
from quire.errors import Unsupported
from quire.executors.base import StepFuture
from quire.executors.inline import Executor as Inline
from quire.executors.rank_group import CallWorker, RankAnswer, RankError, RankGroup, RunStep
from quire.runner import model_input, plain_data
from quire.runner.device_worker import CompletedStep
from quire.runner.model_input import ModelInput, ModelInputBuilder
from quire.runner.stage_masks import MaskSender, SentMasks

STEP_FACTOR = 20
"""A step may take so many times the expected time before a rank counts as hanging."""


class RankLease:
    """Ends the ranks when nothing refers to it any longer. Their start does, and each executor:
    a GPU's start builds one to measure with, and then another."""

    def __init__(self, group: RankGroup) -> None:
        self.end = weakref.finalize(self, group.close)


class Executor:
    """Runs plans on rank 0 in this process, and on the ranks of a group."""

    def __init__(
        self,
        inputs: Sequence[ModelInputBuilder],
        local: Inline,
        group: RankGroup,
        section: ParallelSection,
        lease: RankLease,
    ) -> None:
        """inputs: of each data-parallel rank."""
        self.group = group
        self._inputs = inputs
        self._local = local
        self._step_limit_s = section.step_limit_s
        self._sampling_ranks = section.sampling_ranks
        self._masks = None
        if section.stages > 1:  # the grammars are here, and another stage samples
            self._masks = MaskSender(local.runner.sampler.constrained_slots)
        self._step_time = StepTimeEstimate()
        self._late_work = LateWorkCounts()
        self._rank_late_work = [LateWorkCounts()] * group.size
        self._lease = lease

    def submit(self, plan: StepPlan) -> StepFuture:
        plans = plan.dp_plans or (plan,)
        steps = [inputs.build(own) for inputs, own in zip(self._inputs, plans, strict=True)]
        masks = None
        if self._masks is not None:  # constrained rows are those of the first data-parallel rank
            steps[0], masks = self._masks.attach(steps[0])
        if all(step.is_empty for step in steps):  # all sequences are in steps in flight
            return CompletedStep(StepResult(()))
        cost = step_cost(plan)
        expected_s = STEP_FACTOR * self._step_time.estimate_ns(cost) / 1e9
        number = self.group.send(
            self._message_of(steps),
            f"step {plan.step}",
            max(self._step_limit_s, expected_s),
        )
        status = self.group.status
        status.begin(number)
        try:
            local: StepFuture = self._local.launch(steps[0])
        except Exception as error:  # noqa: BLE001 - wait() raises it
            status.fail(number, error)
            local = _RaisedStep(error)
        except BaseException as error:
            self.group.fail(f"{type(error).__name__} while step {plan.step} was launched")
            raise
        return _PendingRanks(self, number, local, cost, masks)

    def _message_of(self, steps: Sequence[ModelInput]) -> RunStep:
        """Encode steps, with their large arrays in shared memory if that has space."""
        arrays: list[list[bytes]] = [[] for _ in steps]
        small = [model_input.detach_arrays(*one) for one in zip(steps, arrays, strict=True)]
        places = self.group.place_arrays(arrays) if any(arrays) else None
        if places is None:
            return RunStep(tuple(model_input.encode(step) for step in steps))
        return RunStep(tuple(model_input.encode(step) for step in small), places)

    def call(self, name: str, *args: Any) -> list[Any]:
        number = self.group.send(CallWorker(name, list(args)), f"call of {name}")
        self.group.status.begin(number)
        self.group.receive_before(number)  # a rank without room for an answer begins no call
        try:
            own = self._local.call(name, *args)
        except Exception as error:
            self.group.status.fail(number, error)
            self.group.wait(number)
            raise
        self.group.status.finish(number)
        answers = self.group.wait_all(number)
        self._sum_late_work(answers)
        return [*own, *(one.value for one in answers)]

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        raise Unsupported("functions cannot be sent to ranks in other processes: use one rank")

    def late_work(self) -> LateWorkCounts:
        return self._late_work

    def release_kv_memory(self) -> None:
        self.call("release_kv_memory")

    def recover(self) -> None:
        self.group.check()
        self._local.recover()
        self.call("recover")

    def set_failure_callback(self, callback: Callable[[], None]) -> None:
        self.group.monitor.set_failure_callback(callback)

    def shutdown(self) -> None:
        """End the ranks. Rank 0 ends its collective when the others are gone."""
        self._lease.end()
        self._local.shutdown()

    def finish_step(
        self, number: int, local: StepFuture, cost: int, began: float, masks: SentMasks | None
    ) -> StepResult:
        """Block until every rank has run the step. May be repeated after an interruption."""
        status = self.group.status
        self.group.check()
        error, result = None, None
        try:
            result = local.wait()
            status.finish(number)
        except Exception as raised:  # noqa: BLE001 - raised below, unless a rank has failed
            error = raised
            status.fail(number, raised)
        answers = self.group.wait(number)
        if error is not None:
            raise error
        for one in answers:
            if isinstance(one, RankError):
                raise one.exception()
        assert result is not None
        answered = [one for one in answers if isinstance(one, RankAnswer)]
        results = [
            plain_data.decode_as(answered[ranks.start - 1].result, StepResult)
            if ranks.start
            else result
            for ranks in self._sampling_ranks
        ]
        self._compare(number, results, answered)
        self._sum_late_work(answered)
        if masks is not None:
            results[0] = masks.commit(results[0])
        self._step_time.update(cost, int((time.perf_counter() - began) * 1e9))
        return results[0] if len(results) == 1 else combine_results(results)

    def _compare(
        self, number: int, results: Sequence[StepResult], answers: Sequence[RankAnswer]
    ) -> None:
        """Raise EngineDead if ranks that sample the same rows have different tokens."""
        for result, (first, *others) in zip(results, self._sampling_ranks, strict=True):
            own = checksum(result) if others else 0
            for rank in others:
                if answers[rank - 1].checksum != own:
                    monitor = self.group.monitor
                    raise self.group.fail(
                        f"{monitor.name_rank(rank)} computed different tokens than "
                        f"{monitor.name_rank(first)} in message {number}"
                    )

    def _sum_late_work(self, answers: Sequence[RankAnswer]) -> None:
        """Add what the ranks report with their answers to one message; None: nothing new."""
        ranks, longest = self._rank_late_work, 0.0
        own = self._local.late_work()
        reported = [None if own is ranks[0] else own, *(one.late_work for one in answers)]
        if not any(one is not None for one in reported):
            return
        for rank, now in enumerate(reported):
            if now is not None:
                longest = max(longest, now.seconds - ranks[rank].seconds)
                ranks[rank] = now
        self._late_work = LateWorkCounts(
            sum([one.kernel_compilations for one in ranks]),
            sum([one.graph_captures for one in ranks]),
            self._late_work.seconds + longest,
        )


class _PendingRanks:
    """A step that was sent to all ranks."""

    def __init__(
        self,
        executor: Executor,
        number: int,
        local: StepFuture,
        cost: int,
        masks: SentMasks | None,
    ) -> None:
        self._executor = executor
        self._number = number
        self._local = local
        self._cost = cost
        self._masks = masks
        self._began = time.perf_counter()

    def wait(self) -> StepResult:
        return self._executor.finish_step(
            self._number, self._local, self._cost, self._began, self._masks
        )


class _RaisedStep:
    """Rank 0's part of a step that could not be launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepResult:
        raise self._error


def checksum(result: StepResult) -> int:
    """Return what ranks with the same tokens share."""
    return zlib.crc32(msgspec.msgpack.encode(result.token_ids))
