"""Which kernels a start loads, and when it has a process find and compile them."""

import os
import signal
import threading
import weakref
from types import SimpleNamespace

import msgspec
import pytest

from quire import env
from quire.config.options import Options
from quire.config.resolve import resolve
from quire.engine.build import build_engine
from quire.engine.startup import gpu_startup, kernel_builder
from quire.engine.startup.device_facts import device_facts
from quire.engine.startup.kernel_builder import (
    KernelBuilder,
    KernelBuildProgress,
    build_task,
    read_manifest,
    write_manifest,
)
from quire.engine.startup.model_setup import describe_model
from quire.engine.startup.plain_config import plain_config
from quire.engine.startup.startup_timer import StartupTimer
from quire.errors import ConfigError, NoRoom
from quire.kernels.framework import kernel_precompile
from quire.kernels.framework.kernel_spec import KernelSpec
from quire.kernels.gpu.runtime.target import GpuTarget

KERNELS = [KernelSpec(f"quire.kernels.gpu.made_{i}", "kernel", "{}") for i in range(3)]


def task(folder, **options):
    options = Options.from_flat({"model": "embedded", **options})
    found = describe_model(options, env.read())
    facts = device_facts(options, env.read())
    config, _, _ = resolve(options, found.facts, facts, server=False)
    plain, flat = plain_config(config, options)
    return build_task(plain, flat, found.config, folder, (9, 0), 132)


class Process:
    """A build process that finds KERNELS, and fails after some."""

    def __init__(self, compiled, status=0):
        self.compiled, self.tasks, self.status = compiled, [], status

    def send(self, task):
        self.tasks.append(task)

    def receive(self):
        for one in KERNELS[: self.compiled]:
            yield KernelBuildProgress(len(KERNELS), one)
        if self.compiled == len(KERNELS):
            yield KernelBuildProgress(len(KERNELS))


@pytest.fixture
def started(monkeypatch):
    """Processes that were started, and kernels that were loaded."""
    found = {"processes": [], "loaded": [], "absent": set(), "compiled": 3, "statuses": [0] * 9}

    def start():
        found["processes"].append(Process(found["compiled"], found["statuses"].pop(0)))
        return found["processes"][-1]

    def load(kernels):
        there = [one for one in kernels if one not in found["absent"]]
        found["loaded"] += there
        return [one for one in kernels if one in found["absent"]]

    monkeypatch.setattr(kernel_builder, "KernelBuildProcess", start)
    monkeypatch.setattr(kernel_precompile, "load_cached", load)
    return found


def test_a_known_start_loads_its_manifest_and_starts_no_process(tmp_path, started):
    given = task(tmp_path)
    assert read_manifest(tmp_path / "absent.json") is None
    write_manifest(tmp_path / "manifests" / given.manifest.rpartition("/")[2], KERNELS)
    assert KernelBuilder(given).load() == 3
    assert started["loaded"] == KERNELS
    assert started["processes"] == []


def test_another_start_has_a_process_find_them(tmp_path, started):
    given = task(tmp_path)
    builder = KernelBuilder(given)
    (process,) = started["processes"]  # before the weights are read
    assert process.tasks == [given]
    assert builder.load() == 3
    assert started["loaded"] == KERNELS


def test_a_folder_that_lacks_kernels_of_its_manifest_gets_them(tmp_path, started):
    given = task(tmp_path)
    write_manifest(tmp_path / "manifests" / given.manifest.rpartition("/")[2], KERNELS)
    started["absent"] = {KERNELS[1]}
    builder = KernelBuilder(given)
    assert started["processes"] == []
    builder.load()
    assert len(started["processes"]) == 1


def test_a_process_that_fails_is_a_warning(tmp_path, started, caplog):
    started["compiled"] = 1
    assert KernelBuilder(task(tmp_path)).load() == 1
    assert "not all GPU kernels could be compiled ahead" in caplog.text


def test_a_process_that_is_killed_has_another_in_its_place_once(tmp_path, started, caplog):
    started["compiled"], started["statuses"] = 1, [-9, -9]
    assert KernelBuilder(task(tmp_path)).load() == 1
    assert len(started["processes"]) == 2
    assert "ended with status -9" in caplog.text
    assert "not all GPU kernels could be compiled ahead" in caplog.text


def broken():
    raise ValueError("no compiler")


@pytest.mark.parametrize(
    ("end", "status"), [(lambda: os.kill(os.getpid(), signal.SIGKILL), -9), (broken, 1)]
)
def test_a_process_that_compiles_and_dies_is_an_error(monkeypatch, end, status):
    monkeypatch.setattr(kernel_precompile, "set_triton_target", lambda target: end())
    compilers = kernel_precompile.KernelCompilers(GpuTarget((9, 0), 132), 2, launchers=False)
    compilers.add(KERNELS[0])
    with pytest.raises(RuntimeError, match=rf"ended with status \[{status}, {status}\]"):
        list(compilers.results())


