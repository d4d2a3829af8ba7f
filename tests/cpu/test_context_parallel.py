"""Decode context parallelism: each rank caches a part of the tokens, and tokens are those of one
rank."""

import random

import pytest

from quire import LLM, SamplingParams
from tests.cpu.models.peers import peer
from tests.cpu.tiny_models import write_ascii_tokenizer, write_model

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of two processes")]

SIZES = {"dtype": "float32", "max_model_len": 256, "device": "cpu", "block_size": 8}
CHUNKS = {"max_num_batched_tokens": 32, "max_num_seqs": 4}
SHARED = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}


def make_llama(folder):
    write_model(folder, num_attention_heads=4, num_key_value_heads=1)


def make_deepseek(folder):
    vocab = peer("deepseek_v3", folder).config.get_text_config().vocab_size
    write_ascii_tokenizer(folder, vocab)


MODELS = {"llama": make_llama, "deepseek": make_deepseek}


def prompts():
    rng = random.Random(3)
    made = [[rng.randrange(3, 90) for _ in range(n)] for n in (5, 60, 1, 33, 17, 90)]
    return [*made, [*made[1], 7], made[5]]


def ids(llm, **params):
    asked = [{"prompt_token_ids": one} for one in prompts()]
    params = SamplingParams(**({"max_tokens": 20, "ignore_eos": True, "temperature": 0} | params))
    outputs = llm.generate(asked, params, use_tqdm=False)
    return [list(each.token_ids) for output in outputs for each in output.outputs]


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """An engine of one rank and one of two."""
    folder = tmp_path_factory.mktemp(request.param)
    MODELS[request.param](folder)
    one = LLM(str(folder), **SIZES, **CHUNKS, num_gpu_blocks_override=96)
    two = LLM(str(folder), **SIZES, **CHUNKS, **SHARED, num_gpu_blocks_override=48)
    yield one, two
    two.llm_engine.engine.shutdown()


def test_two_ranks_give_the_tokens_of_one(pair):
    one, two = pair
    want = ids(one)
    assert ids(two) == want
    assert ids(two) == want, "prompts found in the prefix cache"
