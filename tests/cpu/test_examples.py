"""What the documents show must run: the README's Python, and every example, on the embedded model."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


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


def test_the_readme_s_python_answers_what_it_asks():
    (block,) = BLOCKS
    assert "42" in output_of(["-c", block])


def test_each_example_is_told_of():
    page = (ROOT / "examples/README.md").read_text()
    assert all(f"`{path.name}`" in page for path in EXAMPLES)
