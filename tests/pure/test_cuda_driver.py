"""The CUDA driver's answers, and its failures, as facts or as a helpful error."""

import ctypes

import pytest

from quire.config.options import Options
from quire.errors import ConfigError
from quire.platform import cuda

UUID = bytes(range(16))
NO_DEVICE = 100


class Driver:
    """libcuda, as far as it is called. status: the result of cuInit."""

    def __init__(self, status=0, count=1):
        self.status, self.count, self.retained = status, count, 0

    def cuInit(self, flags):
        return self.status

    def cuDeviceGetCount(self, count):
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, text, size, device):
        text.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, total, device):
        total._obj.value = 150_000
        return 0

    def cuDeviceGetUuid(self, uuid, device):
        uuid[:] = UUID
        return 0

    def cuDeviceGetAttribute(self, value, which, device):
        value._obj.value = {75: 9, 76: 0, 16: 132}.get(which, 1)
        return 0

    def cuGetErrorName(self, status, text):
        text._obj.value = b"CUDA_ERROR_NO_DEVICE"
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.retained += 1
        return 0


class Nvml:
    def __init__(self, free):
        self.free = free

    def nvmlDeviceGetMemoryInfo(self, device, found):
        found._obj.free = self.free
        return 0


@pytest.fixture
def machine(monkeypatch):
    """Sets up a machine with this driver; nvml None: NVML is unavailable."""

    def make(driver, nvml=None, built_for_cpu=False):
        monkeypatch.setattr(cuda, "_torch_is_for_cpu", lambda: built_for_cpu)
        monkeypatch.setattr(cuda, "_driver", lambda: driver)
        found = None if nvml is None else (nvml, ctypes.c_void_p(1))
        monkeypatch.setattr(cuda, "_nvml_device", lambda uuid: found)
        cuda._probe_device.cache_clear()

    yield make
    cuda._probe_device.cache_clear()


def test_facts_are_those_of_the_driver(machine):
    machine(Driver(count=2), Nvml(90_000))
    facts = cuda.device_properties()
    assert cuda.available()
    assert (facts.name, facts.capability, facts.sm_count) == ("NVIDIA H200", (9, 0), 132)
    assert (facts.total_bytes, facts.free_bytes, facts.device_count) == (150_000, 90_000, 2)
    assert facts.uuid == "00010203-0405-0607-0809-0a0b0c0d0e0f"


def test_free_memory_is_that_of_now(machine):
    nvml = Nvml(90_000)
    machine(Driver(), nvml)
    assert cuda.device_properties().free_bytes == 90_000
    nvml.free = 50_000
    assert cuda.memory().free == 50_000


def test_without_nvml_all_memory_counts_as_free(machine):
    machine(Driver())
    assert cuda.memory() == type(cuda.memory())(150_000, 150_000)
    assert cuda.memory_by_process() == []


@pytest.mark.parametrize(
    ("driver", "cpu", "reason"),
    [
        (Driver(status=NO_DEVICE), False, "refuses to start .CUDA_ERROR_NO_DEVICE"),
        (Driver(count=0), False, "CUDA_VISIBLE_DEVICES may hide it"),
        (Driver(), True, "this torch is a build for the CPU"),
    ],
)
def test_without_a_device_the_error_has_the_reason(machine, driver, cpu, reason):
    machine(driver, built_for_cpu=cpu)
    assert not cuda.available()
    with pytest.raises(ConfigError, match=f"device='cuda': .*{reason}.*; use device='cpu'"):
        cuda.device_properties()


def test_a_machine_without_a_driver_gets_a_clear_error(machine, monkeypatch):
    machine(Driver())

    def absent():
        raise OSError("no such library")

    monkeypatch.setattr(cuda, "_driver", absent)
    with pytest.raises(ConfigError, match="no CUDA driver"):
        cuda.device_properties()


def test_a_context_is_made_in_the_device_torch_will_use(machine):
    driver = Driver()
    machine(driver)
    cuda.open_context()
    assert driver.retained == 1


def test_bad_options_are_refused_without_asking_the_driver(machine):
    machine(None)  # any question would raise
    with pytest.raises(ConfigError, match="device"):
        Options.from_flat({"device": "tpu"})
