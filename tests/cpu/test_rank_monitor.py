"""How a rank that fails is found and named: by rules, with a clock of the test's."""

import os
from types import SimpleNamespace

import pytest

from quire import LLM
from quire.core.types import StepPlan, StepResult
from quire.engine.startup import rank_process
from quire.errors import ConfigError, EngineDead
from quire.executors import rank_monitor
from quire.executors.external_launcher import Executor as ExternalLauncher
from quire.executors.rank_monitor import (
    CHECK_INTERVAL_S,
    FAILURE_GRACE_S,
    MAX_STOPPED_S,
    RankMonitor,
    WatchedMessage,
)
from quire.executors.rank_status import RankStatusPage, create_status_page
from quire.runner.model_input import ModelInputBuilder
from quire.runner.slots import TableShape
from tests.cpu.tiny_models import write_model

LIMIT_S = 20.0


class Scene:
    """Three ranks, of which 1 and 2 are processes that do not exist."""

    def __init__(self, monkeypatch):
        descriptor = create_status_page(3)
        self.page = RankStatusPage(descriptor, 3)
        os.close(descriptor)
        self.ranks = [self.page.writer(rank) for rank in range(3)]
        self.message = None
        self.now, self.states = 100.0, {"11": "S", "22": "S"}
        self.signals = []
        self.monitor = RankMonitor(self.page, ["cpu"] * 3, lambda: self.message)
        self.monitor.processes = [
            SimpleNamespace(pid=pid, send_signal=lambda number, pid=pid: self.signals.append(pid))
            for pid in (11, 22)
        ]
        monkeypatch.setattr(rank_monitor, "process_state", lambda pid: self.states[str(pid)])
        monkeypatch.setattr(rank_monitor.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(rank_monitor.time, "sleep", lambda seconds: None)
        self.monitor._checked_at = self.now

    def send(self, number, is_step=True):
        self.message = WatchedMessage(number, f"step {number}", LIMIT_S, is_step)
        for rank in self.ranks:
            rank.begin(number)

    def passes(self, seconds):
        """The fault that is found within so many seconds, and after how many."""
        for i in range(1, round(seconds / CHECK_INTERVAL_S) + 1):
            self.now += CHECK_INTERVAL_S
            if (found := self.monitor._find_fault()) is not None:
                return found, i * CHECK_INTERVAL_S
        return None


@pytest.fixture
def scene(monkeypatch):
    return Scene(monkeypatch)


def test_idle_ranks_have_no_limit(scene):
    assert scene.passes(1000) is None


def test_a_hanging_rank_is_the_one_that_is_behind(scene):
    scene.send(4)
    for rank, count in enumerate((9, 7, 9)):
        scene.ranks[rank].collective_words[0] = count
        scene.ranks[rank].collective_words[1] = 2
    why, after = scene.passes(1000)
    assert why.startswith("rank 1 (process 11, cpu) has not finished step 4 after 20 s")
    assert "its last collective is number 7 (all_gather); of rank 2: " in why
    assert LIMIT_S < after < LIMIT_S + 2
    assert scene.signals == [11, 22], "their stacks go to the log"


def test_a_rank_that_has_finished_is_not_blamed(scene):
    scene.send(4)
    scene.ranks[0].finish(4)
    scene.ranks[1].finish(4)
    assert scene.passes(1000)[0].startswith("rank 2 (process 22, cpu) has not finished")


def test_an_engine_that_does_not_wait_for_its_step_is_no_hanging_rank(scene):
    """A wait was interrupted by Ctrl-C, or the engine itself hangs: its watchdog looks at it."""
    scene.send(4)
    scene.ranks[1].finish(4)
    scene.ranks[2].finish(4)
    assert scene.passes(1000) is None


def test_a_step_that_finishes_in_time_starts_no_clock_for_the_next(scene):
    for number in range(1, 20):
        scene.send(number)
        assert scene.passes(LIMIT_S - 1) is None
        for rank in scene.ranks:
            rank.finish(number)


def test_time_in_which_a_rank_compiles_does_not_count(scene):
    scene.send(1)
    scene.ranks[2].mark_preparing(True)
    assert scene.passes(1000) is None
    scene.ranks[2].mark_preparing(False)
    assert LIMIT_S < scene.passes(1000)[1] < LIMIT_S + 2


def test_time_in_which_the_machine_slept_does_not_count(scene):
    scene.send(1)
    scene.now += 10_000
    assert scene.passes(LIMIT_S - 3) is None


def test_a_rank_that_raised_alone_is_named_with_its_error(scene):
    scene.send(6)
    scene.ranks[2].fail(6, ValueError("no"))
    scene.ranks[0].finish(6)
    why, after = scene.passes(1000)
    assert why.startswith("rank 2 (process 22, cpu) failed alone in step 6: ValueError: no; rank 1")
    assert FAILURE_GRACE_S < after < FAILURE_GRACE_S + 2


def test_ranks_that_raise_together_have_not_failed(scene):
    scene.send(6)
    for rank in scene.ranks:
        rank.fail(6, ValueError("no"))
    assert scene.passes(1000) is None


def test_a_call_that_raises_on_one_rank_leaves_no_other_waiting(scene):
    scene.send(6, is_step=False)
    scene.ranks[2].fail(6, ValueError("no"))
    assert scene.passes(LIMIT_S - 1) is None


def test_a_rank_may_be_stopped_for_a_moment_only(scene):
    scene.states["22"] = "T"
    assert scene.passes(MAX_STOPPED_S - 0.5) is None
    scene.states["22"] = "S"
    assert scene.passes(10) is None
    scene.states["22"] = "T"
    why, after = scene.passes(10)
    assert why.startswith("rank 2 (process 22, cpu) was stopped by a signal")
    assert MAX_STOPPED_S < after < MAX_STOPPED_S + 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "llama", "llama"))


@pytest.mark.slow("the first import of all that an engine needs")
def test_a_rank_is_started_with_its_share_of_the_cores_and_without_multicast(folder, monkeypatch):
    seen = []

    def spawn(module, end, *, env, fds):
        seen.append(env)
        raise ConfigError("enough")

    monkeypatch.setattr(rank_process, "spawn_process", spawn)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    with pytest.raises(ConfigError, match="enough"):
        LLM(folder, device="cpu", tensor_parallel_size=2, max_model_len=64)
    (env,) = seen
    assert env["OMP_NUM_THREADS"] == "2"
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        assert env[name] == os.environ[name] == {"NCCL_NVLS_ENABLE": "0"}.get(name, env[name])
    assert env["NCCL_DEBUG"] == "INFO"


class Group:
    """Two ranks: what the other one has is given."""

    def __init__(self):
        self.other = None

    def size(self):
        return 2

    def _allgather_base(self, out, own):
        out[0], out[1] = own[0], own[0] if self.other is None else self.other
        return SimpleNamespace(wait=lambda: None)


def test_programs_with_different_steps_are_found_before_a_token_is_published():
    done = SimpleNamespace(wait=lambda: StepResult(()))
    local = SimpleNamespace(launch=lambda step: done, recover=lambda: None)
    group = Group()
    inputs = ModelInputBuilder(TableShape(2, 4, 1, 16))
    executor = ExternalLauncher(inputs, local, group, None)
    assert executor.submit(StepPlan(1, ())).wait() == StepResult(())
    executor.recover()
    group.other = 5
    with pytest.raises(EngineDead, match="all must make the same calls"):
        executor.submit(StepPlan(2, ())).wait()
    with pytest.raises(EngineDead, match="different steps 2"):
        executor.recover()
