"""Pipeline stages of CUDA workers without a GPU: the kernels in the interpreter, one stage after
the other in this process. Sends in NCCL and real overlap are tests/gpu's business."""

from collections import deque
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from quire.config.engine_config import ParallelSection
from quire.config.stages import stage_cache, stage_layers
from quire.distributed.collectives import ProcessGroupCollectives
from quire.distributed.mesh import mesh_of
from quire.distributed.stage_link import StageLink
from quire.engine.startup import executor_setup
from quire.engine.startup.executor_setup import build_runner, table_shape
from quire.executors.inline import Executor
from quire.models.build import build_model, read_model_config
from quire.runner.gpu import cuda_worker
from quire.runner.gpu.mixed_batch_graphs import GraphShape
from quire.runner.model_input import ModelInputBuilder, decode, encode
from quire.runner.parts.base import load_part_types
from quire.runner.stage_masks import MaskSender
from quire.sampling.sampler import Sampler
from tests.cpu import engine_of as tiny
from tests.cpu import test_structured as structured
from tests.cpu.gpu_kernels.test_cuda_worker import (  # noqa: F401
    acted,
    bound_want,
    bound_work,
    greedy_tokens,
    replayed,
    workload,
)
from tests.cpu.made_grammars import Grammars


class Pipe:
    """What one stage sends to the next, in order; each takes what it was sent."""

    def __init__(self):
        self.sent = deque()

    def send(self, tensors, to, tag):
        self.sent.append(tensors[0].clone())
        return self

    def recv(self, tensors, source, tag):
        found = self.sent.popleft()
        assert found.shape == tensors[0].shape, "states of another step"
        tensors[0].copy_(found)
        return self

    def wait(self):
        pass


class Both:
    """The group of a stage: what it receives from, and what it sends to."""

    def __init__(self, before, behind):
        if before is not None:
            self.recv = before.recv
        if behind is not None:
            self.send = behind.send


class Tokens:
    """Both ends of the way of tokens from the last stage to the first."""

    def __init__(self):
        self.sent, self.expected, self.received = [], 0, []

    def send(self, last_tokens):
        self.sent.append(last_tokens.clone())

    def expect(self, last_tokens):
        self.expected += 1
        return self.expected

    def receive(self, number, last_tokens):
        self.received.append(number)
        last_tokens.copy_(self.sent[number - 1])


class Stages:
    """An executor of all stages: a step runs through them before the next is launched."""

    def __init__(self, runners, shape, tokens):
        self.inputs, self.runners, self.tokens = ModelInputBuilder(shape), runners, tokens
        self.own = [Executor(self.inputs, one, threaded=False) for one in runners]
        self.masks = MaskSender(runners[0].sampler.constrained_slots)
        self.parts = load_part_types()

    def submit(self, plan):
        step, masks = self.masks.attach(self.inputs.build(plan))
        data = encode(step)
        steps = [one.launch(decode(data, self.parts)) for one in self.runners]
        return Pending(steps, masks)

    def call(self, name, *args):
        return [one.call(name, *args)[0] for one in self.own]

    def __getattr__(self, name):
        return getattr(self.own[-1], name)

    def recover(self):
        self.call("recover")


class Pending:
    def __init__(self, steps, masks):
        self.steps, self.masks = steps, masks

    def wait(self):
        found = [one.wait() for one in self.steps]
        assert all(not one.token_ids for one in found[:-1])
        return found[-1] if self.masks is None else self.masks.commit(found[-1])


