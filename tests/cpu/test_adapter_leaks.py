"""Loads in a loop: bytes, slots, references, threads and open files return to where they were."""

import gc
import os
import threading
import weakref

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.engine.core.adapter_store import AdapterStore
from quire.weights.adapters.adapter import Adapter, LinearDelta, tensors_of
from tests import tiers
from tests.cpu.lora_folders import base_model, write_adapter

ROUNDS = tiers.amount(100, 10_000)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
SETTINGS = {
    "dtype": "float32", "enable_lora": True, "max_loras": 2, "max_cpu_loras": 3,
    "max_lora_rank": 8, "num_gpu_blocks_override": 64, "use_tqdm_on_load": False,
    "max_num_seqs": 4, "enable_prefix_caching": False,
}  # fmt: skip


def open_files():
    return len(os.listdir("/proc/self/fd"))


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Tensors:
    """Counts tensors of adapters that something still refers to."""

    def __init__(self):
        self.seen, self._living = 0, []

    def note(self, adapter):
        self.seen += 1
        self._living += [
            weakref.ref(tensor)
            for parts in adapter.deltas.values()
            for delta in parts.values()
            for _, tensor in tensors_of(delta)
        ]
        return adapter

    def count(self):
        self._living = [one for one in self._living if one() is not None]
        return len(self._living)


@pytest.fixture(scope="module")
def llm_and_folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("leaks")
    base = base_model(root)
    kinds = [{"r": 2}, {"r": 8, "use_dora": True}, {"targets": ["v_proj"], "lora_bias": True}]
    folders = [write_adapter(base, root / f"a{i}", i, **kind) for i, kind in enumerate(kinds)]
    folders += [write_adapter(base, root / f"b{i}", 9 + i, ["q_proj"], 1) for i in range(2)]
    return LLM(str(base), **SETTINGS), folders


@pytest.mark.slow("hundreds of loads and steps")
def test_loads_unloads_and_requests_leave_nothing(llm_and_folders, caplog):
    caplog.set_level("WARNING", "quire.engine.core.adapter_store")  # pytest keeps each line
    llm, folders = llm_and_folders
    engine = llm.llm_engine
    store, executor = engine.built.adapters, engine.engine.executor
    banks = executor.runner.model.adapter_banks
    read = Tensors()
    inner = store._read
    store._read = lambda folder: read.note(inner(folder))

    def state():
        gc.collect()
        threads = sorted(t.name for t in threading.enumerate() if "adapter" in t.name)
        tensors = sum(1 for one in gc.get_objects() if torch.is_tensor(one))
        return open_files(), threads, tensors, read.count(), len(banks.layers)

    def turn(i):
        folder = folders[i % len(folders)]
        request = LoRARequest(f"n{i % 7}", i + 1, str(folder))
        prompt = {"prompt_token_ids": [5 + i % 50, 7]}
        llm.generate(prompt, ONE, lora_request=request, use_tqdm=False)
        engine.remove_lora(i + 1)

    for i in range(40):
        turn(i)
    before, bytes_before = state(), resident_bytes()
    for i in range(40, 40 + ROUNDS // 10 * 10):
        turn(i)
    assert state() == before
    assert resident_bytes() - bytes_before < 32 << 20
    assert read.seen > ROUNDS // 2
    assert not store._holds
    assert not store._copies
    assert not store._scaling
    assert not engine.engine.stats().held_blocks
    store.check()


def test_copies_and_reads_of_a_store_leave_nothing(tmp_path):
    made = Tensors()

    def read(folder):
        delta = LinearDelta(torch.zeros(1, 4), torch.zeros(1, 4))
        return made.note(Adapter(f"{int(folder.name):08x}", 1, 1, {"layer": {0: delta}}))

    store = AdapterStore(read, 4, lambda given, **_: tmp_path / given)
    done = threading.Event()
    store.set_outcome_callback(done.set)
    threads = threading.active_count()
    refs = [store.register(f"{i}", f"{i}") for i in range(16)]
    for i in range(ROUNDS):
        ref = refs[i * 5 % 16]
        if not store.acquire(ref):
            while not dict(store.outcomes()):
                assert done.wait(30)
                done.clear()
        assert store.weights(ref)
        store.release(ref)
        store.check()
    assert threading.active_count() <= threads + 1
    for one in refs:
        store.remove(one.name)
    gc.collect()
    assert not made.count()
    assert not store._users
    store.close()
