"""The GPU's half of a step without a GPU: its kernels in the interpreter, streams that do at once.

What a stream, an event and a graph do is acted; all else is the real lane: uploads, gathering,
padding, write-back, results. Real graphs and real asynchrony are tests/gpu's business.
"""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

from quire.engine.device import _backend
from quire.executors.inline import Executor
from quire.kernels import op
from quire.runner import cuda, cuda_graphs, mailbox, upload
from quire.runner.memory import kv_tensors
from quire.runner.mixed import Shape
from quire.runner.runner import Runner
from quire.runner.slots import Slots
from quire.sampling.sampler import Sampler
from tests.cpu import engine_of as tiny


class Event:
    def record(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class Stream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


class Graph:
    """Runs the body again: it reads and writes the same buffers each time."""

    def __init__(self, graphs, key):
        self.graphs, self.key = graphs, key

    def replay(self):
        self.graphs.capturing = True
        self.graphs._body(*self.key)
        self.graphs.capturing = False


@pytest.fixture
def acted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    for module in (cuda, mailbox, upload):
        monkeypatch.setattr(module, "pinned", lambda n: torch.empty(n, dtype=torch.int32))

    def capture(self, key):
        self._made[key] = graph = Graph(self, key)
        return graph

    monkeypatch.setattr(cuda_graphs.Graphs, "_capture", capture)


def engine_of(hf=tiny.TINY, **settings):
    """An engine whose device half is the CUDA lane over CPU tensors."""

    def device_half(model, config, processors=(), grammars=None):
        cache, said = config.cache, config.scheduler
        tensors, host = (
            kv_tensors(
                cache.layers,
                cache.groups,
                num_blocks=n,
                block_size=cache.block_size,
                dtype=torch.float32,
            )
            for n in (cache.num_blocks, cache.num_host_blocks)
        )
        sampler = Sampler(
            config.model.vocab, said.max_num_seqs, "cpu", asynchronous=True, grammars=grammars
        )
        width = -(-said.max_model_len // cache.block_size)
        slots = Slots(said.max_num_seqs, width, len(cache.groups), cache.block_size)

        lane = cuda.Lane(
            model,
            _backend(config, tensors),
            sampler,
            slots,
            cache=tensors,
            host_cache=host,
            max_tokens=said.max_num_batched_tokens,
            logprobs_mode="raw_logprobs",
            eager=config.device.enforce_eager,
        )
        runner = Runner(model, sampler, slots, lane)
        return Executor(runner, threaded=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "device_half", device_half)
        return tiny.engine_of(hf, **settings)


def workload():
    ask = tiny.request
    return [
        ask("a", range(20), 9),
        ask("b", [5], 7),
        ask("c", range(30, 70), 5, temperature=0.9, top_p=0.9, seed=3),
        ask("d", range(3, 9), 12, repetition_penalty=1.3),
        ask("e", range(40), 6, logprobs=2, prompt_logprobs=1),
    ]


PATHS = {
    "eager": dict(eager=True),
    "graphs": dict(),
    "overlap": dict(depth=2),
    "overlap, chunks": dict(depth=2, budget=9),
    "preempted": dict(depth=2, num_blocks=7, prefix=False),
    "swapped": dict(depth=2, num_blocks=7, prefix=False, host_blocks=20, preemption="swap"),
}


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("hf", [tiny.TINY, tiny.WINDOWED], ids=["full", "windows"])
def test_the_lane_gives_the_tokens_of_the_cpu(acted, hf, name):
    settings = dict(PATHS[name])
    if hf is tiny.WINDOWED and "num_blocks" in settings:
        settings["num_blocks"] = 3 * settings["num_blocks"]
    want = {}
    for one in workload():
        if one.params.temperature == 0:
            want |= tiny.run(tiny.engine_of(hf, budget=4000, eager=True), [one])[0]
    got, _ = tiny.run(engine_of(hf, **settings), workload(), stagger=2)
    assert {key: got[key] for key in want} == want
    assert len(got["c", 0]) == 5


def test_steps_with_prompts_are_replayed_in_shapes(acted, monkeypatch):
    """Rows that fill a step up change nothing, whatever company the real ones have."""
    monkeypatch.setattr(cuda, "PATIENCE", 1)
    replayed = []
    run = cuda_graphs.Graphs.run

    def spy(self, size, kind):
        replayed.append(size)
        run(self, size, kind)

    monkeypatch.setattr(cuda_graphs.Graphs, "run", spy)
    work = [tiny.request(f"r{i}", range(i, 3 * i + 9), 6 + i) for i in range(7)]
    want, _ = tiny.run(tiny.engine_of(budget=4000, eager=True), work)
    got, _ = tiny.run(engine_of(depth=2, budget=200), work, stagger=2)
    assert got == want
    shapes = [size for size in replayed if isinstance(size, Shape)]
    assert {shape.decodes > 0 for shape in shapes} == {True, False}


WIDE = {**tiny.TINY, "hidden_size": 64, "head_dim": 16}


def test_a_whole_engine_runs_on_the_gpu_s_kernels(acted, monkeypatch):
    """Every op by its GPU body: models, backend and ops agree on what is passed to whom."""
    work = [tiny.request("a", range(20), 3), tiny.request("b", [5, 9], 4)]
    want, _ = tiny.run(tiny.engine_of(WIDE, eager=True), work)
    monkeypatch.setattr(op, "_device", lambda first: "cuda")
    got, _ = tiny.run(engine_of(WIDE, depth=2), work)
    assert got == want
