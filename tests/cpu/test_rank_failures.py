"""A rank that dies, hangs or fails alone: it is named, nobody waits for ever, nothing is left."""

import gc
import os
import re
import signal
import threading
import time
from contextlib import suppress

import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.distributed.collectives import ProcessGroupCollectives
from quire.errors import EngineDead, QuireError
from quire.executors import rank_monitor
from tests import tiers
from tests.cpu.tiny_models import write_model
from tests.faults.arming import Fault
from tests.faults.ranks import of_ranks

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of two processes")]

SIZES = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 60}
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)
HOW = {
    "kill": r"was killed by signal 9",
    "exit": r"ended with status 3",
    "stop": r"was stopped by a signal",
    "raise": r"failed alone in step \d+ \(message \d+\): Injected: injected at rank\.\w+; "
    r"rank 0 \(process \d+, cpu\) waits for it",
    "hang": r"has not finished step \d+ \(message \d+\) after",
}
PROGRESS = r".*its last collective is number [1-9]\d* \((all_reduce|all_gather)\)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "llama", "llama"))


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.setattr(rank_monitor, "FAILURE_GRACE_S", 0.6)
    monkeypatch.setattr(rank_monitor, "MAX_STOPPED_S", 0.6)
    monkeypatch.setattr(rank_monitor, "STOP_GRACE_S", 1.0)
    with of_ranks() as made:
        yield made


def start(folder, **options):
    return LLM(folder, **SIZES, device="cpu", tensor_parallel_size=2, **options)


def open_files():
    """Rings and eventfds of this process."""
    gc.collect()
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(name for name in names if "quire-r" in name or "[eventfd]" in name)


def assert_nothing_left(executor):
    executor.shutdown()
    assert all(process.returncode is not None for process in executor.group.monitor.processes)
    assert not [one for one in threading.enumerate() if one.name == "quire-rank-monitor"]


@pytest.mark.parametrize(
    ("point", "do", "at"),
    [
        ("rank.forward", "kill", 5),
        ("rank.forward", "raise", 4),
        ("rank.reduce", "stop", 20),
        *tiers.long(
            *[("rank.forward", do, 1) for do in ("kill", "exit", "stop", "raise")],
            *[("rank.forward", do, 6) for do in ("exit", "stop", "hang")],
            *[("rank.reduce", do, at) for do in HOW for at in (1, 30) if (do, at) != ("hang", 1)],
            *[("rank.sample", do, 5) for do in ("kill", "exit", "stop")],
        ),
    ],
)
def test_a_rank_that_fails_in_a_step_is_named_and_all_end(folder, faults, point, do, at):
    """In a prefill (the first call) and in a decode step."""
    before = open_files()
    more = {"hang": {"rank_timeout_seconds": 1}, "raise": {"steps_in_flight": 2}}
    llm = start(folder, **more.get(do, {}))
    executor = llm.llm_engine.engine.executor
    faults.arm(Fault(point, do, at=at))
    pid = executor.group.monitor.processes[0].pid
    named = rf"rank 1 \(process {pid}, cpu\) {HOW[do]}"
    with pytest.raises(EngineDead, match=named) as raised:
        llm.generate(["Hello", "What is this?"], PARAMS, use_tqdm=False)
    if do != "raise" and (point, at) != ("rank.forward", 1):
        assert re.search(named + PROGRESS, str(raised.value)), raised.value
    assert faults.fired == 1
    with pytest.raises(EngineDead, match=named):
        llm.generate("Hello", PARAMS, use_tqdm=False)
    assert_nothing_left(executor)
    assert open_files() == before


def test_the_death_of_an_idle_rank_ends_the_next_request(folder, faults):
    llm = start(folder)
    executor = llm.llm_engine.engine.executor
    failed = threading.Event()
    executor.group.monitor.on_failure(failed.set)
    os.kill(executor.group.monitor.processes[0].pid, signal.SIGKILL)
    assert failed.wait(30), "an idle engine does not look at its ranks"
    with pytest.raises(EngineDead, match="killed by signal 9"):
        llm.generate("Hello", PARAMS, use_tqdm=False)
    assert_nothing_left(executor)


@pytest.mark.parametrize(
    ("point", "do"),
    [
        ("rank.load", "kill"),
        *tiers.long(
            *[("rank.start", do) for do in ("kill", "exit", "stop", "raise")],
            *[("rank.load", do) for do in ("exit", "stop", "raise")],
            *[("rank.build", do) for do in ("kill", "stop", "raise")],
        ),
    ],
)
def test_a_rank_that_fails_at_the_start_ends_the_start(folder, faults, point, do):
    faults.arm(Fault(point, do))
    want = rf"rank 1 .*{HOW[do]}" if do != "raise" else f"Injected: injected at {point}"
    before, began = open_files(), time.monotonic()
    with pytest.raises(QuireError, match=want):
        start(folder)
    assert time.monotonic() - began < 100, "it waited for a limit"
    assert not [one for one in threading.enumerate() if one.name == "quire-rank-monitor"]
    assert open_files() == before


def test_collectives_are_aborted_once_and_awaited_when_an_engine_ends(folder, faults, monkeypatch):
    """NCCL waits for the other ranks in a communicator that is dropped, and CUDA ends a program
    that exits while it is aborted."""
    aborts, done = [], []

    def abort(own):
        aborts.append(threading.Thread(target=lambda: done.append(time.sleep(0.1))))
        aborts[-1].start()
        return aborts

    monkeypatch.setattr(ProcessGroupCollectives, "close_in_thread", abort)
    executor = start(folder).llm_engine.engine.executor
    assert not aborts
    executor.shutdown()
    executor.shutdown()
    assert len(aborts) == len(done) == 1


@pytest.mark.parametrize("name", ["lm_head", *tiers.long("down_proj")])
def test_numbers_of_one_rank_that_are_not_finite_fail_their_request_alone(tmp_path, name):
    """Of the last rank's strip of the vocabulary, and of its term of a sum. No rank parts."""
    folder = write_model(tmp_path / "llama", "llama")
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    spoilt = next(tensor for key, tensor in tensors.items() if f"{name}.weight" in key)
    (spoilt[-3:] if name == "lm_head" else spoilt[:, -3:]).fill_(float("nan"))
    save_file(tensors, file, metadata={"format": "pt"})
    llm = start(str(folder))
    for more in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}, {"top_p": 0.5, "seed": 3}):
        params = SamplingParams(max_tokens=8, ignore_eos=True, **more)
        (made,) = llm.generate("Hello", params, use_tqdm=False)[0].outputs
        assert (made.finish_reason, list(made.token_ids)) == ("error", [])
    llm.llm_engine.engine.shutdown()


@pytest.mark.long("a second of waiting; an engine")
def test_a_rank_that_is_stopped_does_not_outlive_the_engine(folder, faults):
    llm = start(folder)
    executor = llm.llm_engine.engine.executor
    os.kill(executor.group.monitor.processes[0].pid, signal.SIGSTOP)
    assert_nothing_left(executor)


@pytest.mark.parametrize("rounds", [1, *tiers.long(20)])
def test_engines_side_by_side_leave_nothing(folder, rounds):
    before = open_files()
    for _ in range(rounds):
        engines = [start(folder), start(folder)]
        texts = [llm.generate("Hello", PARAMS, use_tqdm=False)[0].outputs[0] for llm in engines]
        assert texts[0].token_ids == texts[1].token_ids
        for llm in engines:
            llm.llm_engine.engine.shutdown()
        del llm, engines
    assert open_files() == before
