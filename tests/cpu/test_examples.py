"""Every example that needs no server runs, on the embedded model. tests/server/test_docs_run.py has the rest."""

import pathlib
import runpy
import subprocess
import sys

import pytest
import torch

from quire.env import child_environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


OF_PROCESSES = ROOT / "examples/async_engine.py"
OF_RANKS = ROOT / "examples/external_launcher.py"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "path",
    [path for path in EXAMPLES if path not in (OF_PROCESSES, OF_RANKS)],
    ids=lambda path: path.name,
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


@pytest.mark.usefixtures("forked")
@pytest.mark.slow("a program for each of two ranks")
def test_an_example_of_ranks_prints_once():
    """Started as torchrun starts it: a store of the launcher's, and variables."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    where |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2"}
    programs = [
        subprocess.Popen(
            [sys.executable, str(OF_RANKS), "--device", "cpu"],
            env=child_environment(**where, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [program.communicate(timeout=120) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], texts
    assert "Paris" in texts[0][0]
    assert not texts[1][0]


@pytest.mark.long("torchrun imports torch three times")
def test_the_example_of_ranks_runs_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [str(OF_RANKS), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_each_example_is_documented():
    page = (ROOT / "examples/README.md").read_text()
    assert all(f"`{path.name}`" in page for path in EXAMPLES)
