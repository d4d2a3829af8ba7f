"""The CUDA driver's answers, and its failures, as facts or as a helpful error."""

import ctypes

import pytest

from quire import env
from quire.config.options import Options
from quire.config.parallel import resolve_tensor_parallel_size
from quire.engine.startup.device_facts import device_facts
from quire.errors import ConfigError
from quire.platform import cuda

UUID = bytes(range(16))
NO_DEVICE = 100


class Driver:
    """libcuda, as far as it is called. status: the result of cuInit."""

    def __init__(self, status=0, count=1, names=("NVIDIA H200",), access=True):
        self.status, self.count, self.retained = status, count, 0
        self.names, self.access, self.opened = names, access, []

    def cuDeviceCanAccessPeer(self, answer, one, other):
        assert one.value != other.value
        answer._obj.value = self.access
        return 0

    def cuInit(self, flags):
        return self.status

    def cuDeviceGetCount(self, count):
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, text, size, device):
        text.value = self.names[device.value % len(self.names)].encode()
        return 0

    def cuDeviceTotalMem_v2(self, total, device):
        total._obj.value = 150_000
        return 0

    def cuDeviceGetUuid(self, uuid, device):
        uuid[:] = bytes([device.value]) + UUID[1:]
        return 0

    def cuDeviceGetAttribute(self, value, which, device):
        value._obj.value = {75: 9, 76: 0, 16: 132}.get(which, 1)
        return 0

    def cuGetErrorName(self, status, text):
        text._obj.value = b"CUDA_ERROR_NO_DEVICE"
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.retained += 1
        self.opened.append(device.value)
        return 0


class Nvml:
    """free: of all devices, or of each."""

    def __init__(self, free, nvlink=True):
        self.free, self.nvlink = free, nvlink

    def nvmlDeviceGetMemoryInfo(self, device, found):
        index = device.value - 1
        found._obj.free = self.free[index] if isinstance(self.free, tuple) else self.free
        return 0

    def nvmlDeviceGetP2PStatus(self, one, other, kind, status):
        assert kind == 2
        status._obj.value = 0 if self.nvlink else 1
        return 0


@pytest.fixture
def machine(monkeypatch):
    """Sets up a machine with this driver; nvml None: NVML is unavailable."""

    def make(driver, nvml=None, built_for_cpu=False):
        monkeypatch.setattr(cuda, "_torch_is_for_cpu", lambda: built_for_cpu)
        monkeypatch.setattr(cuda, "_driver", lambda: driver)

        def handle(uuid):  # the first byte is the index
            return None if nvml is None else (nvml, ctypes.c_void_p(int(uuid[:2], 16) + 1))

        monkeypatch.setattr(cuda, "_nvml_device", handle)
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


def tensor_parallel(ranks):
    return Options.from_flat({"model": "embedded", "tensor_parallel_size": ranks})


def test_ranks_count_on_the_memory_of_the_tightest_gpu(machine):
    machine(Driver(count=3), Nvml((90_000, 70_000, 10_000)))
    facts = device_facts(tensor_parallel(2), env.read())
    assert (facts.count, facts.total_bytes, facts.free_bytes) == (3, 150_000, 70_000)
    assert device_facts(tensor_parallel(1), env.read()).free_bytes == 90_000
    assert cuda.memory(2).free == 10_000


def test_ranks_on_gpus_of_two_kinds_are_refused(machine):
    machine(Driver(count=2, names=("NVIDIA H200", "NVIDIA A100")))
    assert device_facts(tensor_parallel(1), env.read()).name == "NVIDIA H200"
    with pytest.raises(ConfigError, match="cuda:0 is a NVIDIA H200 and cuda:1 a NVIDIA A100"):
        device_facts(tensor_parallel(2), env.read())


def test_more_ranks_than_gpus_are_refused(machine):
    machine(Driver(count=2))
    options = tensor_parallel(4)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4 .* can use 2 \(CUDA_VISIBLE"):
        resolve_tensor_parallel_size(options, device_facts(options, env.read()))


def test_a_device_that_is_not_visible_is_an_error(machine):
    machine(Driver(count=2))
    with pytest.raises(ConfigError, match="device 2 is not one of the 2 that are visible"):
        cuda.device_properties(2)


def test_a_rank_opens_the_context_of_its_own_device(machine):
    driver = Driver(count=2)
    machine(driver)
    cuda.open_context(1)
    assert driver.opened == [1]


@pytest.mark.parametrize("access", [True, False])
def test_peer_access_is_that_of_all_pairs(machine, access):
    machine(Driver(count=3, access=access))
    assert cuda.have_peer_access(range(3)) == access
    assert cuda.have_peer_access(range(1))


def test_the_link_between_devices_is_named(machine):
    machine(Driver(count=2), Nvml(90_000))
    assert cuda.find_link(0, 1) == "NVLink"
    machine(Driver(count=2), Nvml(90_000, nvlink=False))
    assert cuda.find_link(0, 1) == "PCIe"
    machine(Driver(count=2))
    assert cuda.find_link(0, 1) == "unknown"
