"""Kernels are translated by Triton's compiler, not only run by its interpreter. See compile_cases.py."""

import json
import os
import subprocess
import sys

import pytest

from tests import tiers

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.slow("the compiler translates hundreds of kernels")
def test_the_compiler_takes_every_kernel():
    command = [
        sys.executable,
        "-m",
        "tests.cpu.gpu_kernels.compile_cases",
        str(tiers.amount(1, 9999)),
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}  # no interpreter
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *refused, count = map(json.loads, done.stdout.splitlines())
    assert not refused
    assert count > 50
