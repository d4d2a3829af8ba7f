"""The GPU's half of a step without a GPU: its kernels in the interpreter, streams that do at once.

Streams, events and graphs are fakes; all else is the real CUDA worker: uploads, gathering,
padding, write-back, results. Real graphs and real asynchrony are tests/gpu's business.
"""

import contextlib
import functools
import gc
import importlib
import weakref

import pytest
import torch

pytest.importorskip("triton")

from quire.attention import paged
from quire.config.memory.kv_format import KV_FORMATS
from quire.core.types import ThinkingBudget
from quire.engine.startup.drafter_setup import build_drafter
from quire.engine.startup.executor_setup import _build_backend, table_shape
from quire.engine.startup.warmup import RANDOM, run_dummy_requests
from quire.executors.inline import Executor
from quire.kernels.framework import late_work, op
from quire.kernels.paged_attention import paged_attention
from quire.runner import shared_prefixes
from quire.runner.gpu import (
    cuda_graphs,
    cuda_worker,
    draft_chain,
    pinned_io,
    result_buffers,
    staging_buffer,
)
from quire.runner.gpu.mixed_batch_graphs import GraphShape, graph_shapes
from quire.runner.kv_tensors import allocate_kv_tensors
from quire.runner.long_contexts import attach_long_contexts
from quire.runner.model_input import ModelInputBuilder
from quire.runner.model_runner import ModelRunner
from quire.runner.parts import long_contexts as long_contexts_part
from quire.runner.shared_prefixes import SharedPrefixRows, attach_shared_prefixes
from quire.sampling.sampler import Sampler
from tests import tiers
from tests.cpu import engine_of as tiny
from tests.cpu import test_structured as structured
from tests.cpu.encoder_decoder.seq2seq import T5
from tests.cpu.made_grammars import Grammars
from tests.cpu.multimodal import test_engine as media


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
    """Launches its kernels again: they read and write the same buffers each time."""

    def __init__(self, launch):
        self.replay = launch


def no_capture(launch):
    raise AssertionError("captured after start")


@pytest.fixture
def acted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    for module in (draft_chain, result_buffers, pinned_io, staging_buffer):
        monkeypatch.setattr(module, "pinned_words", lambda n: torch.empty(n, dtype=torch.int32))

    def reserve(self, size):
        self._pool = object()

    monkeypatch.setattr(cuda_graphs.CudaGraphCache, "_reserve", reserve)
    monkeypatch.setattr(cuda_graphs.CudaGraphCache, "_capture", lambda self, launch: Graph(launch))


def engine_of(hf=tiny.TINY, *, captured=True, make=tiny.engine_of, shape=None, **settings):
    """An engine with the CUDA worker over CPU tensors, in which no step may capture.

    captured: with the graphs that a start captures. shape: other fields of its block tables. make:
    the engine of these fields and settings.
    """

    def device_half(model, config, processors=(), grammars=None, pooler=None, drafter=None):
        cache, said = config.cache, config.scheduler
        tensors, host = (
            allocate_kv_tensors(
                cache.layers,
                cache.groups,
                num_blocks=n,
                block_size=cache.block_size,
                form=KV_FORMATS[cache.dtype],
            )
            for n in (cache.num_blocks, cache.num_host_blocks)
        )
        sampler = Sampler(
            config.model.vocab, said.max_num_seqs, "cpu", asynchronous=True, grammars=grammars
        )
        sizes = table_shape(config)._replace(**shape or {})
        backend = _build_backend(config, tensors)
        if drafter is not None:
            drafter = build_drafter(drafter, config, backend, torch.device("cpu"))

        lane = cuda_worker.CudaWorker(
            model,
            backend,
            sampler,
            sizes,
            cache=tensors,
            host_cache=host,
            max_tokens=said.max_num_batched_tokens,
            logprobs_mode="raw_logprobs",
            eager=config.device.enforce_eager,
            captured_tokens=config.device.captured_tokens,
            pooler=pooler,
            max_drafts=settings.get("drafts", 0) or config.speculation.max_drafts,
            drafter=drafter,
        )
        runner = ModelRunner(model, sampler, lane)
        return Executor(ModelInputBuilder(sizes), runner, threaded=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "build_executor", device_half)
        engine = make(hf, **settings)
    if captured:
        engine.executor.call("capture_graphs", 0)
    graphs_of(engine)._capture = no_capture
    return engine


def graphs_of(engine):
    return engine.executor.runner.worker._graphs


