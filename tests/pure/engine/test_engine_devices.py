"""The devices of a server's engines: GPUs in turn, or shares of the processor."""

from types import SimpleNamespace

import pytest

from quire.config.options import Options
from quire.engine.supervise import engine_devices
from quire.engine.supervise.engine_devices import engine_environments
from quire.errors import ConfigError


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cuda = SimpleNamespace(
        available=lambda: True, device_properties=lambda: SimpleNamespace(device_count=4)
    )
    monkeypatch.setattr(engine_devices, "cuda", cuda)


def environments(**flat):
    return engine_environments(Options.from_flat(flat))


def visible(**flat):
    return [one["CUDA_VISIBLE_DEVICES"] for one in environments(**flat)]


@pytest.mark.usefixtures("gpus")
def test_each_engine_has_gpus_of_its_own(monkeypatch):
    assert environments() == [{}]
    assert visible(data_parallel_size=4) == ["0", "1", "2", "3"]
    assert visible(data_parallel_size=2, tensor_parallel_size=2) == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-ab,7")
    assert visible(data_parallel_size=2) == ["5", "GPU-ab"]


@pytest.mark.usefixtures("gpus")
def test_too_few_gpus_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"needs 6 GPUs, and 4 are visible; use at most .*=2"):
        environments(data_parallel_size=3, tensor_parallel_size=2)


def test_engines_on_a_cpu_share_its_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    found = environments(device="cpu", data_parallel_size=2)
    assert found == [{"OMP_NUM_THREADS": "3"}] * 2
    found = environments(device="cpu", data_parallel_size=9)
    assert found == [{"OMP_NUM_THREADS": "1"}] * 9
