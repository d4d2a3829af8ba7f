"""One model on two nodes, which are this machine: tokens, failures, and what is left afterwards."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from quire import LLM, SamplingParams
from quire.engine.startup.rank_process import compare_ranks
from quire.env import child_environment
from quire.errors import ConfigError, EngineDead
from quire.executors import rank_monitor
from quire.executors.node_head import NodeHead
from quire.executors.node_messages import EndRanks
from tests import tiers
from tests.cpu.large_messages import send_large
from tests.cpu.tiny_models import write_model
from tests.faults.arming import Fault, Faults
from tests.faults.node import SECRET

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of several processes")]

SIZES = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 60, "device": "cpu"}
PROMPTS = ["What", [70, 70, 5], "The capital of France is Paris. " * 4, list(range(60, 160))]
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)
ADDRESS = f"127.{1 + os.getpid() // 60000}.{os.getpid() // 250 % 240}.{1 + os.getpid() % 250}"
"""Of this test process alone, so its port is free."""
PORT = 29501
ENDS_S = 60.0
"""Patience of the tests; what is promised is 10 s."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "llama", "llama"))


@pytest.fixture
def node(monkeypatch):
    """Starts the agent of node 1, with faults for its ranks."""
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", SECRET.decode())
    monkeypatch.setattr(rank_monitor, "FAILURE_GRACE_S", 0.6)
    faults, started = Faults(), []

    def start(number=1, gone_s=ENDS_S, **variables):
        words = (ADDRESS, PORT, number, faults.folder, gone_s)
        command = [sys.executable, "-m", "tests.faults.node", *map(str, words)]
        started.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=child_environment(**variables),
            )
        )
        return started[-1]

    start.faults = faults
    yield start
    for one in started:
        one.kill()
        one.communicate()
    faults.remove()


@pytest.fixture
def late_message(monkeypatch):
    """The head's last message reaches an agent after the end of the connection for steps."""
    send = NodeHead._send

    def delayed(self, identity, message):
        if isinstance(message, EndRanks):
            self._steps.close(0)
            time.sleep(0.3)
        return send(self, identity, message)

    monkeypatch.setattr(NodeHead, "_send", delayed)


def head(folder, **options):
    more = {"nnodes": 2, "master_addr": ADDRESS, "master_port": PORT}
    return LLM(folder, **SIZES, **{"tensor_parallel_size": 2, **more, **options})


def ids(llm):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def ranks_of(agent):
    return [one for one in psutil.Process(agent.pid).children() if "quire-rank" in one.name()]


def ended(processes, within_s=ENDS_S):
    return not psutil.wait_procs(processes, within_s)[1]


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2},
        *tiers.long(
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 1},
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
            {"tensor_parallel_size": 4},
        ),
    ],
    ids=lambda sizes: "x".join(map(str, sizes.values())),
)
def test_tokens_are_those_of_one_rank(folder, node, sizes, late_message):
    want = ids(LLM(folder, **SIZES))
    agent = node()
    llm = head(folder, **sizes)
    assert ids(llm) == want
    assert ids(llm) == want, "prompts found in the prefix cache"
    ranks = ranks_of(agent)
    assert len(ranks) == llm.llm_engine.config.parallel.ranks // 2
    send_large(llm.llm_engine.engine.executor.group, ranks)
    llm.llm_engine.engine.shutdown()
    assert agent.wait(ENDS_S) == 0, "it ends with the head, in order"
    assert ended(ranks)


@pytest.mark.long("ranks of two nodes")
def test_a_node_with_other_kernels_is_refused(folder, node):
    """Decode steps of the head would be replayed at a padded size, and those of the node not."""
    node(QUIRE_CPU_ISA="none")
    wanted = r"rank 1 \(process \d+, cpu of node 1 .*\) has no native kernels, and the head native "
    with pytest.raises(ConfigError, match=wanted + r"kernels for .* QUIRE_CPU_ISA on all"):
        head(folder)


def test_what_differs_between_ranks_is_named():
    files = {"config.json": "1", "a.bin": "2"}
    own = ("native kernels for avx2", files)
    compare_ranks("rank 1", own, own)
    with pytest.raises(
        ConfigError, match=r"^rank 1 has native kernels for sse2, and the head .*2:"
    ):
        compare_ranks("rank 1", own, ("native kernels for sse2", files))
    with pytest.raises(
        ConfigError, match=r"^rank 1 has another model .* lacks a\.bin, the head has"
    ):
        compare_ranks("rank 1", own, (own[0], {"config.json": "1"}))


