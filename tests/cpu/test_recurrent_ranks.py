"""Models with recurrent layers on two ranks, of every layer or of a stage each: the tokens of one.

A rank has the states of its heads, a stage those of its layers; checkpoints, preemption and drafts
are the same decisions on each.
"""

import random

import pytest

from quire import LLM, SamplingParams
from tests import tiers
from tests.cpu.models.peers import peer
from tests.cpu.tiny_models import write_ascii_tokenizer

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of two processes")]

COMMON = {
    "dtype": "float32", "device": "cpu", "max_model_len": 512, "max_num_seqs": 4, "block_size": 8,
    "num_gpu_blocks_override": 70, "max_num_batched_tokens": 96, "use_tqdm_on_load": False,
}  # fmt: skip
RANKS = {
    "tensor": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
EVERYDAY = ["qwen3_next: tensor", "mamba2: stages"]
KINDS = ["mamba", "jamba", "mamba2", "bamba", "falcon_h1", "nemotron_h_experts_biases", "lfm2",
         "lfm2_moe", "granitemoehybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]  # fmt: skip
CASES = [f"{kind}: {ranks}" for kind in KINDS for ranks in RANKS]
FURTHER = [case for case in CASES if case not in EVERYDAY]


@pytest.fixture(scope="module", params=[*EVERYDAY, *tiers.long(*FURTHER)])
def engines(request, tmp_path_factory):
    kind, _, ranks = request.param.partition(": ")
    folder = tmp_path_factory.mktemp(kind)
    config = peer(kind, folder).config.get_text_config()
    write_ascii_tokenizer(folder, config.vocab_size)
    llms = [LLM(str(folder), **COMMON, **more) for more in ({}, RANKS[ranks])]
    yield llms
    for llm in llms:
        llm.llm_engine.engine.shutdown()


def prompts():
    """Prompts that share beginnings, of 1 to 330 tokens."""
    rng = random.Random(5)
    heads = [[rng.randrange(190) for _ in range(length)] for length in (70, 130, 200)]
    made = [heads[i % 3][: 64 + 9 * i] + heads[(i + 1) % 3][: 7 * i] for i in range(7)]
    return [{"prompt_token_ids": one} for one in ([5], *made)]


def answers(llm, predictions=None, **params):
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, prediction=one, **params)
        for one in predictions or [None] * len(prompts())
    ]
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    return [list(one.token_ids) for output in outputs for one in output.outputs], outputs


def test_two_ranks_give_the_tokens_of_one(engines):
    """Prompts in chunks, then from checkpoints; drafts; forks; sequences that are preempted."""
    want, _ = answers(engines[0], temperature=0)
    predicted = [[5 if i % 7 == 6 else token for i, token in enumerate(one)] for one in want]
    assert answers(engines[1], temperature=0)[0] == want
    got, outputs = answers(engines[1], predicted, temperature=0)
    assert got == want
    assert sum(one.num_cached_tokens or 0 for one in outputs) > 200, "checkpoints were found"
    sampled = {"temperature": 0.9, "seed": 4, "n": 2}
    want, got = (answers(llm, **sampled)[0] for llm in engines)
    assert got == want
    engine = engines[1].llm_engine.engine
    assert not engine.stats().held_blocks
    engine.check()
    assert sum(engine._scheduler.draft_counts.accepted) > 0
    if engines[1].llm_engine.config.cache.groups:
        assert engine.stats().preemptions > 0
