"""Collectives between real processes over gloo are exact, and no tape swallows one."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from quire.distributed.collectives import ProcessGroupCollectives
from quire.kernels.native.op_tape import NotRecordableError, TapeRecorder
from tests import tiers


@pytest.mark.usefixtures("forked")
@pytest.mark.slow("a process for each rank")
@pytest.mark.parametrize("ranks", [3, *tiers.long(2)])
def test_sums_gathers_and_copies_between_processes_are_exact(ranks, tmp_path):
    command = [sys.executable, "-m", "tests.cpu.kernels.ranks", str(tmp_path / "rendezvous")]
    started = [
        subprocess.Popen([*command, str(rank), str(ranks)], stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        assert [process.communicate(timeout=120)[0] for process in started] == ["exact\n"] * ranks
    finally:
        for process in started:
            process.kill()


@pytest.mark.usefixtures("native_one")
def test_a_tape_refuses_a_collective():
    x, comm = torch.zeros(2, 64), ProcessGroupCollectives(SimpleNamespace(size=lambda: 2))
    for collective in (comm.all_reduce, comm.broadcast, lambda x: comm.all_gather(x, 128)):
        with pytest.raises(NotRecordableError):
            TapeRecorder().record(lambda collective=collective: collective(x))
