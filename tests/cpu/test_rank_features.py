"""Each feature on two ranks, of every layer or of a stage each: the answers of one rank."""

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.params import BeamSearchParams, LoRARequest, StructuredOutputsParams
from quire.errors import RequestError
from quire.runner.cpu.tape_cache import DECODE
from tests import tiers
from tests.cpu.lora_folders import write_adapter
from tests.cpu.tiny_models import write_model

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of two processes")]

TEXT = "The capital of France is Paris, and the future of AI is not yet written. "
PROMPTS = ["What", TEXT, TEXT * 2 + "Hello", "Hello, my name", TEXT + "What is"]
COMMON = {
    "dtype": "float32", "device": "cpu", "max_model_len": 256, "max_num_seqs": 4,
    "enable_lora": True, "max_lora_rank": 8, "use_tqdm_on_load": False,
}  # fmt: skip
SETTINGS = {
    "chunks, preemption": {
        "max_num_batched_tokens": 32, "block_size": 4, "num_gpu_blocks_override": 72,
        "enable_prompt_embeds": True, "scheduling_policy": "priority",
    },
    "swap, one step at a time": {
        "block_size": 4, "num_gpu_blocks_override": 72, "kv_offloading_size": 0.01,
        "steps_in_flight": 1, "max_num_batched_tokens": 64, "enable_prompt_embeds": True,
        "scheduling_policy": "priority",
    },
    "steps in flight": {
        "num_gpu_blocks_override": 60, "steps_in_flight": 2, "enforce_eager": True,
        "enable_prompt_embeds": True, "scheduling_policy": "priority",
    },
}  # fmt: skip
CHOICE = {"choice": ["Rome", "Paris", "Palermo"]}
SCHEMA = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
FORMS = [CHOICE, {"regex": "[a-z]{3,9} [0-9]+"}, SCHEMA, {"json_object": True}, None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = write_model(tmp_path_factory.mktemp("models") / "llama", vocab_size=1300)  # two strips
    write_adapter(base, base.parent / "adapter")
    return base


RANKS = {
    "tensor": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
KINDS = [f"{ranks}: {name}" for name in SETTINGS for ranks in RANKS]


@pytest.fixture(scope="module", params=[*KINDS[:2], *tiers.long(*KINDS[2:])])
def engines(folder, request):
    ranks, _, name = request.param.partition(": ")
    settings = COMMON | SETTINGS[name]
    llms = [LLM(str(folder), **settings, **more) for more in ({}, RANKS[ranks])]
    yield llms
    llms[1].llm_engine.engine.shutdown()


def answers(llm, params, prompts=PROMPTS, **more):
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    outputs = llm.generate(prompts, params, use_tqdm=False, **more)
    return [
        (list(one.token_ids), one.finish_reason) for output in outputs for one in output.outputs
    ]


def asked(**params):
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True} | params)


def constrained(llm):
    """Rows of every form and some of none in one batch, greedy and random."""
    params = [
        SamplingParams(
            temperature=temperature,
            seed=11 + i,
            max_tokens=30,
            n=1 + (temperature > 0),
            structured_outputs=None if form is None else StructuredOutputsParams(**form),
            **({} if form else {"presence_penalty": 0.7, "ignore_eos": True}),
        )
        for i, form in enumerate(FORMS)
        for temperature in (0, 0.9)
    ]
    return answers(llm, params, [PROMPTS[i % 5] for i in range(len(params))])


def with_edits(llm):
    """Constrained rows with further edits of their logits."""
    form = StructuredOutputsParams(regex="[a-z ]{20}")
    kinds = [
        {"presence_penalty": 1.5},
        {"logit_bias": {70: 5.0}, "temperature": 0.8, "seed": 2, "top_p": 0.7},
        {"min_tokens": 5},
    ]
    params = [asked(structured_outputs=form, ignore_eos=False, **kind) for kind in kinds]
    return answers(llm, params, PROMPTS[:3])


