"""What ranks on GPUs need and a CPU can show: launches ahead of answers, executors built again,
the tightest of several GPUs."""

import gc
import os
import threading
from types import SimpleNamespace

import msgspec
import pytest

from quire import LLM, SamplingParams, env
from quire.config.facts import DeviceFacts
from quire.config.options import Options
from quire.config.resolve import resolve
from quire.config.stages import stage_cache
from quire.core.types import StepResult
from quire.engine.startup import gpu_startup, rank_process
from quire.engine.startup.gpu_memory import DeviceUse
from quire.engine.startup.gpu_startup import MemorySituation, size_kv_cache
from quire.engine.startup.memory_record import MemoryRecord
from quire.engine.startup.model_setup import describe_model
from quire.errors import NoRoom
from quire.executors import rank_loop
from quire.executors.rank_group import CallWorker, RankAnswer, RankError, RunStep
from quire.executors.rank_loop import RankLoop
from tests.cpu.tiny_models import write_model

GIB = 1 << 30
MIB = 1 << 20


class Step:
    """A launched step: done when the test says so."""

    def __init__(self, events, name):
        self.events, self.name, self.done, self.error = events, name, threading.Event(), None

    def wait(self):
        self.events.append(f"wait {self.name}")
        assert self.done.wait(60)
        if self.error is not None:
            raise self.error
        return StepResult(((self.name,),))


class Link:
    """A rank's ends, whose messages the test puts in."""

    def __init__(self):
        self.messages, self.answers = [], []
        self.ready, self.answered = threading.Semaphore(0), threading.Semaphore(0)
        self.status = SimpleNamespace(
            begin=lambda number: None, finish=lambda number: None, fail=lambda number, error: None
        )
        self.steps = self

    def receive(self):
        self.ready.acquire()
        if not self.messages:
            raise SystemExit
        return self.messages.pop(0)

    def put(self, number, message):
        self.messages.append((number, msgspec.msgpack.encode(message)))
        self.ready.release()

    def answer(self, number, message):
        self.answers.append((number, message))
        self.answered.release()


@pytest.fixture
def loop(monkeypatch):
    """A loop of a rank on a GPU: its link, its launched steps and events. Ended after the test."""
    events, steps, link = [], [], Link()

    def launch(number):
        events.append(f"launch {number}")
        if number == 13:
            raise RuntimeError("13 cannot be launched")
        steps.append(Step(events, number))
        return steps[-1]

    monkeypatch.setattr(rank_loop.model_input, "decode", lambda data, types: data[0])
    monkeypatch.setattr(rank_loop, "load_part_types", dict)
    set_up = lambda: events.append("thread")  # noqa: E731
    loop = RankLoop(link, lambda config: None, lambda: 1, set_up_thread=set_up)
    loop._runner = SimpleNamespace(launch=launch, skip=lambda number: None)
    loop._calls = SimpleNamespace(set_ready=lambda ready: events.append("call"),
                                  recover=lambda: events.append("recover"))  # fmt: skip

    def serve():
        with pytest.raises(SystemExit):
            loop.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    yield SimpleNamespace(link=link, steps=steps, events=events)
    for step in steps:
        step.done.set()
    link.ready.release()
    thread.join(60)
    assert not thread.is_alive()


def wait_for(condition):
    passed = threading.Event()
    for _ in range(6000):
        if condition():
            return
        passed.wait(0.01)
    raise AssertionError("it never happened")


def test_a_step_is_launched_while_the_one_before_it_runs(loop):
    loop.link.put(1, RunStep([b"\1"]))
    loop.link.put(2, RunStep([b"\2"]))
    wait_for(lambda: "launch 2" in loop.events and "wait 1" in loop.events)
    assert loop.link.answers == []
    loop.steps[1].done.set()
    loop.steps[0].done.set()
    loop.link.answered.acquire(timeout=60)
    loop.link.answered.acquire(timeout=60)
    assert [number for number, _ in loop.link.answers] == [1, 2]
    assert len({one.checksum for _, one in loop.link.answers}) == 2
    assert loop.events[0] == "thread"


def test_a_call_runs_between_steps(loop):
    loop.link.put(1, RunStep([b"\1"]))
    loop.link.put(2, CallWorker("set_ready", [True]))
    wait_for(lambda: "wait 1" in loop.events)
    assert "call" not in loop.events
    loop.steps[0].done.set()
    wait_for(lambda: len(loop.link.answers) == 2)
    assert [number for number, _ in loop.link.answers] == [1, 2]


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_after_a_step_that_raised_no_other_runs_until_all_recover(loop, where):
    number = 13 if where == "launch" else 1
    loop.link.put(1, RunStep([bytes([number])]))
    if where == "wait":
        wait_for(lambda: loop.steps)
        loop.steps[0].error = RuntimeError("1 failed")
        loop.steps[0].done.set()
    wait_for(lambda: len(loop.link.answers) == 1)
    loop.link.put(2, RunStep([b"\2"]))
    wait_for(lambda: len(loop.link.answers) == 2)
    assert [type(one) for _, one in loop.link.answers] == [RankError, RankError]
    assert "launch 2" not in loop.events
    loop.link.put(3, CallWorker("recover", []))
    loop.link.put(4, RunStep([b"\3"]))
    wait_for(lambda: "launch 3" in loop.events)
    loop.steps[-1].done.set()
    wait_for(lambda: len(loop.link.answers) == 4)
    assert isinstance(loop.link.answers[-1][1], RankAnswer)


