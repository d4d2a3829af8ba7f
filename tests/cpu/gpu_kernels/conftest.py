"""The GPU kernels in Triton's interpreter: no GPU is needed, the arithmetic is the kernels' own.

Infinities are ordinary values on a GPU; numpy, which does the sums here, would warn of them.
"""

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    """Where triton was loaded for the GPU before tests/cpu/conftest.py, say so and skip."""
    for item in items:
        if not item.path.is_relative_to(Path(__file__).parent):
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
        if os.environ.get("TRITON_INTERPRET") != "1":
            item.add_marker(pytest.mark.skip(reason="triton is loaded for the GPU: run tests/cpu"))
