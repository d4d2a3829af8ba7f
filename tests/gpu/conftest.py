"""Tests that need a GPU: skipped, with the reason, where there is none."""

import os
from pathlib import Path

import pytest
import torch


def _why_not():
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "triton runs in its interpreter in this process: run tests/gpu alone"
    return None


def pytest_collection_modifyitems(items):
    reason = _why_not()
    for item in items:
        if reason and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason=reason))