def workload():
    ask = tiny.request
    return [
        ask("a", range(20), 9),
        ask("b", [5], 7),
        ask("c", range(30, 70), 5, temperature=0.9, top_p=0.9, seed=3),
        ask("d", range(3, 9), 12, repetition_penalty=1.3),
        ask("e", range(40), 6, logprobs=2, prompt_logprobs=1),
        ask("f", range(50), 8, vectors=torch.linspace(-1, 1, 30 * 32).view(30, 32)),
    ]


PATHS = {
    "eager": dict(eager=True),
    "graphs": dict(),
    "overlap": dict(depth=2),
    "overlap, chunks": dict(depth=2, budget=9),
    "preempted": dict(depth=2, num_blocks=7, prefix=False),
    "preempted, host tier": dict(depth=2, num_blocks=7, host_blocks=20),
}


MODELS = {"full": tiny.TINY, "windows": tiny.WINDOWED}
HARDEST = ("overlap, chunks", "preempted, host tier")


@functools.cache
def greedy_tokens(which):
    """Of the greedy requests, each alone on the CPU."""
    found = {}
    for one in workload():
        if one.params.temperature == 0:
            engine = tiny.engine_of(MODELS[which], budget=4000, eager=True)
            found |= tiny.run(engine, [one])[0]
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("which", "name"),
    [
        *(("full", name) for name in PATHS),
        *(("windows", name) for name in HARDEST),
        *tiers.long(*(("windows", name) for name in PATHS if name not in HARDEST)),
    ],
)
def test_the_cuda_worker_gives_the_tokens_of_the_cpu(acted, which, name):
    settings, hf = dict(PATHS[name]), MODELS[which]
    if which == "windows" and "num_blocks" in settings:
        settings["num_blocks"] = 3 * settings["num_blocks"]
    want = greedy_tokens(which)
    got, _ = tiny.run(engine_of(hf, **settings), workload(), stagger=2)
    assert {key: got[key] for key in want} == want
    assert len(got["c", 0]) == 5


SOME = ("eager", "overlap, chunks", "preempted, host tier")


@pytest.mark.sampled(3)
@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("name", [*SOME, *tiers.long(*(one for one in PATHS if one not in SOME))])
def test_a_model_with_an_encoder_answers_as_on_the_cpu(acted, name):
    settings = dict(PATHS[name])
    if "num_blocks" in settings:
        settings["num_blocks"] = 9
    hf = {**T5, "is_encoder_decoder": True}
    asked = [
        tiny.request("a", [0], 9, source=range(4, 40)),
        tiny.request("b", [0, 7, 8, 9], 7, source=[5]),
        tiny.request("c", [0], 12, source=range(30, 70), logprobs=2),
        tiny.request("d", [0], 6, source=range(4, 40), temperature=0.9, seed=3, n=2),
        tiny.request("e", [0, *range(20, 50)], 5, source=range(90, 119)),
    ]
    want = {}
    for one in asked:
        if one.params.temperature == 0:
            want |= tiny.run(tiny.engine_of(hf, budget=4000, max_len=100, eager=True), [one])[0]
    got, _ = tiny.run(engine_of(hf, max_len=100, **settings), asked, stagger=2)
    assert {key: got[key] for key in want} == want
    assert len({tuple(tokens) for tokens in want.values()}) == len(want)


@pytest.mark.sampled(2)
@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("kind", ["mrope", "llama", "deepstack"])
@pytest.mark.parametrize("settings", [{"depth": 2}, {"budget": 70, "prefix": False}])
def test_prompts_with_images_answer_as_on_the_cpu(acted, replayed, kind, settings):
    both = {"bidirectional": kind == "llama"}
    requests = media.workload(kind, **both)
    requests += [media.ask("long", 1, kind=kind, tail=60, tokens=5, **both)]
    requests = [one for one in requests if one.n == 1]
    want = media.alone(kind, requests)
    built = media.MODELS[kind]
    hf = media.MROPE if kind == "mrope" else tiny.TINY
    sizes = media.section(built, cache_rows=64)
    given = {"budget": 64} | settings
    engine = engine_of(hf, built=built, media=sizes, seqs=4, **given)
    media.same(media.answers(engine, requests, stagger=3), want)
    shapes = {key for key, _ in replayed if isinstance(key, GraphShape)}
    assert shapes, "chunks of text were replayed"
    assert len(shapes) < len(replayed)


