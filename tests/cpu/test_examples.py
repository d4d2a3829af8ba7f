"""Every example that needs no server runs, on the embedded model. tests/server/test_docs_run.py has the rest."""

import pathlib
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


OF_PROCESSES = ROOT / "examples/async_engine.py"


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path != OF_PROCESSES], ids=lambda path: path.name
)
@pytest.mark.filterwarnings("default")
def test_an_example_runs(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.usefixtures("forked")
def test_an_example_with_an_engine_process_ends():
    command = [sys.executable, str(OF_PROCESSES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_each_example_is_documented():
    page = (ROOT / "examples/README.md").read_text()
    assert all(f"`{path.name}`" in page for path in EXAMPLES)
