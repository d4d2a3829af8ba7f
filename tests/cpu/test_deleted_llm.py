"""What a deleted LLM leaves: nothing, also where no collection runs: the objects of a start are
frozen, so only reference counts free them."""

import gc
import os
import subprocess
import sys
import weakref

import pytest

from quire import LLM, SamplingParams
from quire.executors.multiproc import Executor as MultiProcess
from tests import tiers
from tests.cpu.models.peers import peer
from tests.cpu.tiny_models import write_ascii_tokenizer, write_model

SIZES = {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 64, "max_num_seqs": 4}
SIZES |= {"dtype": "float32", "device": "cpu", "use_tqdm_on_load": False}
RANKS = {
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline parallel": {"pipeline_parallel_size": 2},
    "data parallel": {"data_parallel_size": 2},
}
OPTIONS = {
    "one rank": {},
    "adapters": {"enable_lora": True},
    "fallback": {"model_impl": "transformers"},
    "tensor parallel": RANKS["tensor parallel"],
}
LONG = {
    "pipeline parallel": RANKS["pipeline parallel"],
    "shared experts": {"data_parallel_size": 2, "enable_expert_parallel": True},
}


@pytest.fixture
def no_collections():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    dense, experts = (tmp_path_factory.mktemp(name) for name in ("dense", "experts"))
    write_model(dense, num_hidden_layers=4)
    write_ascii_tokenizer(experts, peer("qwen3_moe", experts).config.get_text_config().vocab_size)
    return {False: str(dense), True: str(experts)}


def open_files():
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # that of the list itself
    return found


def references(llm):
    """To the engine of an LLM, the modules of its model and its KV cache."""
    engine = llm.llm_engine.engine
    executor = engine.executor
    runner = (executor._local if isinstance(executor, MultiProcess) else executor).runner
    return [weakref.ref(one) for one in (engine, *runner.model.modules(), runner.worker._cache[0])]


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("forked", "no_collections")
@pytest.mark.slow("engines of two processes")
@pytest.mark.parametrize("name", [*OPTIONS, *tiers.long(*LONG)])
def test_reference_counts_free_model_cache_and_files(folders, name):
    options = (OPTIONS | LONG)[name]
    folder = folders["enable_expert_parallel" in options]
    before = open_files()
    for _ in range(2):  # a first start opens files that the process keeps
        llm = LLM(folder, **SIZES, **options)
        llm.generate("Hello", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        found = references(llm)
        del llm
        assert [one() for one in found] == [None] * len(found)
        before, last = open_files(), before
    assert before == last


LOOP = """
import ctypes, gc, os, sys
from quire import LLM, SamplingParams
if __name__ == "__main__":
    gc.disable()
    for _ in range(20):
        llm = LLM("embedded", device="cpu", **eval(sys.argv[1]))
        llm.generate("Hello", SamplingParams(max_tokens=4), use_tqdm=False)
        del llm
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(open("/proc/self/statm").read().split()[1])
        print("left", pages * os.sysconf("SC_PAGE_SIZE") >> 20, len(os.listdir("/proc/self/fd")))
"""
NOISE_MIB = 8
"""That 15 starts may add: torch's threads and stores. One model and its cache are 40 and more."""


@pytest.mark.long("80 starts")
@pytest.mark.parametrize("options", [{}, *RANKS.values()], ids=["one rank", *RANKS])
def test_memory_and_files_stay_level_over_many_engines(options):
    done = subprocess.run(
        [sys.executable, "-c", LOOP, repr(options)], capture_output=True, text=True, check=True
    )
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("left ")]
    memory, files = zip(*[map(int, line) for line in lines], strict=True)
    assert len(memory) == 20
    assert len(set(files[1:])) == 1, files
    assert max(memory[5:]) <= memory[4] + NOISE_MIB, memory
