"""Data-parallel ranks of CUDA workers that share experts, without a GPU: kernels in the interpreter,
each rank in a thread, of which one runs at a time. NCCL and real graphs are tests/gpu's business."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from quire.config.engine_config import ParallelSection
from quire.core.step_results import combine_results
from quire.distributed.collectives import ProcessGroupCollectives
from quire.distributed.mesh import mesh_of
from quire.engine.startup import executor_setup, warmup
from quire.engine.startup.executor_setup import build_runner, table_shape
from quire.executors.inline import Executor
from quire.layers import Experts
from quire.models.build import build_model, read_model_config
from quire.runner.expert_steps import ExpertSteps
from quire.runner.gpu import cuda_worker
from quire.runner.gpu.cuda_graphs import DecodeGraph
from quire.runner.gpu.kv_memory import KVMemory
from quire.runner.gpu.mixed_batch_graphs import GraphShape
from quire.runner.model_input import ModelInputBuilder, decode, encode
from quire.runner.parts.base import load_part_types
from quire.sampling.sampler import Sampler
from tests.cpu import engine_of as tiny
from tests.cpu.gpu_kernels.test_cuda_worker import acted, replayed  # noqa: F401
from tests.cpu.gpu_kernels.test_pending_reads import TINY

pytestmark = pytest.mark.slow("kernels in the interpreter")

RANKS = 2
LIMIT_S = 10


class Turns:
    """Threads of which one runs, until it waits for the others in a collective."""

    def __init__(self):
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(RANKS, timeout=LIMIT_S)
        self.sent = [None] * RANKS
        self.kinds = [None] * RANKS
        self.count = 0

    def exchange(self, rank, kind, value):
        """Return what every rank sends; all must send the same kind."""
        self.count += 1
        self.sent[rank], self.kinds[rank] = value, kind
        self._meet()
        found = list(self.sent)
        assert len(set(self.kinds)) == 1, f"ranks differ: {self.kinds}"
        self._meet()
        return found

    def _meet(self):
        self.lock.release()
        try:
            self.barrier.wait()
        finally:
            self.lock.acquire()


class Group:
    """A torch.distributed backend of these threads."""

    def __init__(self, turns, rank):
        self._turns, self._rank = turns, rank

    def rank(self):
        return self._rank

    def size(self):
        return RANKS

    def wait(self):
        pass

    def _allgather_base(self, out, x):
        found = self._turns.exchange(self._rank, ("gather", x.shape), x.clone())
        out.copy_(torch.cat([one.reshape(-1) for one in found]).view(out.shape))
        return self

    def alltoall_base(self, out, x, taken, given):
        kind = ("to all", given[0] if given else len(x) // RANKS)
        found = self._turns.exchange(self._rank, kind, list(x.clone().split(list(given))))
        assert [len(parts[self._rank]) for parts in found] == list(taken)
        out.copy_(torch.cat([parts[self._rank] for parts in found]))
        return self


class Ranks:
    """An executor of data-parallel ranks, each of which gets its own input as bytes."""

    def __init__(self, runners, shape, turns):
        self.runners, self._turns = runners, turns
        self.inputs = [ModelInputBuilder(shape) for _ in runners]
        self.own = [Executor(self.inputs[0], one, threaded=False) for one in runners]
        self.parts = load_part_types()
        self.failed = [False] * RANKS

    def _together(self, run):
        """Return run(rank) of every rank, or the error it raised."""

        def guarded(rank):
            with self._turns.lock:
                try:
                    return run(rank)
                except Exception as error:  # noqa: BLE001 - returned in its place
                    return error

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(guarded, range(RANKS)))

    def submit(self, plan):
        steps = [one.build(own) for one, own in zip(self.inputs, plan.dp_plans, strict=True)]
        data = [encode(step) for step in steps]

        def launch(rank):
            step = decode(data[rank], self.parts)
            if self.failed[rank]:
                self.runners[rank].skip(step)
                raise RuntimeError("the previous step failed")
            try:
                return self.runners[rank].launch(step)
            except Exception:
                self.failed[rank] = True
                raise

        return Pending(self._together(launch))

    def call(self, name, *args):
        found = self._together(lambda rank: self.own[rank].call(name, *args)[0])
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found

    def recover(self):
        self.failed = [False] * RANKS
        self.call("recover")

    def __getattr__(self, name):
        return getattr(self.own[0], name)


class Pending:
    def __init__(self, steps):
        self.steps = steps

    def wait(self):
        for one in self.steps:
            if isinstance(one, Exception):
                raise one
        return combine_results([one.wait() for one in self.steps])


def copy_weights(whole, part):
    """Give a rank its share of the weights of a model: of experts those that it has."""
    found = dict(whole.named_parameters())
    for name, own in part.named_parameters():
        layer = part.get_submodule(name.rpartition(".")[0])
        given = found[name][list(layer.local)] if isinstance(layer, Experts) else found[name]
        own.data.copy_(given)


@cache
def config_of(name):
    hf = json.loads((TINY / f"{name}.json").read_text())
    return hf.get("config", hf)


def engine_of(name, **settings):
    """An engine of two data-parallel ranks of CUDA workers over CPU tensors."""
    hf, turns = config_of(name), Turns()

    def ranks(model, config, processors=(), grammars=None, pooler=None, drafter=None):
        model_type, model_config = read_model_config(hf)
        runners = []
        for rank in range(RANKS):
            mesh = mesh_of(config.parallel, rank)
            comm = ProcessGroupCollectives(None)
            comm.share_experts(Group(turns, rank), Group(turns, rank))
            part = build_model(
                model_type, model_config, load_format="dummy", dtype=torch.float32, mesh=mesh,
                comm=comm, experts="linear", groups=config.cache.groups, progress=False, seed=7,
            )  # fmt: skip
            copy_weights(model, part)
            experts = ExpertSteps(part, comm.dp_exchange, torch.empty(0))
            worker = partial(cuda_worker.CudaWorker, experts=experts)
            patch.setattr(executor_setup, "_worker_class", lambda kind, worker=worker: worker)
            runners.append(build_runner(part, config, processors, grammars, comm=comm))
        return Ranks(runners, table_shape(config), turns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "build_executor", ranks)
        section = partial(ParallelSection, data=RANKS, expert_placement="linear")
        patch.setattr(tiny, "ParallelSection", section)
        patch.setattr(executor_setup, "_has_no_tapes", lambda config: False)  # as on a GPU
        patch.setattr(executor_setup, "Sampler", partial(Sampler, asynchronous=True))
        engine = tiny.engine_of(hf, **settings)
    engine.executor.call("capture_graphs", 0)
    for runner in engine.executor.runners:
        for graph in runner.worker._graphs._captured.values():
            graph.replay = partial(replay, graph.replay, runner.experts._exchange)
    return engine


def replay(launch, exchange):
    """Run a graph's kernels, which count no layers on the host."""
    done = exchange.done
    launch()
    exchange.done = done