HOW = {
    "kill a rank": r"rank 1 \(process \d+, cpu of node 1 \(127\.0\.0\.1\)\) was killed by signal 9",
    "stop a rank": r"rank 1 \(process \d+, cpu of node 1 .*\) was stopped by a signal",
    "raise": r"rank 1 \(process \d+, cpu of node 1 .*\) failed alone in step \d+ .*: Injected: ",
    "hang": r"rank 1 \(process \d+, cpu of node 1 .*\) has not finished step \d+",
    "kill the agent": r"node 1 \(127\.0\.0\.1\) is gone: its connection is closed.*; it had rank 1",
    "stop the agent": r"node 1 \(127\.0\.0\.1\) is gone: .*or it does not answer; it had rank 1",
    "end the agent": r"node 1 \(127\.0\.0\.1\) is gone: ",
}


@pytest.mark.long("two starts of an engine on two nodes")
@pytest.mark.parametrize("how", HOW)
def test_a_failure_is_named_and_the_agent_serves_the_next_engine(folder, node, how):
    """An agent that was killed does not; all of its ranks end."""
    agent = node()
    llm = head(folder, **({"rank_timeout_seconds": 1} if how == "hang" else {}))
    want, ranks = ids(llm), ranks_of(agent)
    monitor = llm.llm_engine.engine.executor.group.monitor
    failed = threading.Event()
    monitor.on_failure(failed.set)
    began = time.monotonic()
    if how in ("raise", "hang"):
        node.faults.arm(Fault("rank.forward", how, at=4))
    else:
        what = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM}
        victim = agent if how.endswith("agent") else ranks[0]
        os.kill(victim.pid, what[how.split()[0]])
        assert failed.wait(ENDS_S), "an idle engine does not look at its nodes"
    with pytest.raises(EngineDead, match=HOW[how]):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    print(f"{how}: found after {time.monotonic() - began:.2f} s: {monitor.failure}")
    llm.llm_engine.engine.shutdown()
    if how.endswith("agent"):
        if how.startswith("stop"):
            os.kill(agent.pid, signal.SIGCONT)
        else:
            assert ended(ranks), "they end with their agent"
            agent = node()
    assert ended(ranks)
    print(f"{how}: all gone after {time.monotonic() - began:.2f} s")
    node.faults.clear()
    again = head(folder)
    assert ids(again) == want
    assert agent.poll() is None
    again.llm_engine.engine.shutdown()
    assert agent.wait(ENDS_S) == 0


def test_what_a_rank_cannot_start_with_names_its_node(folder, node, tmp_path):
    """The agent waits for the next engine then, and leaves when the head is gone."""
    agent = node(gone_s=1.0)
    node.faults.arm(Fault("rank.start", "raise"))
    with pytest.raises(EngineDead.__mro__[1], match=r"rank 1 .*node 1 .*: Injected: injected"):
        head(folder)
    said, _ = agent.communicate(timeout=ENDS_S)
    assert agent.returncode == 1
    assert re.search("the head's engine has ended: the start failed: .*Injected", said), said
    assert "the head is gone: nothing listens at" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 3}, "2 ranks, which nnodes=3 machines cannot share evenly"),
        ({"node_rank": 1}, "only node 0 has an engine; on the others run `quire serve MODEL"),
        ({"headless": True}, "headless=True is for `quire serve`"),
        ({"nnodes": 1, "node_rank": 1}, "node_rank=1 needs nnodes > 1"),
        ({"distributed_executor_backend": "external_launcher"}, "are joined by 'mp'"),
        ({"data_parallel_size": 2}, "ranks of several engines are not spread over machines"),
        ({"master_addr": "192.0.2.1"}, "cannot listen at 192.0.2.1:29501"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder, monkeypatch, options, message):
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", SECRET.decode())
    with pytest.raises(ConfigError, match=message):
        head(folder, **options)


def test_several_machines_need_a_secret(folder, monkeypatch):
    monkeypatch.delenv("QUIRE_CLUSTER_SECRET", raising=False)
    with pytest.raises(ConfigError, match=r"nnodes=2 needs a secret that all machines share"):
        head(folder)
