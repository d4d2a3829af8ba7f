"""Rules that a tool can prove: which module may read the environment, what may be imported when."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "quire").rglob("*.py"))


def code_of(path):
    """Source without comments and docstrings."""
    return ast.unparse(ast.parse(path.read_text()))


def test_only_env_reads_the_environment():
    reads = re.compile(r"os\.environ|os\.getenv|getenv\(")
    readers = [p for p in FILES if "env" in p.read_text() and reads.search(code_of(p))]
    assert [p.name for p in readers if p != ROOT / "quire/env.py"] == []


@pytest.mark.parametrize(
    "module", ["torch", "transformers", "pydantic", "fastapi", "numpy", "jinja2"]
)
def test_import_quire_stays_light(module):
    code = f"import sys, quire; quire.SamplingParams; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_module_is_named_for_nothing():
    bad = {"utils.py", "common.py", "helpers.py", "misc.py"}
    assert [p for p in FILES if p.name in bad] == []