MODELS = ["qwen3_moe", "deepseek_v2_lite"]
PATHS = {
    "graphs, two steps in flight": {"depth": 2},
    "eager": {"eager": True},
    "chunks, preempted": {"depth": 2, "budget": 9, "num_blocks": 7, "prefix": False},
}


def workload():
    ask = tiny.request
    return [
        ask("a", range(20), 9),
        ask("b", [5], 7),
        ask("c", range(30, 70), 5, temperature=0.9, top_p=0.9, seed=3),
        ask("d", range(3, 9), 12, repetition_penalty=1.3),
        ask("e", range(40), 6, logprobs=2, prompt_logprobs=1),
        ask("f", range(50), 17),  # alone at last: the other rank has no rows
    ]


@cache
def tokens_of_one(name):
    """Of each request alone on a CPU."""
    found = {}
    for one in workload():
        found |= tiny.run(tiny.engine_of(config_of(name), budget=4000, eager=True), [one])[0]
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("path", PATHS)
def test_ranks_give_the_tokens_of_one(acted, replayed, name, path):  # noqa: F811
    engine = engine_of(name, **PATHS[path])
    replayed.clear()
    got, _ = tiny.run(engine, workload(), stagger=2)
    assert got == tokens_of_one(name)
    graphs = [key for key, captured in replayed if captured]
    assert len(graphs) == len(replayed)
    kinds = {type(key) for key in graphs}
    assert (DecodeGraph in kinds) == ("eager" not in PATHS[path])
    with_prompts = name == "qwen3_moe" and PATHS[path] == {"depth": 2}  # chunks are few tokens
    assert (GraphShape in kinds) == with_prompts


