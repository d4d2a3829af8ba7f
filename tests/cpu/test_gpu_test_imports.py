"""The tests of tests/gpu are not collected without a GPU: at least what they import must exist."""

import ast
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "gpu"
WITH_TRITON = ("quire.kernels.gpu", "quire.runner.gpu")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_imported_names_exist(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire."):
            if node.module.startswith(WITH_TRITON):
                pytest.importorskip("triton")
            module = importlib.import_module(node.module)
            for one in node.names:
                if not hasattr(module, one.name):
                    importlib.import_module(f"{node.module}.{one.name}")