def chosen_logprobs(updates):
    """(request, index) -> log probabilities of its tokens, of requests that asked for them."""
    found = {}
    for one in updates:
        for token in one.logprobs or ():
            found.setdefault((one.request_id, one.index), []).append(token.values[0])
    return {key: torch.tensor(of) for key, of in found.items()}


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("settings", [{"depth": 2}, *tiers.long({"eager": True})])
def test_rows_with_one_prefix_answer_as_alone(acted, replayed, monkeypatch, settings):
    """Two groups, forks, rows of their own, and rows that come and go."""
    attention = importlib.import_module("quire.kernels.gpu.attention.paged_attention")

    def attend(*args):
        if args[-1] is None:  # not a step with groups
            return paged_attention(*args)
        out = attention.outputs(*args)
        attention.launch(out, *args)
        return out

    monkeypatch.setattr(paged, "paged_attention", attend)
    for module, name in (
        (attention, "plan_shared"),
        (attention, "plan_decode"),
        (attention.packed, "plan_decode"),
    ):
        plan = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, plan=plan: plan(*a)._replace(splits=1))
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 6)
    monkeypatch.setattr(shared_prefixes, "LEAST_ROWS", 4)
    monkeypatch.setattr(SharedPrefixRows, "least_rows", 4)
    monkeypatch.setattr(shared_prefixes, "LEAST_GROUP", 3)
    hf = {**tiny.TINY, "num_hidden_layers": 1}
    first, second = range(40), range(90, 53, -1)
    work = [tiny.request(f"a{i}", [*first, 40 + i], 3 + i % 2, logprobs=0) for i in range(3)]
    work += [tiny.request(f"b{i}", [*second, 7 + i], 3, logprobs=0) for i in range(3)]
    work += [tiny.request("c", [60], 4, temperature=0.9, seed=1, n=2)]
    want, alone = tiny.run(tiny.engine_of(hf, budget=4000, eager=True), work)
    built = tiny.model_of(hf, torch.float32, "cpu")
    monkeypatch.setattr(built[0], "shared_prefixes", None, raising=False)  # others have this model
    attach_shared_prefixes(built[0], 8, 16, 2, torch.device("cpu"))
    engine = engine_of(
        hf, built=built, shape={"shares_prefixes": True}, seqs=8, budget=64, **settings
    )
    for one in work[:1], work[3:4]:  # their blocks are cached then
        tiny.run(engine, one)
    replayed.clear()
    wrote = []
    write = SharedPrefixRows.write
    monkeypatch.setattr(
        SharedPrefixRows, "write", lambda self, groups: (wrote.append(groups), write(self, groups))
    )
    got, updates = tiny.run(engine, work)
    assert got == want
    torch.testing.assert_close(chosen_logprobs(updates), chosen_logprobs(alone))
    assert {tuple(group.blocks for group in groups) for groups in wrote} >= {(2, 2)}
    if "eager" not in settings:
        assert ("shared prefixes", True) in {(key.variant, known) for key, known in replayed}
        assert all(known for _, known in replayed)


def test_steps_with_a_long_context_have_graphs_of_their_own(acted, replayed, monkeypatch):
    """And so have steps with prompts that have no graph: then no graph at all."""
    calls = []

    def attend(q, *args):
        calls.append((len(q), args[-1]))
        return paged_attention(q, *args)

    monkeypatch.setattr(paged, "paged_attention", attend)
    monkeypatch.setattr(long_contexts_part, "LONG_CONTEXT", 50)
    monkeypatch.setattr(long_contexts_part, "LEAST_KEYS", 60)
    monkeypatch.setattr(long_contexts_part, "CAPTURED_TOKENS", 32)
    work = [tiny.request("a", range(55), 30), tiny.request("late", range(5, 75), 9)]
    work[0:0] = [tiny.request(f"b{i}", [7 + i], 30) for i in range(4)]
    want, _ = tiny.run(engine_of(seqs=6, budget=48, eager=True), work, stagger=1)
    built = tiny.model_of(tiny.TINY, torch.float32, "cpu")
    monkeypatch.setattr(built[0], "long_contexts", None, raising=False)  # others have this model
    attach_long_contexts(built[0])
    engine = engine_of(built=built, shape={"divides_keys": True}, seqs=6, budget=48)
    replayed.clear(), calls.clear()
    got, _ = tiny.run(engine, work, stagger=1)
    assert got == want
    names = {(key.variant, key.size) for key, known in replayed if known and hasattr(key, "size")}
    assert ("long contexts", 6) in names
    assert any(name == "" for name, _ in names)
    assert any(balanced and tokens > 32 for tokens, balanced in calls)


