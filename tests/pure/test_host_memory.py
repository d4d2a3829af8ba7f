"""Memory limits of control groups of both versions, nested and in containers, and of rlimits."""

import resource
from collections import namedtuple

import psutil
import pytest

from quire.platform import cpu, host_memory
from quire.platform.base import DeviceMemory

MiB = 1 << 20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")
NO_LIMIT_V1 = 9223372036854771712


@pytest.fixture(autouse=True)
def no_rlimits(monkeypatch):
    limits = {}
    no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda number: limits.get(number, no_limit))
    return limits


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A made-up /proc/self and mounts: machine.group(mount, path, ...), machine.process(...)."""
    monkeypatch.setattr(host_memory, "_PROC", tmp_path)
    return Machine(tmp_path)


class Machine:
    def __init__(self, root):
        self.root = root

    def process(self, groups, mounts):
        """mounts: (root, mount point, file system, options)."""
        (self.root / "cgroup").write_text("".join(f"{one}\n" for one in groups))
        lines = [
            f"32 31 0:29 {root} {self.root}{mount} rw,relatime shared:9 - {kind} {kind} {options}\n"
            for root, mount, kind, options in mounts
        ]
        (self.root / "mountinfo").write_text(
            "".join(["22 1 8:1 / / rw - ext4 /dev/x rw\n", *lines])
        )

    def group(self, path, files, limit, used=0, cache=0):
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in zip(files, (limit, used)):
            (folder / name).write_text(f"{value}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{files[2]} {cache}\nx 7\n")


def test_every_group_above_counts_in_version_2(machine):
    machine.process(["0::/a/b"], [("/", "/cg", "cgroup2", "rw")])
    machine.group("cg", V2, "max")
    machine.group("cg/a", V2, 100 * MiB, 70 * MiB, 10 * MiB)
    machine.group("cg/a/b", V2, 300 * MiB, 20 * MiB)
    assert list(host_memory.host_memory_limits()) == [
        (300 * MiB, 20 * MiB),
        (100 * MiB, 60 * MiB),
    ]
    assert cpu.memory() == DeviceMemory(100 * MiB, 40 * MiB)


def test_version_1_has_a_hierarchy_of_memory(machine):
    groups = ["3:cpu:/elsewhere", "4:cpuset,memory:/a/b", "0::/"]
    mounts = [
        ("/", "/v1/cpu", "cgroup", "rw,cpu"),
        ("/", "/v1/memory", "cgroup", "rw,memory"),
        ("/", "/v1/unified", "cgroup2", "rw"),
    ]
    machine.process(groups, mounts)
    machine.group("v1/memory", V1, NO_LIMIT_V1, 900 * MiB)
    machine.group("v1/memory/a", V1, 200 * MiB, 150 * MiB, 30 * MiB)
    machine.group("v1/memory/a/b", V1, NO_LIMIT_V1, 150 * MiB)
    machine.group("v1/cpu/elsewhere", V1, MiB)
    (machine.root / "v1/unified").mkdir()
    assert list(host_memory.host_memory_limits()) == [(200 * MiB, 120 * MiB)]
    assert cpu.memory() == DeviceMemory(200 * MiB, 80 * MiB)


@pytest.mark.parametrize("root", ["/docker/abc", "/"])
def test_a_container_that_sees_the_path_of_its_host_has_its_own_group_mounted(machine, root):
    machine.process(["4:memory:/docker/abc"], [(root, "/cg", "cgroup", "rw,memory")])
    machine.group("cg", V1, 50 * MiB, 60 * MiB)
    assert list(host_memory.host_memory_limits()) == [(50 * MiB, 60 * MiB)]
    assert cpu.memory() == DeviceMemory(50 * MiB, 0)


def test_without_groups_the_machine_counts(machine):
    total = psutil.virtual_memory().total
    assert cpu.memory().total == total
    machine.process(["0::/gone"], [("/", "/cg", "cgroup2", "rw")])
    assert cpu.memory().total == total


@pytest.mark.parametrize(
    ("number", "field"), [(resource.RLIMIT_AS, "vms"), (resource.RLIMIT_DATA, "data")]
)
def test_what_a_process_may_map_is_a_limit(machine, monkeypatch, no_rlimits, number, field):
    info = namedtuple("info", "vms data")(**{"vms": 5 * MiB, "data": 5 * MiB, field: 30 * MiB})
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: info)
    no_rlimits[number] = (100 * MiB, resource.RLIM_INFINITY)
    assert list(host_memory.host_memory_limits()) == [(100 * MiB, 30 * MiB)]
    assert cpu.memory() == DeviceMemory(100 * MiB, 70 * MiB)
