"""Starting an engine: every second has a name, and --profile leaves a trace."""

import json
import pathlib
import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import quire
from quire import LLM, SamplingParams, env
from quire.config.memory.kv_layout import group_layers
from quire.config.options import Options
from quire.engine.build import build_scheduler, resolve_config
from quire.engine.startup import warmup
from quire.engine.startup.model_setup import describe_model
from quire.engine.startup.startup_timer import CONCURRENT_PREFIX, StartupTimer, format_table
from quire.models.build import MODELS, assign_kv_tensors, read_model_config
from quire.runner.worker_calls import WorkerCalls, with_two_layers_per_kind

TINY = pathlib.Path(__file__).parent / "models" / "tiny"


def test_laps_add_up_and_what_was_beside_does_not():
    with StartupTimer() as receipt:
        slow = receipt.run_concurrently("slow", lambda: time.sleep(0.05))
        receipt.lap("one")
        slow.result()
        receipt.lap("two")
        receipt.lap("one")
    seconds = receipt.seconds()
    assert list(seconds) == ["one", "two", CONCURRENT_PREFIX + "slow"]
    assert receipt.total == pytest.approx(seconds["one"] + seconds["two"])
    assert seconds[CONCURRENT_PREFIX + "slow"] >= 0.05
    assert receipt.seconds_before > 0


def test_the_table_lists_laps_then_the_sum_then_what_was_beside():
    lines = format_table(
        {"weights": 1.25, "cache": 0.5, CONCURRENT_PREFIX + "tokenizer": 0.75}, before=2.0
    )
    assert [line.split()[0] for line in lines] == [
        "weights",
        "cache",
        "ready",
        "concurrent",
        "before",
    ]
    assert "1.75 s" in lines[2]


def test_an_error_beside_is_raised_where_the_result_is_taken():
    with pytest.raises(ValueError, match="broken"), StartupTimer() as receipt:
        receipt.run_concurrently(
            "bad", lambda: (_ for _ in ()).throw(ValueError("broken"))
        ).result()


def test_an_engine_names_every_second_of_its_start():
    LLM("embedded")  # imports what it needs, which is no part of a start
    began = time.perf_counter()
    built = LLM("embedded").llm_engine.built
    took = time.perf_counter() - began
    laps = {name: s for name, s in built.seconds.items() if not name.startswith(CONCURRENT_PREFIX)}
    assert {"model files", "config", "weights", "engine"} <= set(laps)
    assert CONCURRENT_PREFIX + "tokenizer" in built.seconds
    assert took / 2 < sum(laps.values()) <= took


def test_profile_writes_a_trace_of_some_steps(tmp_path):
    llm = LLM("embedded", profile=str(tmp_path), profile_skip=1, profile_steps=2)
    llm.generate("Hello", SamplingParams(max_tokens=8), use_tqdm=False)
    (trace,) = tmp_path.glob("*.json")
    assert json.loads(trace.read_text())["traceEvents"]


class Counts:
    """An executor in front of another, that notes tokens and rows of each step."""

    def __init__(self, inner):
        self.inner, self.steps = inner, []

    def submit(self, plan):
        self.steps.append((sum(row.count for row in plan.rows), len(plan.rows)))
        return self.inner.submit(plan)