@pytest.fixture
def replayed(monkeypatch):
    """The keys of the graphs that steps run, and whether each was captured."""
    keys = []
    run = cuda_graphs.CudaGraphCache.run

    def spy(self, key):
        keys.append((key, key in self))
        run(self, key)

    monkeypatch.setattr(cuda_graphs.CudaGraphCache, "run", spy)
    return keys


def test_all_graphs_are_captured_at_start_and_each_once(acted, monkeypatch):
    launched, captures = [], []
    launch = cuda_worker.CudaWorker._launch
    monkeypatch.setattr(
        cuda_worker.CudaWorker,
        "_launch",
        lambda self, key: (launched.append(key), launch(self, key)),
    )
    monkeypatch.setattr(
        cuda_graphs.CudaGraphCache,
        "_capture",
        lambda self, launch: captures.append(*launch.args) or Graph(launch),
    )
    engine = engine_of()
    worker = engine.executor.runner.worker
    groups = worker.graph_groups()
    assert sorted(map(str, captures)) == sorted(str(key) for group in groups for key in group)
    assert launched == [group[0] for group in groups]
    assert {key for key in captures if isinstance(key, GraphShape)} == set(graph_shapes(512, 32))
    assert len(captures) < 96
    assert engine_of(eager=True).executor.runner.worker._graphs._captured == {}


def test_a_trace_leaves_out_products_of_its_own_steps_alone(acted, monkeypatch):
    """A start may end in its trace, when another rank has died: the process can start another."""
    engine, found = engine_of(eager=True), []

    def multiply():
        found.append(torch.mm(torch.eye(2), torch.eye(2), out=torch.zeros(2, 2)).sum().item())

    def compute(self, *args):
        multiply()
        return real(self, *args)

    real = cuda_worker.CudaWorker.compute
    monkeypatch.setattr(cuda_worker.CudaWorker, "compute", compute)
    engine.executor.call("begin_trace")
    run_dummy_requests((engine._scheduler, engine.executor), [5], RANDOM)
    multiply()
    want = tiny.run(tiny.engine_of(eager=True), [tiny.request("a", range(20), 9)])[0]
    assert tiny.run(engine_of(eager=True), [tiny.request("a", range(20), 9)])[0] == want
    engine.executor.call("end_trace")
    run_dummy_requests((engine._scheduler, engine.executor), [5], RANDOM)
    assert (found[0], {*found[1:]}) == (0, {2})


def test_a_start_changes_no_state_of_a_slot(acted):
    """Captured between steps, all goes on as before: the largest steps run without rows."""
    work = [*workload(), structured.bound("bound", None, 9)]
    want, _ = tiny.run(engine_of(depth=2), work, stagger=1)
    engine = engine_of(depth=2)
    graphs, got = graphs_of(engine), {}
    for step in range(200):
        if work:
            engine.add(work.pop(0))
        if step % 3 == 1:
            engine.drain()
            del graphs._capture
            graphs.clear()
            engine.executor.call("capture_graphs", 0)
            graphs._capture = no_capture
        for u in engine.step():
            got.setdefault((u.request_id, u.index), []).extend(u.token_ids)
        if not work and engine.idle:
            break
    assert got == want


