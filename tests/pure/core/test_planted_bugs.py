"""The tests of the core find each bug of planted_bugs.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pure.core.planted_bugs import BUGS, CAUGHT, CORE, ISOLATION_BUGS, insert_bug

ROOT = Path(__file__).resolve().parents[3]
SEEDS = 40


ALL = (*BUGS, *ISOLATION_BUGS)


CASES = [
    pytest.param(
        i, id=bug.description, marks=pytest.mark.long("half a second each") if i % 12 else ()
    )
    for i, bug in enumerate(ALL)
]


@pytest.fixture(scope="module")
def found(request):
    """What was found of each bug that a selected test is about, by number."""
    tests = [item for item in request.session.items if item.module is request.module]
    numbers = {item.callspec.params["number"] for item in tests if hasattr(item, "callspec")}
    words = [str(SEEDS), *map(str, sorted(numbers))]
    command = [sys.executable, "-m", "tests.pure.core.planted_bugs", *words]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    lines = [line.split(" ", 2) for line in process.stdout.splitlines()]
    return {int(number): (outcome, why) for number, outcome, why in lines} | {None: process.stderr}


@pytest.mark.slow("searches a failure for each bug")
@pytest.mark.parametrize("number", CASES)
def test_a_planted_bug_is_caught(number, found):
    outcome, why = found.get(number, ("crashed", found[None]))
    assert outcome == CAUGHT, f"{outcome}: {why}"


def test_each_bug_has_its_place_in_the_source():
    for bug in ALL:
        insert_bug(bug, (CORE / bug.file).read_text(encoding="utf-8"))


def test_there_are_enough_bugs():
    assert len(BUGS) >= 14
    assert len({bug.description for bug in ALL}) == len(ALL)