@pytest.mark.slow("an engine of two processes")
@pytest.mark.usefixtures("forked")
def test_ranks_outlive_an_executor_that_only_measured(tmp_path, monkeypatch):
    """A GPU's start builds one with a small cache, drops it, and builds another."""
    real, built = rank_process.Ranks.build_executor, []

    def build_twice(ranks, config, runner):
        first = real(ranks, config, runner)
        assert first.call("set_ready", False) == [None, None]
        del first
        gc.collect()
        assert ranks.fit_blocks(SimpleNamespace(num_blocks=1, block_bytes=1), fixed=True)
        built.append(real(ranks, config, runner))
        return built[-1]

    monkeypatch.setattr(rank_process.Ranks, "build_executor", build_twice)
    folder = str(write_model(tmp_path / "llama", "llama"))
    llm = LLM(folder, device="cpu", tensor_parallel_size=2, num_gpu_blocks_override=60,
              max_model_len=256, dtype="float32")  # fmt: skip
    group = built.pop().group
    (answer,) = llm.generate("5 6 7", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 4
    pids = [one.pid for one in group.monitor.processes]
    del llm, answer
    gc.collect()
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def gpu_config(**options):
    options = Options.from_flat({"model": "embedded", "device": "cuda", **options})
    facts = DeviceFacts(kind="cuda", total_bytes=10 * GIB, free_bytes=10 * GIB, count=2,
                        capability=(9, 0))  # fmt: skip
    found = describe_model(options, env.read())
    config, plan, _ = resolve(options, found.facts, facts, server=False)
    return config, plan


RECORD = MemoryRecord("a GPU", 10 * GIB, 200 * MIB, 100 * MIB, 50 * MIB, 600 * MIB)
SITUATION = MemorySituation(held_by_torch=0, has_fixed_blocks=False, can_shrink_max_len=False)
USE = DeviceUse(free=9 * GIB, allocated=100 * MIB, spare=0, overhead=600 * MIB)


def test_the_cache_fits_the_tightest_gpu():
    config, plan = gpu_config(tensor_parallel_size=2)
    sized = {}
    for name, second in {
        "equal": USE,
        "less is free": USE._replace(free=4 * GIB),
        "more is loaded": USE._replace(allocated=GIB, free=8 * GIB),
        "libraries take more": USE._replace(overhead=900 * MIB),
    }.items():
        found, planned = size_kv_cache(config, plan, SITUATION, RECORD, [USE, second])
        assert found.cache.num_blocks == planned.num_blocks
        sized[name] = planned.num_blocks * planned.block_bytes
        turned, _ = size_kv_cache(config, plan, SITUATION, RECORD, [second, USE])
        assert turned.cache.num_blocks == found.cache.num_blocks
    one, _ = size_kv_cache(config, plan, SITUATION, RECORD, [USE])
    assert sized["equal"] == one.cache.num_blocks * plan.block_bytes
    less = {name: (sized["equal"] - size) / MIB for name, size in sized.items()}
    assert less["libraries take more"] == pytest.approx(300, abs=1)
    assert less["more is loaded"] == pytest.approx(1024 - 100, abs=1)
    assert 4000 < less["less is free"] < 5000


def test_blocks_of_stages_have_the_bytes_of_their_layers():
    config, plan = gpu_config(pipeline_parallel_size=2, pipeline_layers="2,6")
    few, many = (stage_cache(config.cache, config.parallel, stage).block_bytes for stage in (0, 1))
    assert 3 * few == many
    found, _ = size_kv_cache(config, plan, SITUATION, RECORD, [USE, USE])
    one, _ = size_kv_cache(config, plan, SITUATION, RECORD, [USE, USE._replace(free=60 * GIB)])
    assert found.cache.num_blocks == one.cache.num_blocks, "allowed bytes are the limit"
    less = USE._replace(free=4 * GIB)
    first, _ = size_kv_cache(config, plan, SITUATION, RECORD, [less, USE])
    last, _ = size_kv_cache(config, plan, SITUATION, RECORD, [USE, less])
    assert first.cache.num_blocks == found.cache.num_blocks, "its blocks are a third"
    assert last.cache.num_blocks < 0.5 * found.cache.num_blocks


def test_what_does_not_fit_one_gpu_is_refused():
    config, plan = gpu_config(tensor_parallel_size=2, max_model_len=4096)
    full = USE._replace(free=500 * MIB, allocated=8 * GIB)
    with pytest.raises(NoRoom):
        size_kv_cache(config, plan, SITUATION, RECORD, [USE, full])


def test_strange_overheads_are_not_believed():
    _, plan = gpu_config()
    for overhead in (-5, gpu_startup.MAX_OVERHEAD_BYTES + 1):
        use = USE._replace(overhead=overhead)
        assert gpu_startup.sane_overhead(use, plan) == plan.overhead_bytes