KINDS = {
    "greedy": ({}, {("whole", "greedy"), ("forward", None), ("sampling", "greedy")}),
    "random": (
        {"temperature": 0.8, "seed": 3},
        {("whole", "random"), ("forward", None), ("sampling", "random")},
    ),
    "penalised": ({"presence_penalty": 0.5}, {("forward", None), ("sampling", "penalised")}),
    "logprobs": ({"logprobs": 2}, {("forward", None)}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_every_kind_are_replayed_at_padded_sizes(acted, replayed, kind):
    """Padding rows change nothing, whatever the real rows are."""
    params, parts = KINDS[kind]
    work = [tiny.request(f"r{i}", range(i, 2 * i + 4), 3 + i, **params) for i in range(11)]
    want, _ = tiny.run(engine_of(eager=True), work)
    replayed.clear()
    got, _ = tiny.run(engine_of(depth=2), work)
    assert got == want
    decodes = {key for key, _ in replayed if not isinstance(key, GraphShape)}
    assert {key[1:3] for key in decodes} == parts
    assert {key.size for key in decodes} >= {1, 4, 6, 8, 12}
    assert all(captured for _, captured in replayed)


def test_steps_with_prompts_are_replayed_in_shapes(acted, replayed):
    work = [tiny.request(f"r{i}", range(i, 3 * i + 9), 6 + i) for i in range(7)]
    want, _ = tiny.run(tiny.engine_of(budget=4000, eager=True), work)
    got, _ = tiny.run(engine_of(depth=2, budget=200), work, stagger=2)
    assert got == want
    shapes = {key for key, _ in replayed if isinstance(key, GraphShape)}
    assert {shape.decodes > 0 for shape in shapes} == {True, False}
    assert all(captured for _, captured in replayed)


def test_a_worker_with_few_rows_replays_shapes_with_more(acted, replayed):
    work = [tiny.request(f"r{i}", range(i, 3 * i + 9), 6 + i) for i in range(7)]
    want, _ = tiny.run(tiny.engine_of(budget=4000, eager=True), work)
    got, _ = tiny.run(engine_of(depth=2, budget=200, seqs=3), work)
    assert got == want
    assert any(isinstance(key, GraphShape) for key, _ in replayed)


def test_a_step_without_a_graph_is_launched_kernel_by_kernel(acted, replayed):
    """As where captures have failed."""
    want, _ = tiny.run(engine_of(depth=2), workload(), stagger=2)
    replayed.clear()
    got, _ = tiny.run(engine_of(depth=2, captured=False), workload(), stagger=2)
    assert got == want
    assert not any(captured for _, captured in replayed)


def test_reference_counts_free_a_deleted_worker(acted):
    """The objects of a start are frozen, so no collection would."""
    gc.collect()
    gc.disable()
    try:
        engine = engine_of(depth=2)
        tiny.run(engine, workload()[:2])
        worker = weakref.ref(engine.executor.runner.worker)
        del engine
        assert worker() is None
    finally:
        gc.enable()


def test_after_sleep_all_graphs_are_captured_again(acted, monkeypatch):
    engine = engine_of(depth=2)
    graphs = graphs_of(engine)
    want, _ = tiny.run(engine, workload())
    before = set(graphs._captured)
    memory = cuda_worker.KVMemory  # tensors of a CPU cannot be resized
    monkeypatch.setattr(memory, "release", lambda self: self._released_sizes.update({0: 0}))
    monkeypatch.setattr(memory, "restore", lambda self: self._released_sizes.clear())
    assert engine.release_kv_memory()
    assert not graphs._captured
    del graphs._capture
    engine.add(tiny.request("first", range(9), 2))
    late_work.set_ready(True)
    engine.step()
    assert set(graphs._captured) == before
    assert late_work.counts().graph_captures == 0
    graphs.capture([*before][:2], 0)
    assert late_work.counts().graph_captures == 2
    late_work.set_ready(False)
    graphs._capture = no_capture
    while not engine.idle:
        engine.step()
    assert tiny.run(engine, workload())[0] == want


WIDE = {**tiny.TINY, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 1}


@pytest.mark.slow("a whole engine, every op of it in the interpreter")
def test_a_whole_engine_runs_on_the_gpu_s_kernels(acted, monkeypatch):
    """Every op by its GPU body: models, backend and ops agree on their arguments."""
    work = [tiny.request("a", range(20), 2), tiny.request("b", [5, 9], 3)]
    work.append(structured.bound("bound", "lists", 3, [7]))
    work.append(tiny.request("vectors", range(12), 2, vectors=torch.eye(9, 64)))
    want, _ = tiny.run(tiny.engine_of(WIDE, eager=True, grammars=Grammars()), work)
    monkeypatch.setattr(op, "_device_type", lambda first: "cuda")
    got, _ = tiny.run(engine_of(WIDE, depth=2, grammars=Grammars(), seqs=3, budget=63), work)
    assert got == want


def bound_work():
    """What the host's sampler and a device's choose alike: greedy rows, and those whose only way is
    the general one. Random ones draw by other arithmetic."""
    work = [one for one in structured.workload() if one.id in ("0", "1", "4", "6")]
    thinking = ThinkingBudget(4, structured.ENOUGH)
    return [*work, structured.bound("thinks", None, 20, thinking=thinking)]


@pytest.fixture(scope="module")
def bound_want():
    return structured.alone(bound_work())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["graphs", "overlap, chunks", "preempted"])
def test_constrained_rows_get_the_tokens_of_the_cpu(acted, bound_want, name):
    settings = dict(PATHS[name])
    if "num_blocks" in settings:
        settings["num_blocks"] = 11
    engine = engine_of(grammars=Grammars(), **settings)
    got = structured.told(tiny.run(engine, bound_work(), stagger=1)[1])
    for key, (tokens, ends, logprobs) in bound_want.items():
        assert (key, got[key][:2]) == (key, (tokens, ends))
        for (ids, values), (ids_too, values_too) in zip(got[key][2], logprobs, strict=True):
            assert ids == ids_too
            assert values == pytest.approx(values_too, abs=1e-4)
    if "num_blocks" in settings:
        assert engine.stats().preemptions > 0


def test_random_constrained_rows_are_whole_and_the_same_in_any_batch(acted):
    work = [structured.bound(k, k, 8, seed=3, **structured.RANDOM) for k in ("lists", "digits")]
    got = structured.told(tiny.run(engine_of(grammars=Grammars(), depth=2), work)[1])
    for one in work:
        alone = structured.told(tiny.run(engine_of(grammars=Grammars(), eager=True), [one])[1])
        tokens = got[one.id, 0][0]
        assert alone == {(one.id, 0): got[one.id, 0]}
        assert structured.whole(one.id, tokens[:-1] if tokens[-1] == structured.END else tokens)


class Recorded(Event):
    """An event that records when the host waits for it."""

    def __init__(self, log):
        self.log, self.number = log, None

    def record(self, stream=None):
        self.number = sum(what == "done" for what, _ in self.log)
        self.log.append(("done", self.number))

    def synchronize(self):
        self.log.append(("wait", self.number))


@pytest.mark.parametrize("kind", ["lists", None])
def test_the_forward_pass_is_in_line_before_the_host_waits_for_the_tokens_it_needs(
    acted, monkeypatch, kind
):
    engine = engine_of(grammars=Grammars(), depth=2)
    for name in ("a", "b"):
        engine.add(structured.bound(name, kind, 12, ignore_eos=True))
    for _ in range(3):
        engine.step()
    log = []
    lane = engine._executor.runner.worker
    run, sample = lane._graphs.run, lane._sampler.choose
    monkeypatch.setattr(cuda_worker.torch.cuda, "Event", lambda: Recorded(log))
    monkeypatch.setattr(lane._graphs, "run", lambda key: (log.append(("forward", key)), run(key)))
    monkeypatch.setattr(
        lane._sampler, "choose", lambda *a: (log.append(("choose", a[3])), sample(*a))[1]
    )
    engine.step()
    engine.step()
    said = [what for what, _ in log]
    ran = [key[1:3] for what, key in log if what == "forward"]
    if kind is None:
        assert ran == [("whole", "greedy")] * 2
        assert said[:3] == ["forward", "choose", "done"]  # nobody waits before the sampling
        return
    assert ran == [("forward", None)] * 2
    second = said.index("forward", 1)
    assert said[second : second + 4] == ["forward", "wait", "choose", "done"]


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("budget", [64, 16], ids=["graphs", "eager"])
def test_the_last_layer_leaves_out_tokens_that_are_not_sampled(
    acted, replayed, monkeypatch, budget
):
    """Prompts whole, or in chunks of 16, also ones of which no token is sampled; with logprobs of a
    prompt all tokens are read."""
    work = [
        tiny.request("a", range(40), 4),
        tiny.request("b", range(50, 80), 4),
        tiny.request("scored", range(20, 45), 3, prompt_logprobs=2),
    ]
    want, _ = tiny.run(tiny.engine_of(), work)
    engine, rows = engine_of(budget=budget, eager=budget == 16), {}
    layers = engine.executor.runner.model.layers
    for layer in (layers[0], layers[-1]):
        rows[layer] = []
        mlp = layer.mlp.forward

        def note(x, mlp=mlp, found=rows[layer]):
            found.append(len(x))
            return mlp(x)

        monkeypatch.setattr(layer.mlp, "forward", note)
    assert tiny.run(engine, work)[0] == want
    counts = list(zip(rows[layers[0]], rows[layers[-1]], strict=True))
    assert all(0 < some <= whole for whole, some in counts)
    assert any(whole > 4 and some == whole for whole, some in counts), "with logprobs"
    shapes = [key for key, there in replayed if isinstance(key, GraphShape) and there]
    if budget == 16:
        assert any(whole > 4 and some == 1 for whole, some in counts), "a part of a prompt"
        assert not shapes
    else:
        assert {(one.tokens, one.rows) for one in shapes} <= {*counts}
        assert shapes
