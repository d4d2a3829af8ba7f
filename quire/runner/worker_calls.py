"""Worker calls: functions that an executor runs on each rank by name, between steps.

`Executor.call("reserve_memory", ...)` runs the method of that name here. Arguments and results are
plain data, so a call can be sent to another process. Start-up uses them: tracing for the kernels
that steps will need, measuring memory, and setting memory aside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quire.kernels.framework import late_work
from quire.kernels.framework.op import LIBRARY_GEMMS
from quire.runner.device_worker import StepHandle
from quire.runner.expert_balancer import BalanceReport, ExpertBalancer
from quire.runner.model_input import ModelInput
from quire.runner.model_runner import ModelRunner
from quire.runner.parts.base import PARTS

SKIPPED_FUNCTIONS = frozenset(getattr(torch, name) for name in LIBRARY_GEMMS)
"""Half a second of a large model's step, which allocates nothing else."""
PLACE_FIELDS = ("group", "place", "layer_idx", "layer_id")
"""Fields of a module that number its layer, and change no kernel."""
UNINITIALIZED_CONSTRUCTORS = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}
)
"""Functions that make tensors without defined content."""


class WorkerCalls:
    """The named calls of one rank. Only a rank with a GPU has those of start-up."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._worker: Any = runner.worker
        self._tracing = ExitStack()
        self._memory_before = (0, 0)
        self._balancer: ExpertBalancer | None = None

    def begin_trace(self) -> None:
        """From now on steps run on two layers of each kind, with zeroed tensors and without the
        library's large products. Of equal layers, more would allocate nothing else; zeros are valid
        indexes. No graph may be captured before or within.
        """
        model: Any = self._runner.model
        with ExitStack() as entered:
            entered.enter_context(with_traced_steps(self._runner))
            entered.enter_context(with_few_layers(self._worker, model))
            self._tracing = entered.pop_all()

    def end_trace(self) -> None:
        """Undo begin_trace."""
        self._tracing.close()

    def warm_up_kernels(self) -> None:
        """Load the library's kernels, and those of our own that no dummy step runs."""
        self._worker.warm_up_kernels()

    def launch_graph_bodies(self) -> None:
        """Launch the largest steps that are captured, without rows."""
        self._worker.launch_graph_bodies()

    def capture_graphs(self, reserved_bytes: int) -> None:
        """Capture all graphs, in so much memory; afterwards no step captures."""
        self._worker.capture_graphs(reserved_bytes)

    def reserve_memory(self, size: int, pieces: int, piece: int) -> None:
        """Allocate from the driver what steps will need: `size` bytes at once, and small pieces."""
        self._worker.reserve_memory(size, pieces, piece)

    def start_memory_peak(self) -> None:
        """Reset the measurement of memory in use at once."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._memory_before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()

    def memory_peak(self) -> tuple[int, int]:
        """Return bytes beyond the reset: in use at once, and allocated from the driver for that."""
        torch.cuda.synchronize()
        used, reserved = self._memory_before
        return (
            int(torch.cuda.max_memory_allocated()) - used,
            int(torch.cuda.max_memory_reserved()) - reserved,
        )

    @torch.inference_mode()
    def call_part(self, name: str, request: bytes) -> bytes:
        """Return a part's answer to a request that concerns no step."""
        with self._worker.execution_context():
            return PARTS.load(name).PART.call(self._runner.model, request)

    @torch.inference_mode()
    def start_expert_balancing(self) -> None:
        """Count the tokens of experts from now on."""
        if self._balancer is None:
            self._balancer = ExpertBalancer(cast(nn.Module, self._runner.model))
        self._balancer.count_from_now()

    @torch.inference_mode()
    def balance_experts(self, intervals: int) -> BalanceReport:
        """Move experts between ranks: see ExpertBalancer."""
        assert self._balancer is not None, "start_expert_balancing comes first"
        return self._balancer.balance(intervals)

    def set_ready(self, ready: bool) -> None:
        """Count kernel compilations and graph captures of this rank from now on, or no more."""
        late_work.set_ready(ready)

    def release_kv_memory(self) -> None:
        """Return the KV memory to the system."""
        self._runner.release_kv_memory()

    def recover(self) -> None:
        """Drop the partial results of a failed step."""
        self._runner.recover()


@contextmanager
def with_two_layers_per_kind(model: nn.Module) -> Iterator[None]:
    """Within, the model has two of each kind of layer.

    Lists of modules without parts, such as projections, are no layers: code takes them by number.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 2]
    stacks = [one for one in lists if all(any(layer.children()) for layer in one)]
    whole = [list(stack) for stack in stacks]
    try:
        for stack, layers in zip(stacks, whole):
            _set_layers(stack, _two_of_a_kind(layers))
        yield
    finally:
        for stack, layers in zip(stacks, whole):
            _set_layers(stack, layers)


@contextmanager
def with_few_layers(worker: Any, model: nn.Module) -> Iterator[None]:
    """Within, the model has two of each kind of layer, and a drafter reads none of the others."""
    with ExitStack() as entered:
        entered.enter_context(with_two_layers_per_kind(model))
        if worker.proposals is not None:
            entered.enter_context(worker.proposals.taking_any_states())
        yield


@contextmanager
def without_layers(model: nn.Module) -> Iterator[None]:
    """Within, a decoder has no layers: its hidden states are its normed embeddings."""
    found = getattr(model, "layers", None)
    stacks = [found] if isinstance(found, nn.ModuleList) else []
    whole = [list(stack) for stack in stacks]
    try:
        for stack in stacks:
            _set_layers(stack, ())
        yield
    finally:
        for stack, layers in zip(stacks, whole):
            _set_layers(stack, layers)


def _set_layers(stack: nn.ModuleList, layers: Sequence[nn.Module]) -> None:
    stack._modules = {str(i): layer for i, layer in enumerate(layers)}


def _two_of_a_kind(layers: Sequence[nn.Module]) -> list[nn.Module]:
    seen: Counter[str] = Counter()
    kept = []
    for layer in layers:
        kind = _layer_kind(layer)
        seen[kind] += 1
        if seen[kind] <= 2:
            kept.append(layer)
    return kept


def _layer_kind(layer: nn.Module) -> str:
    """Describe a layer: classes, sizes and switches, without its place in the cache."""
    plain = (bool, int, float, str, type(None))
    parts = []
    for name, module in layer.named_modules():
        fields = {k: v if isinstance(v, plain) else type(v) for k, v in vars(module).items()}
        shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
        fields = {k: v for k, v in fields.items() if k not in PLACE_FIELDS}
        parts.append((name, type(module), list(fields.items()), shapes))
    return repr(parts)


@contextmanager
def with_traced_steps(runner: ModelRunner) -> Iterator[None]:
    """Within, a runner launches its steps in TraceMode.

    The mode is of the thread, so it lasts for a launch only: a start that fails before end_trace,
    because another rank has died, must leave it to no later engine of the process.
    """
    launch = runner.launch

    def traced(step: ModelInput) -> StepHandle:
        with TraceMode():
            return launch(step)

    runner.launch = traced  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner.launch


class TraceMode(TorchFunctionMode):
    """Within, new uninitialized tensors hold zeros, and the large products are left out."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in SKIPPED_FUNCTIONS and kwargs.get("out") is not None:
            return kwargs["out"]
        result = func(*args, **kwargs)
        return result.zero_() if func in UNINITIALIZED_CONSTRUCTORS else result
