"""In this folder `import torch` is an error: what is tested here needs Python only.

The guard is up while a module of this folder is collected and while one of its tests runs, so
that other folders may share the process.
"""

from __future__ import annotations

import sys

import pytest

DEVICE_LIBRARIES = ("torch", "triton")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    with pytest.MonkeyPatch.context() as patch:
        _forbid(patch)
        return (yield)


@pytest.fixture(autouse=True)
def no_device_libraries(monkeypatch):
    _forbid(monkeypatch)


def _forbid(patch):
    for name in DEVICE_LIBRARIES:
        patch.setitem(sys.modules, name, None)  # None makes the import system refuse it
