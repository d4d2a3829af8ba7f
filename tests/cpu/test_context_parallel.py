"""Decode context parallelism: each rank caches a part of the tokens, and tokens are those of one
rank."""

import random

import pytest

from quire import LLM, SamplingParams
from tests import tiers
from tests.cpu.models.peers import peer
from tests.cpu.tiny_models import write_ascii_tokenizer, write_model

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of two processes")]

SIZES = {
    "dtype": "float32", "max_model_len": 256, "device": "cpu", "block_size": 8, "max_num_seqs": 4,
}  # fmt: skip
SHARED = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}


def make_llama(folder):
    write_model(folder, num_attention_heads=4, num_key_value_heads=1)


def make_deepseek(folder):
    vocab = peer("deepseek_v3", folder).config.get_text_config().vocab_size
    write_ascii_tokenizer(folder, vocab)


def make_windows(folder):
    windows = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    write_model(folder, "qwen2", num_attention_heads=4, num_key_value_heads=1, **windows)


MODELS = {"llama": make_llama, "deepseek": make_deepseek}
OTHERS = {"windows": make_windows}


KINDS = {
    "greedy": {},
    "seeds": {"temperature": 0.9, "seed": 7, "n": 3, "top_p": 0.8},
    "penalties": {"repetition_penalty": 1.5, "logit_bias": {70: 2.0}},
}
ENGINES = {
    "chunks, preemption": {"max_num_batched_tokens": 32, "blocks": 26},
    "swap": {"max_num_batched_tokens": 48, "kv_offloading_size": 0.01, "blocks": 26},
    "drafts": {
        "blocks": 60,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    },
    "fp8": {"max_num_batched_tokens": 32, "kv_cache_dtype": "fp8", "blocks": 60},
    "scales of tokens": {"kv_cache_dtype": "int8_per_token_head", "blocks": 60},
}


def prompts():
    rng = random.Random(3)
    made = [[rng.randrange(3, 90) for _ in range(n)] for n in (60, 1, 33, 90)]
    return [*made, [*made[0], 7], [9, 8, 7] * 12]


def ids(llm, **params):
    asked = [{"prompt_token_ids": one} for one in prompts()]
    params = SamplingParams(**({"max_tokens": 10, "ignore_eos": True, "temperature": 0} | params))
    outputs = llm.generate(asked, params, use_tqdm=False)
    return [list(each.token_ids) for output in outputs for each in output.outputs]


PAIRS = [f"{model}: chunks, preemption" for model in MODELS]
MORE = [f"llama: {name}" for name in ENGINES if name != "chunks, preemption"]
MORE += ["deepseek: swap", "deepseek: drafts", "windows: chunks, preemption", "windows: drafts"]


@pytest.fixture(scope="module", params=[*PAIRS, *tiers.long(*MORE)])
def pair(request, tmp_path_factory):
    """An engine of one rank and one of two, with room for as many tokens."""
    model, _, name = request.param.partition(": ")
    folder = tmp_path_factory.mktemp(model)
    (MODELS | OTHERS)[model](folder)
    settings = SIZES | ENGINES[name]
    blocks = settings.pop("blocks")
    one = LLM(str(folder), **settings, num_gpu_blocks_override=blocks)
    two = LLM(str(folder), **settings, **SHARED, num_gpu_blocks_override=blocks // 2)
    layers = two.llm_engine.config.cache.layers
    assert any(layer.window for layer in layers) == (model == "windows")
    yield one, two
    two.llm_engine.engine.shutdown()


@pytest.mark.parametrize(
    "kind", ["greedy", *tiers.long(*(one for one in KINDS if one != "greedy"))]
)
def test_two_ranks_give_the_tokens_of_one(pair, kind):
    one, two = pair
    want = ids(one, **KINDS[kind])
    assert ids(two, **KINDS[kind]) == want
    assert ids(two, **KINDS[kind]) == want, "prompts found in the prefix cache"
    two.llm_engine.engine.check()
    assert two.llm_engine.engine.stats().preemptions or two.llm_engine.config.cache.num_blocks > 13


def test_the_cache_has_the_bytes_that_are_planned(pair):
    sizes = []
    for llm in pair:
        engine, cache = llm.llm_engine.engine, llm.llm_engine.config.cache
        runner = getattr(engine.executor, "_local", engine.executor).runner
        assert (
            sum(one.nbytes for one in runner.worker._cache) == cache.num_blocks * cache.block_bytes
        )
        sizes.append(cache.num_blocks * cache.block_bytes)
    assert sizes[0] == 2 * sizes[1]


@pytest.mark.long("more of the same")
@pytest.mark.parametrize("more", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 4}])
def test_four_ranks_give_the_tokens_of_one(more, tmp_path):
    make_llama(tmp_path)
    one = LLM(str(tmp_path), **SIZES, num_gpu_blocks_override=60)
    four = LLM(str(tmp_path), **SIZES, **(SHARED | more), num_gpu_blocks_override=30)
    try:
        assert ids(four) == ids(one)
    finally:
        four.llm_engine.engine.shutdown()