def engine_of(hf, layers, *, captured=True, **settings):
    """An engine of stages of CUDA workers over CPU tensors. layers: of each stage."""

    def staged(model, config, processors=(), grammars=None, pooler=None, drafter=None):
        model_type, model_config = read_model_config(hf)
        pipes = [Pipe() for _ in layers[1:]]
        runners, tokens = [], Tokens()
        for stage in range(len(layers)):
            mesh = mesh_of(config.parallel, stage)
            ends = [None, *pipes, None]
            group = Both(ends[stage], ends[stage + 1])
            comm = ProcessGroupCollectives(None, stages=group)
            comm.tokens = tokens if stage in (0, len(layers) - 1) else None
            link = StageLink(mesh, comm, model_config.hidden)
            part = build_model(
                model_type,
                model_config,
                load_format="dummy",
                dtype=torch.float32,
                mesh=mesh,
                comm=comm,
                stage=stage_layers(config.parallel, stage),
                groups=stage_cache(config.cache, config.parallel, stage).groups,
                progress=False,
                seed=7,
            )
            own = grammars if stage == 0 else None
            runners.append(
                build_runner(part, config, processors, own, None, None, None, comm, link)
            )
        return Stages(runners, table_shape(config), tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "build_executor", staged)
        patch.setattr(tiny, "ParallelSection", partial(ParallelSection, stage_layers=layers))
        patch.setattr(executor_setup, "_worker_class", lambda kind: cuda_worker.CudaWorker)
        patch.setattr(executor_setup, "Sampler", partial(Sampler, asynchronous=True))
        engine = tiny.engine_of(hf, **settings)
    if captured:
        engine.executor.call("capture_graphs", 0)
    return engine


MODELS = {"full": tiny.TINY, "windows": tiny.WINDOWED}
PATHS = {
    "two": ("full", (1, 1), dict(depth=3, budget=200)),
    "three, chunks, preempted": (
        "windows", (1, 1, 1), dict(depth=4, budget=9, num_blocks=21, prefix=False)
    ),
    "eager": ("full", (1, 1), dict(depth=3, eager=True)),
    "host tier": ("full", (1, 1), dict(depth=2, num_blocks=7, host_blocks=20)),
    "uneven": ("windows", (2, 1), dict(depth=4)),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("name", PATHS)
def test_stages_of_cuda_workers_give_the_tokens_of_the_cpu(acted, replayed, name):  # noqa: F811
    which, layers, settings = PATHS[name]
    want = greedy_tokens(which)
    engine = engine_of(MODELS[which], layers, **settings)
    got, _ = tiny.run(engine, workload(), stagger=2)
    assert {key: got[key] for key in want} == want
    assert len(got["c", 0]) == 5
    tokens = engine.executor.tokens
    assert len(tokens.sent) == tokens.expected
    assert tokens.received == sorted(tokens.received)
    depth, stages = settings["depth"], len(layers)
    assert len(tokens.received) > (len(tokens.sent) / 3 if depth > stages else 1), tokens.received
    if name == "two":
        shapes = {key for key, _ in replayed if isinstance(key, GraphShape)}
        assert {shape.decodes > 0 for shape in shapes} == {True, False}
        assert all(captured for _, captured in replayed)


@pytest.mark.slow("kernels in the interpreter")
def test_masks_reach_the_stage_that_samples(acted, bound_want):  # noqa: F811
    engine = engine_of(tiny.TINY, (1, 1), depth=2, grammars=Grammars())
    got = structured.told(tiny.run(engine, bound_work(), stagger=1)[1])
    for key, (tokens, ends, _) in bound_want.items():
        assert (key, got[key][:2]) == (key, (tokens, ends))


@pytest.mark.slow("kernels in the interpreter")
def test_a_stage_that_raises_leaves_no_states_behind(acted, monkeypatch):  # noqa: F811
    """The step is computed again on both stages, with the states of that time."""
    work = [tiny.request("a", range(20), 9), tiny.request("b", [5], 7)]
    want, _ = tiny.run(engine_of(tiny.TINY, (1, 1), depth=1), work)
    engine = engine_of(tiny.TINY, (1, 1), depth=1)
    last = engine.executor.runners[1].worker
    run, calls = last._graphs.run, []

    def raise_once(key):
        calls.append(key)
        if len(calls) == 4:
            raise RuntimeError("once")
        run(key)

    monkeypatch.setattr(last._graphs, "run", raise_once)
    got, _ = tiny.run(engine, work)
    assert got == want
    assert len(calls) > 5
