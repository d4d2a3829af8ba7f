"""Processes that import before they are ranks; what all ranks report of their start."""

import os

import pytest

from quire import LLM
from quire.config.options import ParallelOptions
from quire.engine.startup import early_ranks
from quire.engine.startup.startup_timer import CONCURRENT_PREFIX
from tests.cpu.tiny_models import write_model


@pytest.mark.slow("a rank that imports")
def test_a_process_that_started_early_becomes_the_rank(tmp_path):
    """One of three has died by then, and one is not needed."""
    early_ranks.start_early_ranks(3)
    dead, used, left = [one.process for one in early_ranks._early]
    dead.kill()
    dead.wait()
    llm = LLM(str(write_model(tmp_path)), device="cpu", max_model_len=64, num_gpu_blocks_override=8,
              tensor_parallel_size=2)  # fmt: skip
    engine = llm.llm_engine.engine
    assert engine.executor.group.monitor.processes == [used]
    assert left.poll() is not None
    assert len(llm.generate("What", use_tqdm=False)[0].outputs[0].token_ids) == 16
    stages = llm.llm_engine.built.seconds
    for name in ("before", "model files", "meeting", "weights"):
        assert f"{CONCURRENT_PREFIX}rank 1 {name}" in stages
    assert "meeting" in stages
    engine.shutdown()
    assert used.poll() is not None


@pytest.mark.slow("processes that import")
def test_processes_that_started_for_a_standby_engine_are_its_ranks():
    early_ranks.start_early_ranks(2)
    first, second = early_ranks._early
    early_ranks.start_early_ranks(2)
    assert early_ranks._early == [first, second]
    early_ranks.start_early_ranks(1)
    assert early_ranks._early == [first]
    assert second.process.poll() is not None
    early_ranks.stop_early_ranks()


def test_a_process_that_gets_no_orders_ends_before_it_has_imported():
    one = early_ranks.EarlyRank()
    one._end.close()
    _, status, used = os.wait4(one.process.pid, 0)
    one.process.returncode = os.waitstatus_to_exitcode(status)
    assert one.process.returncode == 1
    assert used.ru_utime < 1.0  # torch alone takes more


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 0),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 3),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, 1),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, 0),
        ({"tensor_parallel_size": 2, "nnodes": 2}, 0),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, 0),
        ({"data_parallel_size": 4, "enable_expert_parallel": True}, 3),
    ],
)
def test_the_number_of_early_processes(options, count):
    assert early_ranks.count_early_ranks(ParallelOptions(**options)) == count
