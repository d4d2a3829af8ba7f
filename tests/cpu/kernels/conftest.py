import shutil

import pytest
import torch

from quire import env
from quire.kernels.native import library as loader
from quire.platform.native_build import KERNELS, NativeBuildError


@pytest.fixture
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def poisoned():
    """Memory from torch.empty is NaN, so that what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _load(folder, threads, isa=None, extra=()):
    if not loader.available():
        pytest.skip("no native kernels on this machine")
    said = env.read()
    built = KERNELS.find_or_build(said.cache_dir, isa or said.cpu_isa, extra)
    copy = folder / f"kernels-{threads}.so"  # another file, so that it has threads of its own
    shutil.copy(built, copy)
    return loader.NativeLibrary(copy, threads)


@pytest.fixture(scope="session")
def native_one(tmp_path_factory):
    return _load(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="session")
def native_two(tmp_path_factory):
    return _load(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(params=["one thread", "two threads"])
def native(request, native_one, native_two, monkeypatch):
    """The ops run on the compiled kernels, with one thread and with two."""
    found = native_one if request.param == "one thread" else native_two
    monkeypatch.setattr(loader, "load_library", lambda: found)
    return found


@pytest.fixture
def narrow(request, tmp_path, monkeypatch):
    """The ops run on kernels compiled for a lesser CPU."""
    try:
        found = _load(tmp_path, 2, request.param, ("-O1",))
    except NativeBuildError as e:
        pytest.skip(str(e))
    monkeypatch.setattr(loader, "load_library", lambda: found)
    return found
