"""Sums through the GPUs' memory, between two processes: on two cards, or on one that both share."""

import subprocess
import sys

import torch


def test_sums_and_norms_of_two_ranks_are_exact(tmp_path):
    command = [sys.executable, "-m", "tests.gpu.peer_ranks", str(tmp_path / "rendezvous")]
    started = [
        subprocess.Popen([*command, str(rank), "2"], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        found = [process.communicate(timeout=140)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert found == ["exact\n"] * 2, f"{torch.cuda.device_count()} cards"
