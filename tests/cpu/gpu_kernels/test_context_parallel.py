"""Context parallelism in the CUDA worker, over one rank: its steps, and the kernels beside others that
wait to be fused."""

import pytest
import torch

pytest.importorskip("triton")

from quire.attention import context_parallel
from quire.distributed.context_exchange import ContextExchange
from quire.engine.startup.executor_setup import _build_backend
from quire.kernels.framework import op
from tests.cpu import engine_of as tiny
from tests.cpu.gpu_kernels import test_cuda_worker as worker
from tests.cpu.gpu_kernels.test_cuda_worker import acted  # noqa: F401 - a fixture


@pytest.fixture
def spread(acted, monkeypatch):  # noqa: F811
    def build(config, tensors):
        exchange = ContextExchange(None, 0, 1, lambda name: None)
        return context_parallel.Backend(_build_backend(config, tensors), exchange)

    monkeypatch.setattr(worker, "_build_backend", build)


@pytest.mark.parametrize("name", ["overlap, chunks", "preempted, host tier"])
@pytest.mark.parametrize("which", worker.MODELS)
def test_the_cuda_worker_gives_the_tokens_of_the_cpu(spread, which, name):
    settings = dict(worker.PATHS[name])
    if which == "windows" and "num_blocks" in settings:
        settings["num_blocks"] *= 3
    want = worker.greedy_tokens(which)
    engine = worker.engine_of(worker.MODELS[which], **settings)
    got, _ = tiny.run(engine, worker.workload(), stagger=2)
    assert {key: got[key] for key in want} == want


@pytest.mark.slow("a whole engine, every op of it in the interpreter")
def test_a_whole_engine_runs_on_the_gpu_s_kernels(spread, monkeypatch):
    work = [tiny.request("a", range(20), 2), tiny.request("b", [5, 9], 3)]
    want, _ = tiny.run(tiny.engine_of(worker.WIDE, eager=True), work)
    monkeypatch.setattr(op, "_device_type", lambda first: "cuda")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    got, _ = tiny.run(worker.engine_of(worker.WIDE, depth=2, seqs=3, budget=63), work)
    assert got == want
