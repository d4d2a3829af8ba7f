"""Drafts on several ranks: grammars of rank 0 or of another stage, strips of the vocabulary.

Each request predicts the answer that the ranks give without drafts, with errors; the answers stay.
"""

import random
from dataclasses import replace

import pytest

from quire import LLM, SamplingParams
from quire.core.params import StructuredOutputsParams
from tests import tiers
from tests.cpu.test_rank_features import FORMS, PROMPTS
from tests.cpu.tiny_models import write_model

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of two processes")]

COMMON = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "use_tqdm_on_load": False}
RANKS = {
    "tensor": {"tensor_parallel_size": 2, "block_size": 4, "num_gpu_blocks_override": 90},
    "stages": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 40},
    **tiers.amount({}, {"both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "llama", vocab_size=1300)  # two strips


def requests():
    """Constrained rows and others, greedy and random, with edits that read the outputs."""
    drawn = {"temperature": 0.9, "seed": 3}
    kinds = [
        {"ignore_eos": True},
        {"ignore_eos": True, "n": 2, **drawn},
        {"repetition_penalty": 1.4, "bad_words": ["a"], "ignore_eos": True},
        {"presence_penalty": 0.8, "min_tokens": 9, "logprobs": 2, **drawn},
        {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{20}"), "logit_bias": {70: 3}},
    ]
    forms = [StructuredOutputsParams(**form) for form in FORMS if form]
    kinds += [{"structured_outputs": one, **more} for one in forms for more in ({}, drawn)]
    made = [SamplingParams(**{"temperature": 0, "max_tokens": 40} | kind) for kind in kinds]
    return made, [PROMPTS[i % 5] for i in range(len(made))]


def answers(llm, params, prompts):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [one for output in outputs for one in output.outputs], outputs


def shown(found):
    return [(list(one.token_ids), one.finish_reason, one.text) for one in found]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_answer_with_drafts_as_without(folder, ranks):
    rng, (params, prompts) = random.Random(ranks), requests()
    plain = LLM(str(folder), **COMMON | RANKS[ranks])
    want, outputs = answers(plain, params, prompts)
    plain.llm_engine.engine.shutdown()
    predicted = [
        replace(one, prediction=[t if rng.random() < 0.9 else rng.randrange(90) for t in text])
        for one, text in zip(params, [output.outputs[0].token_ids for output in outputs])
    ]
    options = {"method": "ngram", "adaptive": False, "num_speculative_tokens": 4}
    llm = LLM(str(folder), **COMMON | RANKS[ranks], speculative_config=options)
    try:
        found, _ = answers(llm, predicted, prompts)
        assert shown(found) == shown(want)
        counts = llm.llm_engine.engine.snapshot().counters.draft_counts
        assert counts.accepted[0] > 50
        assert counts.tokens > sum(counts.accepted)
        assert not llm.llm_engine.engine.stats().failed_steps
    finally:
        llm.llm_engine.engine.shutdown()
