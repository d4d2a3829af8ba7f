"""Every example that needs no server runs, on the embedded model. tests/server/test_docs_run.py has the rest."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def output_of(arguments):
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_an_example_runs(path):
    assert output_of([str(path)]).strip()


def test_each_example_is_documented():
    page = (ROOT / "examples/README.md").read_text()
    assert all(f"`{path.name}`" in page for path in EXAMPLES)