def test_of_two_ranks_one_compiles_and_the_other_waits(tmp_path, started, monkeypatch):
    given, waits, counts = task(tmp_path), threading.Event(), []
    first, second = KernelBuilder(given), KernelBuilder(given)
    assert len(started["processes"]) == 1
    acquire = kernel_builder._BuildLock.acquire

    def acquire_noted(lock, *, wait):
        if wait:
            waits.set()
        return acquire(lock, wait=wait)

    monkeypatch.setattr(kernel_builder._BuildLock, "acquire", acquire_noted)
    waiting = threading.Thread(target=lambda: counts.append(second.load()))
    waiting.start()
    assert waits.wait(60)
    path = tmp_path / "manifests" / given.manifest.rpartition("/")[2]
    write_manifest(path, KERNELS)  # as the process does
    assert first.load() == 3
    waiting.join(60)
    assert counts == [3]
    assert len(started["processes"]) == 1


def test_a_rank_compiles_if_the_one_it_waited_for_has_failed(tmp_path, started):
    started["compiled"] = 1
    given = task(tmp_path)
    first, second = KernelBuilder(given), KernelBuilder(given)
    assert first.load() == 1  # and no manifest
    started["compiled"] = 3
    assert second.load() == 3
    assert len(started["processes"]) == 2


def test_kernels_depend_on_the_ranks_and_on_their_access_to_each_other(tmp_path):
    one, two = task(tmp_path), task(tmp_path, tensor_parallel_size=2, device="cpu")
    assert one.manifest != two.manifest
    without = build_task(two.config, two.options, None, tmp_path, (9, 0), 132, peers=False)
    assert without.manifest != two.manifest


def test_a_manifest_names_kernels_of_quire_only(tmp_path):
    for text in (b"[]", b"{", b'[["os", "system", "{}"]]', b'[["quire.kernels.gpu.x", "k", "{}"]]'):
        (tmp_path / "m.json").write_bytes(text)
        known = read_manifest(tmp_path / "m.json")
        assert (known is None) == (text in (b"{", b'[["os", "system", "{}"]]'))


def test_a_manifest_is_of_one_config_and_gpu(tmp_path):
    base = task(tmp_path).manifest
    assert task(tmp_path).manifest == base
    assert task(tmp_path, num_gpu_blocks_override=77).manifest == base
    assert task(tmp_path, max_num_seqs=3).manifest != base
    assert task(tmp_path, max_model_len=128).manifest != base
    assert task(tmp_path, runner="pooling").manifest != base
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    assert task(tmp_path, speculative_config=drafts).manifest != base
    adapters = task(tmp_path, enable_lora=True).manifest
    assert adapters != base
    assert task(tmp_path, enable_lora=True, max_cpu_loras=7).manifest == adapters
    assert task(tmp_path, enable_lora=True, max_lora_rank=64).manifest != adapters
    other = msgspec.structs.replace(task(tmp_path), capability=(8, 0))
    assert (
        build_task(other.config, other.options, None, tmp_path, other.capability, 108).manifest
        != build_task(other.config, other.options, None, tmp_path, (9, 0), 108).manifest
    )


def test_an_early_process_ends_with_a_start_that_does_not_need_it(monkeypatch):
    class Early:
        stopped = False

        def stop(self):
            self.stopped = True

    early = Early()
    monkeypatch.setattr(kernel_builder, "_early_process", early)
    with pytest.raises(ConfigError):
        build_engine(Options.from_flat({"model": "embedded", "max_model_len": 1 << 30}))
    assert early.stopped
    assert kernel_builder._early_process is None


def test_a_cache_that_did_not_fit_is_gone_before_the_largest_step_is_measured(monkeypatch):
    """With it the step would find no memory."""

    class Cache:
        pass

    caches, alive = [], []

    def start(*_):
        if caches:
            return "started"
        cache = Cache()
        caches.append(weakref.ref(cache))
        raise NoRoom("as capture_graphs does")

    def measure(*_):
        alive.append(caches[0]() is not None)
        return "peak", 0

    config = SimpleNamespace(model=SimpleNamespace(logits_processors=()))
    monkeypatch.setattr(gpu_startup, "measure_device", lambda *_: None)
    monkeypatch.setattr(gpu_startup, "free_device_memory", lambda device, others: None)
    monkeypatch.setattr(gpu_startup, "sane_overhead", lambda *_: 0)
    monkeypatch.setattr(gpu_startup, "read_record", lambda path: "record")
    monkeypatch.setattr(gpu_startup, "write_record", lambda *_: "measured")
    monkeypatch.setattr(gpu_startup._GpuStartup, "measure", measure)
    monkeypatch.setattr(gpu_startup._GpuStartup, "run", start)
    situation, timer = SimpleNamespace(held_by_torch=0), StartupTimer()
    result = gpu_startup.start_on_gpu(None, config, None, situation, None, timer, None)
    assert (result, alive) == ("started", [False])
