"""The guard of this folder (conftest.py) is up."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_device_libraries_cannot_be_imported_here(name):
    with pytest.raises(ImportError):
        importlib.import_module(name)
