"""The tests of the core find each bug of planted_bugs.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pure.core.planted_bugs import BUGS, CAUGHT, ISOLATION_BUGS

ROOT = Path(__file__).resolve().parents[3]
SEEDS = 40


ALL = (*BUGS, *ISOLATION_BUGS)


CASES = [
    pytest.param(i, id=bug.description, marks=pytest.mark.long("a second each") if i % 2 else ())
    for i, bug in enumerate(ALL)
]


@pytest.mark.parametrize("number", CASES)
def test_a_planted_bug_is_caught(number):
    command = [sys.executable, "-m", "tests.pure.core.planted_bugs", str(number), str(SEEDS)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == CAUGHT, process.stdout + process.stderr


def test_there_are_enough_bugs():
    assert len(BUGS) >= 14
    assert len({bug.description for bug in ALL}) == len(ALL)
