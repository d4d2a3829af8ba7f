"""Every model gives the same answers on every path through the engine.

A table of models times a table of paths, through the public LLM. The plain path runs each request
alone, whole, uncached and without tapes; that it is exact is test_against_transformers.py's.
"""

import functools
import re

import pytest

from quire import LLM, SamplingParams
from quire.config.memory.kv_layout import max_blocks_held
from quire.core.params import StructuredOutputsParams
from quire.engine import build
from tests import tiers
from tests.cpu.inline_grammars import Grammars
from tests.cpu.models.fallback.test_exact import TYPES
from tests.cpu.models.fallback.tiny_models import tiny_model
from tests.cpu.models.peers import VARIANTS, peer, prompt_of
from tests.cpu.same_bits import needs_same_bits
from tests.cpu.tiny_models import write_ascii_tokenizer

pytestmark = needs_same_bits

THROUGH = "transformers/"
"""Before a model type: the model runs through its class of transformers."""
EVERYDAY = [("gemma2", "fp8")]
NAMES = [*VARIANTS, *(THROUGH + one for one in TYPES)]
ALL = [(name, quantization) for name in NAMES for quantization in (None, "fp8")]
CASES = [*EVERYDAY, *tiers.long(*(one for one in ALL if one not in EVERYDAY))]
BASE = {"dtype": "float32", "max_model_len": 176, "max_logprobs": -1, "use_tqdm_on_load": False}
PLAIN = {"enable_prefix_caching": False, "enforce_eager": True}
CHUNK = 64
TIGHT = {"block_size": 4, "enable_prefix_caching": False, "max_num_batched_tokens": CHUNK}
PATHS = {
    "in a batch": {},
    "in small chunks": {"max_num_batched_tokens": 9},
    "preempted": TIGHT,
    "preempted, with a host tier": TIGHT
    | {"enable_prefix_caching": True, "kv_offloading_size": 0.01, "steps_in_flight": 2},
}
OUTPUT = 24
GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 1}
RANDOM = {"temperature": 0.9, "seed": 11}
REGEX = "[a-f ]{4,9}[!?]"
REQUESTS = [
    (5, GREEDY),
    (60, GREEDY | {"repetition_penalty": 1.2}),
    (130, GREEDY),
    (130, RANDOM | {"ignore_eos": True, "n": 3}),
    (33, RANDOM | {"regex": REGEX}),
    (130, RANDOM | {"regex": REGEX, "n": 2}),
]
"""(length of the prompt, parameters); prompts of one length are equal but for their end."""


@pytest.fixture(autouse=True, scope="module")
def grammars_at_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_grammars", Grammars)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name of a case -> folder of its checkpoint, with a tokenizer."""

    @functools.lru_cache(maxsize=1)
    def folder(name):
        kind = name.removeprefix(THROUGH)
        made = tmp_path_factory.mktemp(kind)
        if kind == name:
            model = peer(name, made)
        else:
            model = tiny_model(kind)
            model.save_pretrained(made)
        write_ascii_tokenizer(made, model.config.get_text_config().vocab_size)
        return made

    return folder


def plain(folder, **settings):
    """What each request gets alone."""
    llm = LLM(str(folder), **BASE | PLAIN | settings)
    return [answers(llm, [one])[0] for one in range(len(REQUESTS))]


def tight(folder, impl):
    """So many blocks of 4 tokens that one sequence and a fifth of another fit."""
    llm = LLM(str(folder), load_format="dummy", model_impl=impl, **BASE)
    config = llm.llm_engine.config
    longest = max(length for length, _ in REQUESTS) + OUTPUT
    return int(1.2 * max_blocks_held(config.cache.groups, longest, 4, CHUNK))


def answers(llm, which):
    """(token ids, text) of every answer to some of the requests."""
    vocab = llm.llm_engine.config.model.vocab
    prompts, params = [], []
    for i in which:
        length, given = REQUESTS[i]
        ids = [*prompt_of(length, vocab)[:-3], 3 + i, 4 + i, 5 + i]
        regex = {k: v for k, v in given.items() if k == "regex"}
        rest = {k: v for k, v in given.items() if k != "regex"}
        structured = StructuredOutputsParams(**regex) if regex else None
        prompts.append({"prompt_token_ids": ids})
        params.append(SamplingParams(max_tokens=OUTPUT, structured_outputs=structured, **rest))
    outs = llm.generate(prompts, params, use_tqdm=False)
    return [[(list(one.token_ids), one.text) for one in out.outputs] for out in outs]


@pytest.mark.slow("five engines, and a request at a time in one of them")
@pytest.mark.parametrize(("model", "quantization"), CASES)
def test_answers_are_the_same_on_every_path(model, quantization, folders):
    folder = folders(model)
    impl = "transformers" if model.startswith(THROUGH) else "quire"
    given = {"quantization": quantization, "model_impl": impl}
    want = plain(folder, **given)
    for name, settings in PATHS.items():
        if "block_size" in settings:
            settings = settings | {"num_gpu_blocks_override": tight(folder, impl)}
        llm = LLM(str(folder), **BASE | given | settings)
        for _ in range(2):  # the second time with prefix hits, if any
            assert answers(llm, range(len(REQUESTS))) == want, name
        stats = llm.llm_engine.engine.stats()
        if "num_gpu_blocks_override" in settings:
            assert stats.preemptions > 0, name
        if "kv_offloading_size" in settings:
            assert stats.host_loaded_blocks > 0, name
        assert stats.held_blocks == stats.held_host_blocks == 0, name
    texts = [
        text for (_, given), answer in zip(REQUESTS, want) if "regex" in given for _, text in answer
    ]
    assert all(re.fullmatch(REGEX, text) for text in texts), texts
    assert len({tuple(ids) for answer in want for ids, _ in answer}) > 4, "they are all alike"
