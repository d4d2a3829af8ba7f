"""The invariance and property workload notices bugs: all that are listed in planted.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pure.core.planted import BLAME, BUGS, CAUGHT

ROOT = Path(__file__).resolve().parents[3]
SEEDS = 40


ALL = (*BUGS, *BLAME)


CASES = [
    pytest.param(i, id=bug.what, marks=pytest.mark.long("a second each") if i % 2 else ())
    for i, bug in enumerate(ALL)
]


@pytest.mark.parametrize("number", CASES)
def test_a_planted_bug_is_caught(number):
    command = [sys.executable, "-m", "tests.pure.core.planted", str(number), str(SEEDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == CAUGHT, done.stdout + done.stderr


def test_there_are_enough_bugs():
    assert len(BUGS) >= 14
    assert len({bug.what for bug in ALL}) == len(ALL)
