"""Rules that a tool can prove: who may read the environment, what may be imported when."""

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
    readers = [p for p in FILES if re.search(r"os\.environ|os\.getenv|getenv\(", code_of(p))]
    assert [p.name for p in readers if p != ROOT / "quire/env.py"] == []


def test_no_code_unpickles_or_evaluates_what_comes_from_outside():
    bad = re.compile(
        r"\bimport (pickle|cloudpickle|marshal|dill)\b|\beval\(|\bexec\(|(?<!\w)compile\("
    )
    allowed = {"quire/as_vllm.py"}  # runs the user's own script, as `python SCRIPT` would
    found = []
    for path in FILES:
        source = re.sub(r"\.(compile|eval)\(|\bdef compile\(", "", code_of(path))
        if bad.search(source) and str(path.relative_to(ROOT)) not in allowed:
            found.append(str(path.relative_to(ROOT)))
    assert found == []


def test_torch_load_always_has_weights_only():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(
                    k.arg == "weights_only" and getattr(k.value, "value", None) is True
                    for k in node.keywords
                ), f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    "module", ["torch", "transformers", "pydantic", "fastapi", "numpy", "jinja2"]
)
def test_import_quire_stays_light(module):
    code = f"import sys, quire; quire.SamplingParams; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_module_is_named_for_nothing():
    bad = {"utils.py", "common.py", "helpers.py", "misc.py"}
    assert [p for p in FILES if p.name in bad] == []
