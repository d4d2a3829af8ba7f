"""Two data-parallel ranks on GPUs that share experts: the tokens of one GPU, in float32."""

import random
import subprocess
import sys

import pytest
import torch

from quire import LLM, SamplingParams
from tests import tiers
from tests.cpu.models.peers import peer
from tests.cpu.tiny_models import write_ascii_tokenizer

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

COMMON = {
    "device": "cuda", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8,
    "max_num_batched_tokens": 64, "num_gpu_blocks_override": 60, "use_tqdm_on_load": False,
}  # fmt: skip
SHARED = {"data_parallel_size": 2, "enable_expert_parallel": True}
SETTINGS = {
    "graphs": {},
    "NCCL": {"disable_custom_all_reduce": True},
    "eager, preemption": {
        "enforce_eager": True, "num_gpu_blocks_override": 18, "max_num_batched_tokens": 32,
    },
}  # fmt: skip
MORE = {
    "swap": {"num_gpu_blocks_override": 18, "kv_offloading_size": 0.01},
    "one step at a time": {"steps_in_flight": 1},
    "chunks": {"max_num_batched_tokens": 9},
}
KINDS = {
    "greedy": {"temperature": 0},
    "seeds": {"temperature": 0.9, "seed": 7, "n": 3, "top_p": 0.8},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "logit_bias": {70: 2.0}},
    "one of many": {"temperature": 0, "prompts": slice(2, 3)},
}


def test_rows_are_exchanged_exactly_eagerly_and_in_graphs(tmp_path):
    command = [sys.executable, "-m", "tests.gpu.row_exchange_ranks", str(tmp_path / "rendezvous")]
    started = [
        subprocess.Popen([*command, str(rank), "2"], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        found = [process.communicate(timeout=60)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(one.endswith("exact\n") for one in found), found


def prompts(vocab=90):
    rng = random.Random(3)
    made = [[rng.randrange(3, vocab) for _ in range(n)] for n in (5, 60, 1, 33, 17, 90)]
    return [*made, [*made[1], 7], made[5]]


def ids(llm, **params):
    chosen = prompts()[params.pop("prompts", slice(None))]
    params = SamplingParams(**({"max_tokens": 24, "ignore_eos": True} | params))
    outputs = llm.generate([{"prompt_token_ids": one} for one in chosen], params, use_tqdm=False)
    return [list(each.token_ids) for output in outputs for each in output.outputs]


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v2_lite"])
def one(request, tmp_path_factory):
    """A folder, and the tokens of each kind on one GPU."""
    folder = tmp_path_factory.mktemp(request.param)
    write_ascii_tokenizer(folder, peer(request.param, folder).config.get_text_config().vocab_size)
    llm = LLM(str(folder), **COMMON)
    found = {kind: ids(llm, **KINDS[kind]) for kind in KINDS}
    llm.llm_engine.engine.shutdown()
    return str(folder), found


@pytest.fixture(scope="module", params=[*SETTINGS, *tiers.long(*MORE)])
def two(one, request):
    llm = LLM(one[0], **COMMON | SHARED | (SETTINGS | MORE)[request.param])
    yield llm
    llm.llm_engine.engine.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_two_gpus_give_the_tokens_of_one(one, two, kind):
    engine = two.llm_engine.engine
    assert ids(two, **KINDS[kind]) == one[1][kind]
    assert ids(two, **KINDS[kind]) == one[1][kind], "prompts found in the prefix cache"
    assert not engine.stats().held_blocks
    engine.check()


def test_nothing_is_compiled_or_captured_after_the_start(two):
    ids(two, temperature=0)
    counts = two.llm_engine.engine.executor.late_work()
    assert (counts.kernel_compilations, counts.graph_captures) == (0, 0)


def test_an_engine_that_slept_answers_as_before(one, two):
    two.sleep(level=1)
    two.wake_up()
    assert ids(two, **KINDS["one of many"]) == one[1]["one of many"]
    assert ids(two, temperature=0) == one[1]["greedy"]
