"""One model on two ranks, each a process of its own: the same tokens as on one rank."""

import re
import signal
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from quire import LLM, SamplingParams
from quire.engine.startup import rank_process
from quire.errors import ConfigError, EngineDead, RequestError
from quire.executors import multiproc
from quire.runner.model_input import ModelInputBuilder
from quire.runner.slots import BlockTableUpdate
from tests.cpu.large_messages import send_large
from tests.cpu.tiny_models import write_model

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of two processes")]

TEXT = "The capital of France is Paris, and the future of AI is not yet written. "
PROMPTS = ["What", [70, 70, 5], TEXT, TEXT * 4 + "Hello", list(range(60, 160))]
SIZES = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 60}
CHUNKS = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "enable_prefix_caching": True}
KINDS = {
    "greedy": {"temperature": 0},
    "seeds": {"temperature": 0.9, "seed": 7, "n": 3, "top_p": 0.8},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "logit_bias": {70: 2.0}},
    "bad words": {"temperature": 0.8, "seed": 3, "bad_words": ["a"], "min_tokens": 9},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    odd = {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56}
    odd |= {"intermediate_size": 99}
    return {
        "llama": str(write_model(models / "llama")),
        "qwen2": str(write_model(models / "qwen2", "qwen2", **odd)),
    }


@pytest.fixture(scope="module")
def folder(folders):
    return folders["llama"]


@pytest.fixture(scope="module")
def one(folder):
    return LLM(folder, **SIZES, **CHUNKS, device="cpu")


@pytest.fixture(scope="module")
def two(folder):
    llm = LLM(folder, **SIZES, **CHUNKS, device="cpu", tensor_parallel_size=2)
    yield llm
    llm.llm_engine.engine.shutdown()


def ids(llm, **params):
    params = SamplingParams(max_tokens=24, ignore_eos=True, **params)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(each.token_ids) for output in outputs for each in output.outputs]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_tokens_of_one(one, two, kind):
    want = ids(one, **KINDS[kind])
    assert ids(two, **KINDS[kind]) == want
    assert ids(two, **KINDS[kind]) == want, "prompts found in the prefix cache"


def test_weights_with_biases_and_odd_sizes_are_cut_too(folders):
    want = ids(LLM(folders["qwen2"], **SIZES, device="cpu"), temperature=0)
    llm = LLM(folders["qwen2"], **SIZES, device="cpu", tensor_parallel_size=2)
    assert ids(llm, temperature=0) == want
    processes = llm.llm_engine.engine._executor.group.monitor.processes
    llm.llm_engine.engine.shutdown()
    assert [process.wait(5) for process in processes] == [0], "ranks end with their engine"


def test_logprobs_and_those_of_prompts_come_from_the_first_rank(one, two):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    for a, b in zip(*(llm.generate(PROMPTS[2:3], params, use_tqdm=False) for llm in (one, two))):
        for x, y in [*zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:])]:
            assert list(x) == list(y)
            for token in x:
                assert y[token].logprob == pytest.approx(x[token].logprob, abs=1e-4)
        assert [list(x) for x in a.outputs[0].logprobs] == [list(x) for x in b.outputs[0].logprobs]


def test_values_of_this_process_alone_are_refused(two):
    with pytest.raises(RequestError, match="tensor_parallel_size=1"):
        two.generate("a", SamplingParams(logits_processors=[lambda ids, row: row]))
    with pytest.raises(RequestError, match="use one rank"):
        two.apply_model(repr)


def test_a_rank_leaves_signals_to_the_engine_and_uses_no_processor_while_idle(two):
    (process,) = two.llm_engine.engine.executor.group.monitor.processes
    (ignored,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    assert int(ignored, 16) & 1 << signal.SIGINT - 1
    assert int(ignored, 16) & 1 << signal.SIGTERM - 1
    rank = psutil.Process(process.pid)
    time.sleep(0.1)  # readers spin for a tenth of that
    before = sum(rank.cpu_times()[:2])
    time.sleep(1)
    assert sum(rank.cpu_times()[:2]) - before < 0.05


def test_blocks_fit_on_the_tightest_rank(folder, monkeypatch):
    """As measured when weights are loaded; a number that was given stays."""
    sizes = {name: value for name, value in SIZES.items() if name != "num_gpu_blocks_override"}
    plan = {}

    def little(config):
        plan["blocks"], plan["bytes"] = config.cache.num_blocks, config.cache.block_bytes
        return 40 * config.cache.block_bytes

    monkeypatch.setattr(rank_process, "free_bytes", little)
    llm = LLM(folder, **sizes, device="cpu", tensor_parallel_size=2)
    assert plan["blocks"] > 40 == llm.llm_engine.config.cache.num_blocks
    assert ids(llm, temperature=0)
    llm.llm_engine.engine.shutdown()


def test_a_call_that_raises_is_answered_by_all(one, two):
    executor = two.llm_engine.engine.executor
    with pytest.raises(AttributeError):
        executor.call("nothing")
    assert executor.group._sent.oldest() is None, "the monitor would wait for it"
    assert ids(two, temperature=0) == ids(one, temperature=0)


def test_kv_memory_is_given_back_on_all_ranks_and_taken_again(one, two):
    two.sleep(level=1)
    two.wake_up()
    assert ids(two, temperature=0) == ids(one, temperature=0)


def test_a_step_that_fails_on_all_ranks_fails_its_request_alone(one, two, monkeypatch, caplog):
    """An input that no rank can run: the ranks are as before."""
    engine = two.llm_engine.engine
    build = ModelInputBuilder.build
    broken = []

    def build_broken(self, plan):
        step = build(self, plan)
        if step.batch is None or broken:
            return step
        broken.append(1)
        return msgspec.structs.replace(step, block_table_updates=[BlockTableUpdate(9, 0, 0, [1])])

    monkeypatch.setattr(ModelInputBuilder, "build", build_broken)
    assert ids(two, temperature=0) == ids(one, temperature=0)
    assert "IndexError" in caplog.text
    assert engine._executor.group.monitor.failure is None


def test_a_large_message_passes_beside_a_large_answer(two):
    """Neither fits in its ring: the rank waits for room for the answer, and so does the engine."""
    send_large(two.llm_engine.engine.executor.group)


def test_ranks_that_part_are_found(two, monkeypatch):
    """The last test of these ranks."""
    monkeypatch.setattr(multiproc, "checksum", lambda result: 1)
    with pytest.raises(EngineDead, match=r"rank 1 \(process \d+, cpu\) computed different tokens"):
        ids(two, temperature=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("size", "why"), [(3, "num_attention_heads is 4 .* 1, 2, 4"), (64, "sizes that work: 1, 2, 4")]
)
def test_a_size_that_does_not_fit_is_refused(folder, size, why):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size} .*{why}"):
        LLM(folder, **SIZES, device="cpu", tensor_parallel_size=size)