def scored(llm):
    params = asked(temperature=0.7, seed=4, logprobs=3, prompt_logprobs=2, max_tokens=6)
    found = []
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        found += [(token, round(one[token].logprob, 3)) for one in positions for token in one]
    return found


def embedded(llm):
    vectors = torch.linspace(-1, 1, 32 * 9).view(9, 32)
    return answers(llm, asked(), [{"prompt_embeds": vectors}, PROMPTS[1]])


def adapted(llm):
    adapter = LoRARequest(
        "adapter", 1, llm.llm_engine.config.model.name[: -len("llama")] + "adapter"
    )
    return answers(llm, asked(), lora_request=[adapter, None, adapter, None, adapter])


def pooled(llm):
    outputs = llm.embed(PROMPTS, use_tqdm=False)
    return np.array([output.outputs.embedding for output in outputs]).round(4).tolist()


FEATURES = {
    "plain": lambda llm: answers(llm, asked()),
    "temperatures": lambda llm: answers(llm, [asked(temperature=t / 4, seed=t) for t in range(5)]),
    "outputs": lambda llm: answers(llm, asked(temperature=1, seed=9, n=3, top_k=20, min_p=0.01)),
    "ends": lambda llm: answers(llm, SamplingParams(temperature=1.2, seed=5, max_tokens=40, n=2)),
    "edits": lambda llm: answers(
        llm, asked(repetition_penalty=1.4, bad_words=["a"], logit_bias={9: 3}, min_tokens=4)
    ),
    "allowed ids": lambda llm: answers(
        llm, asked(temperature=1, seed=1, allowed_token_ids=[5, 350])
    ),
    "logprobs": scored,
    "structured output": constrained,
    "structured output with edits": with_edits,
    "prompts as embeddings": embedded,
    "adapters": adapted,
    "pooling": pooled,
    "priorities": lambda llm: answers(llm, asked(max_tokens=40), priority=[3, 2, 1, 0, 0]),
    "beams": lambda llm: [
        [one.tokens for one in output.sequences]
        for output in llm.beam_search(
            [{"prompt": one} for one in PROMPTS[:2]], BeamSearchParams(beam_width=3, max_tokens=8)
        )
    ],
}


EVERYDAY = ("structured output", "prompts as embeddings", "adapters", "pooling", "beams")
"""The others are much as in test_multiproc.py."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "feature", [*EVERYDAY, *tiers.long(*(one for one in FEATURES if one not in EVERYDAY))]
)
def test_two_ranks_answer_as_one_does(engines, feature):
    one, two = (FEATURES[feature](llm) for llm in engines)
    assert one == two
    for llm in engines:
        engine = llm.llm_engine.engine
        assert not engine.stats().held_blocks
        engine.check()


def test_tapes_replay_decode_steps(engines):
    eager = engines[0].llm_engine.config.device.enforce_eager
    for feature in ("plain", "adapters"):
        assert FEATURES[feature](engines[0]) == FEATURES[feature](engines[1])
    for llm in engines:
        tapes = llm.llm_engine.engine.executor._local if llm is engines[1] else None
        tapes = (tapes or llm.llm_engine.engine.executor).runner.worker._tapes
        assert (tapes is None) == eager
        if tapes is not None:
            assert DECODE not in {kind for kind, _ in tapes._not_recordable}
            assert set(tapes._tapes) >= {"", "adapters"}, "variants"


def test_what_no_text_can_match_is_refused_and_the_ranks_stay(engines):
    form = StructuredOutputsParams(regex="[a-z]{9}")
    nothing = SamplingParams(
        temperature=0, max_tokens=20, structured_outputs=form, allowed_token_ids=[3]
    )
    for llm in engines:
        with pytest.raises(RequestError, match="no token is allowed"):
            llm.generate("Hello", nothing, use_tqdm=False)
        with pytest.raises(RequestError, match="shortest allowed text"):
            llm.generate("Hello", asked(structured_outputs=form, max_tokens=1), use_tqdm=False)
    assert answers(engines[1], asked()) == answers(engines[0], asked())
