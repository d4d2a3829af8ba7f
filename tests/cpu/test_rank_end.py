"""How engines of two ranks end: within a bound, however they are ended, and with nothing left."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from quire import LLM, SamplingParams, env
from quire.distributed.collectives import ProcessGroupCollectives, connect
from quire.distributed.mesh import Mesh
from quire.engine.startup.rank_process import rendezvous_path
from quire.executors import rank_group, rank_monitor
from tests import fork_server, tiers
from tests.cpu.tiny_models import write_model
from tests.faults.arming import Fault
from tests.faults.ranks import of_ranks

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of two processes")]

SIZES = {
    "dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 60, "device": "cpu",
    "tensor_parallel_size": 2, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)
BOUND_S = 8.0
"""Of an end: far above what it takes, and below what a destructor or a limit would."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "llama", "llama"))


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.setattr(rank_monitor, "MAX_STOPPED_S", 0.6)
    with of_ranks() as made:
        yield made


class Ended:
    """Within: an engine ends. Afterwards its rank is gone, and rank 0's collectives have ended."""

    def __init__(self, executor):
        self.pids = [one.pid for one in executor.group.monitor.processes]

    def __enter__(self):
        self.began = time.monotonic()

    def __exit__(self, *error):
        assert time.monotonic() - self.began < BOUND_S
        for pid in self.pids:
            assert not os.path.exists(f"/proc/{pid}"), pid
        names = [one.name for one in threading.enumerate()]
        assert not {"quire-abort", "quire-rank-monitor"}.intersection(names), names


def one_step(llm):
    llm.llm_engine.add_request("1", "Hello", PARAMS)
    llm.llm_engine.step()


def test_ranks_finish_their_steps_before_one_of_them_ends(folder, faults, monkeypatch, caplog):
    """Steps are in flight: no collective of them is cut off."""
    calls = []
    close = rank_group.end_collectives
    monkeypatch.setattr(
        rank_group, "end_collectives", lambda *args, **how: [calls.append(how), close(*args, **how)]
    )
    llm = LLM(folder, **SIZES, steps_in_flight=2)
    one_step(llm)
    core = llm.llm_engine.engine
    assert core._in_flight
    group = core.executor.group
    sent = group._number
    with Ended(core.executor):
        core.shutdown()
    assert calls == [{"failed": False}]
    assert [group._local.page.read(rank).done for rank in (0, 1)] == [sent + 1] * 2
    assert "killed" not in caplog.text


@pytest.mark.parametrize("how", ["kill", "stop", *tiers.long("hang")])
def test_a_rank_that_cannot_finish_is_named(folder, faults, how, monkeypatch, caplog):
    monkeypatch.setattr(rank_group, "END_S", 1.2)
    llm = LLM(folder, **SIZES, steps_in_flight=2)
    one_step(llm)
    core = llm.llm_engine.engine
    (process,) = core.executor.group.monitor.processes
    if how == "hang":
        faults.arm(Fault("rank.forward", "hang"))
        core._submit_step()
    else:
        os.kill(process.pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    with Ended(core.executor):
        core.shutdown()
    text = {
        "kill": "was killed by signal 9", "stop": "was stopped by a signal",
        "hang": "has not finished its last steps",
    }[how]  # fmt: skip
    assert f"the ranks were killed: rank 1 (process {process.pid}, cpu) {text}" in caplog.text


def test_an_engine_that_is_dropped_ends(folder, faults):
    llm = LLM(folder, **SIZES)
    one_step(llm)
    runner = weakref.ref(llm.llm_engine.engine.executor._local.runner)
    with Ended(llm.llm_engine.engine.executor):
        del llm
        gc.collect()
    assert runner() is None


class Connection:
    """Of a group: an abort that ends only when the group before it has ended."""

    def __init__(self, name, order):
        self.name, self.order = name, order

    def abort(self):
        time.sleep(0.02)
        self.order.append((self.name, threading.current_thread()))


def test_connections_are_given_back_one_after_the_other_in_a_thread():
    order = []
    comm = ProcessGroupCollectives(Connection("tp", order), stages=Connection("pp", order))
    comm.share_experts(Connection("dp", order), Connection("ep", order))
    threads = comm.close_in_thread()
    assert threads == comm.close_in_thread() == comm.abort_in_threads()
    rank_group.end_collectives(comm, failed=False)
    assert order == [(name, threads[0]) for name in ("tp", "pp", "dp", "ep")]


def test_a_connection_that_does_not_end_is_left_to_its_thread(monkeypatch, caplog):
    monkeypatch.setattr(rank_group, "ABORT_S", 0.1)
    go_on = threading.Event()
    comm = ProcessGroupCollectives(SimpleNamespace(abort=go_on.wait))
    rank_group.end_collectives(comm, failed=True)
    assert "the collectives of a rank did not end in 0 s" in caplog.text
    go_on.set()


def test_threads_of_torch_look_for_no_file_of_a_group():
    """The file in which ranks met is gone; one that looks for it waits for the store's limit."""
    for name in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"):
        assert env.rank_environment(1)[name] == "0"
    stores = []
    make = torch.distributed.FileStore

    def store(*args):
        stores.append(make(*args))
        return stores[-1]

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(torch.distributed, "FileStore", store)
        file = os.memfd_create("quire-test")
        with rendezvous_path(file) as path:
            for one in [pool.submit(connect, Mesh(2, rank=rank), path) for rank in range(2)]:
                one.result().close_in_thread()
        os.close(file)
    began = time.monotonic()
    with pytest.raises(torch.distributed.DistStoreError):
        stores[0].check(["any"])
    assert time.monotonic() - began < 5


BEGIN = f"""
import os, signal, sys, threading
from quire import LLM, SamplingParams
def start():
    llm = LLM(FOLDER, **{SIZES!r})
    for one in llm.llm_engine.engine.executor.group.monitor.processes:
        print(one.pid, flush=True)
    return llm
params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)
llm = start()
"""
PROGRAMS = {
    "end": ("llm.generate('Hello', params)", 0),
    "error": ("llm.generate('Hello', params); raise RuntimeError('ours')", 1),
    "Ctrl-C in a step": (
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    while True: llm.generate('Hello', params)\n"
        "except KeyboardInterrupt: sys.exit(7)",
        7,
    ),
    "killed rank": (
        "os.kill(llm.llm_engine.engine.executor.group.monitor.processes[0].pid, 9)\n"
        "llm.generate('Hello', params)",
        1,
    ),
    "one after the other": (
        "llm.generate('Hello', params); del llm; llm = start(); llm.generate('Hello', params)",
        0,
    ),
    "in a function": (
        "def run(llm): return llm.generate('Hello', params)[0]\n"
        "second = start(); run(second); run(llm); sys.exit(3)",
        3,
    ),
}


EVERYDAY = "error", "Ctrl-C in a step", "one after the other"


@pytest.mark.parametrize("name", [*EVERYDAY, *tiers.long(*sorted({*PROGRAMS} - {*EVERYDAY}))])
def test_a_program_ends(folder, name):
    code, status = PROGRAMS[name]
    fork_server.start()
    began = time.monotonic()
    program = fork_server.Popen(
        [sys.executable, "-c", BEGIN.replace("FOLDER", repr(folder)) + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env.child_environment(OMP_NUM_THREADS="1"),
    )
    try:
        out, errors = program.communicate(timeout=30)
    finally:
        program.kill()
    assert program.returncode == status, errors
    assert time.monotonic() - began < 2 * BOUND_S
    assert "terminate" not in errors
    for pid in [int(one) for one in out.split() if one.isdigit()]:
        assert not os.path.exists(f"/proc/{pid}"), errors