def test_all_ranks_run_a_decode_step_at_one_size(acted, monkeypatch):  # noqa: F811
    """The smallest captured one that the fullest rank fits, with rows or without."""
    engine, steps = engine_of("qwen3_moe", depth=2), []
    for rank, runner in enumerate(engine.executor.runners):
        decode_step = runner.worker._decode

        def watched(inputs, variant, padded, before, rank=rank, decode_step=decode_step):
            steps.append((rank, len(inputs.rows), padded))
            return decode_step(inputs, variant, padded, before)

        monkeypatch.setattr(runner.worker, "_decode", watched)
    turns = engine.executor._turns
    turns.count = 0
    asked = [tiny.request(str(i), [3 + i], 4 + 2 * (i == 0)) for i in range(9)]
    tiny.run(engine, asked)
    layers = config_of("qwen3_moe")["num_hidden_layers"]
    assert turns.count == 2 * layers * len(steps), "layers were computed twice"
    for of_ranks in zip(steps[::2], steps[1::2], strict=True):
        assert sorted(rank for rank, _, _ in of_ranks) == [0, 1]
        rows = max(count for _, count, _ in of_ranks)
        sizes = [size for size in engine.executor.runners[0].worker._sizes if size >= rows]
        assert {size for _, _, size in of_ranks} == {sizes[0]}
    assert (5, 6) in [(rows, size) for _, rows, size in steps]
    assert (0, 1) in [(rows, size) for _, rows, size in steps], "no rank was without rows"


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_step_that_fails_on_one_rank_leaves_none_waiting(acted, monkeypatch, rank):  # noqa: F811
    engine = engine_of("qwen3_moe", depth=2)
    worker, calls = engine.executor.runners[rank].worker, []
    run = worker._graphs.run

    def raise_once(key):
        calls.append(key)
        if len(calls) == 4:
            raise RuntimeError("once")
        run(key)

    monkeypatch.setattr(worker._graphs, "run", raise_once)
    got, _ = tiny.run(engine, workload())
    assert got == tokens_of_one("qwen3_moe")
    assert len(calls) > 4


def test_all_ranks_capture_again_when_one_has_rows_after_sleep(acted, monkeypatch):  # noqa: F811
    monkeypatch.setattr(KVMemory, "release", lambda self: self._released_sizes.update({0: 0}))
    monkeypatch.setattr(KVMemory, "restore", lambda self: self._released_sizes.clear())
    engine = engine_of("qwen3_moe", depth=2)
    engine.executor.call("release_kv_memory")
    captured = [len(one.worker._graphs) for one in engine.executor.runners]
    got, _ = tiny.run(engine, workload()[:1])
    assert got["a", 0] == tokens_of_one("qwen3_moe")["a", 0]
    again = [len(one.worker._graphs) for one in engine.executor.runners]
    assert captured == [0, 0]
    assert again[0] == again[1] > 0


def test_rows_that_no_graph_takes_join_those_of_the_others(acted, replayed):  # noqa: F811
    """Prompt logprobs of a last chunk of one token: launched on one rank, replayed on the other."""
    engine = engine_of("qwen3_moe", depth=2, budget=8)
    replayed.clear()
    work = [
        tiny.request("a", [7], 12),
        tiny.request("b", range(40, 49), 4, prompt_logprobs=1),
    ]
    got, _ = tiny.run(engine, work)
    want = {}
    for one in work:
        alone = tiny.engine_of(config_of("qwen3_moe"), budget=4000, eager=True)
        want |= tiny.run(alone, [one])[0]
    assert got == want


def test_the_largest_step_is_measured_on_every_rank_at_once(acted, monkeypatch):  # noqa: F811
    engine, counts = engine_of("qwen3_moe", budget=40, seqs=4, max_len=30, prefix=False), []
    submit = engine.executor.submit
    monkeypatch.setattr(
        engine.executor,
        "submit",
        lambda plan: (
            counts.append([sum(row.count for row in own.rows) for own in plan.dp_plans]),
            submit(plan),
        )[1],
    )
    sizes = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=40, max_model_len=30)
    config = SimpleNamespace(
        scheduler=sizes, encoder=None, generates=True, parallel=SimpleNamespace(data=RANKS)
    )
    warmup._run_worst_step((engine._scheduler, engine.executor), config)
    assert counts[0] == [40, 40]