@pytest.mark.parametrize(
    ("tokens", "seats", "length", "first"),
    [
        (64, 8, 128, (64, 8)),  # all tokens of the budget over all seats
        (70, 8, 128, (70, 8)),
        (8, 16, 128, (8, 8)),  # fewer tokens than seats
        (128, 1, 64, (62, 1)),  # one seat, shorter than the budget
    ],
)
def test_dummy_requests_make_the_largest_possible_step(tokens, seats, length, first):
    said = {
        "max_num_batched_tokens": tokens,
        "max_num_seqs": seats,
        "max_model_len": length,
        "enable_prefix_caching": True,
    }
    options = Options.from_flat(said)
    found = describe_model(options, env.read())
    config, plan, _ = resolve_config(found, env.read())
    small = warmup.profiling_config(config, plan.shape)
    llm = LLM("embedded", **said, num_gpu_blocks_override=small.cache.num_blocks)
    executor = Counts(llm.llm_engine.engine._executor)
    half = (build_scheduler(small), executor)
    warmup.run_dummy_requests(
        half,
        warmup.worst_step_lengths(small),
        warmup.ALL_FEATURES,
        longest=warmup.WITH_PROMPT_LOGPROBS,
    )
    assert executor.steps[0] == first
    executor.steps.clear()
    warmup.run_dummy_requests(half, [1] * seats, warmup.RANDOM, tokens=2)
    assert executor.steps == [(min(seats, tokens), min(seats, tokens))] * len(executor.steps)
    assert half[0].idle


def test_dummy_requests_fit_a_cache_that_is_smaller_than_a_prompt():
    said = {"max_model_len": 128, "block_size": 4, "num_gpu_blocks_override": 9}
    options = Options.from_flat(said)
    config, _, _ = resolve_config(describe_model(options, env.read()), env.read())
    executor = Counts(LLM("embedded", **said).llm_engine.engine._executor)
    warmup.run_dummy_requests((build_scheduler(config), executor), [126], warmup.RANDOM)
    assert executor.steps[0] == (31, 1)


@pytest.mark.parametrize(("kind", "kept"), [("llama", 2), ("gemma2", 4), ("qwen2_moe", 4)])
def test_a_trace_runs_two_layers_of_each_kind(kind, kept):
    hf = json.loads((TINY / f"{kind}.json").read_text())
    hf = hf.get("config", hf) | {"num_hidden_layers": 9, "sliding_window": 40}
    hf |= {"layer_types": None, "decoder_sparse_step": 2, "use_sliding_window": False}
    _, config = read_model_config(hf)
    with torch.device("meta"):
        model = MODELS.load(kind).Model(config)
    assign_kv_tensors(model, group_layers(config.attention_layers()))
    before = list(model.layers)
    with with_two_layers_per_kind(model):
        assert len(model.layers) == kept
        assert set(model.layers) < set(before)
    assert list(model.layers) == before


def test_a_trace_keeps_all_modules_of_a_list_that_is_no_stack_of_layers():
    """Gemma 3n takes one projection for each of its four streams, by number."""
    model = nn.Module()
    model.projections = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(3)])
    with with_two_layers_per_kind(model):
        assert (len(model.projections), len(model.layers)) == (3, 2)


def test_the_graphs_of_a_whole_model_are_captured_after_every_trace():
    said = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 9}
    llm = LLM("embedded", **said, max_model_len=64, enforce_eager=True)
    engine, config = llm.llm_engine.engine, llm.llm_engine.config
    model, log = engine._executor.runner.model, []
    whole = len(model.layers)

    def record(name):
        return lambda *args: log.append((name, len(model.layers) == whole))

    names = ("warm_up_kernels", "capture_graphs", "reserve_memory")
    worker = SimpleNamespace(proposals=None, **{name: record(name) for name in names})
    calls = WorkerCalls(SimpleNamespace(model=model, worker=worker, launch=None))

    class Watched:
        def call(self, name, *args):
            return [getattr(calls, name)(*args)]

        def submit(self, plan):
            record("step")()
            return engine._executor.submit(plan)

    warmup.capture_graphs((engine._scheduler, Watched()), config, captured_bytes=0)
    assert log.index(("capture_graphs", True)) > max(
        at for at, (name, _) in enumerate(log) if name == "step"
    )
    assert ("step", False) in log, "no trace"


def test_nothing_in_the_engine_reaches_a_worker_past_its_executor():
    engine = pathlib.Path(quire.__file__).parent / "engine"
    past = [
        f"{path.name}: {line.strip()}"
        for path in engine.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\.(runner|worker|inner)\.\w|_executor\._", line) and "import" not in line
    ]
    assert not [line for line in past if "quire." not in line], past
