"""Drafters of folders, through LLM(): what the options name drafts, and texts are those without."""

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from tests.cpu.drafters.heads import TARGET, target_tensors, write
from tests.cpu.drafters.test_eagle3 import PLAIN, SPECULATORS, head_tensors

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8] * 6}, {"prompt_token_ids": [9]}]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, n=2, max_tokens=24, ignore_eos=True, logprobs=2),
]
SMALL = {"skip_tokenizer_init": True, "dtype": "float32", "kv_cache_memory_bytes": "4MiB"}


def answers(model, **options):
    """Token ids and logprobs, and the figures of the drafts of each sequence."""
    llm = LLM(str(model), **SMALL, **options)
    found = [
        one for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False) for one in output.outputs
    ]
    return [(one.token_ids, one.logprobs) for one in found], [
        one.spec_decode_metrics for one in found
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write(tmp_path_factory.mktemp("target"), TARGET, target_tensors())


@pytest.fixture(scope="module")
def want(target):
    tokens, figures = answers(target)
    assert figures == [None] * 3
    return tokens


def test_the_model_as_its_own_draft_model_is_accepted(target, want):
    got, figures = answers(target, speculative_config={"model": str(target), "adaptive": False})
    assert [one for one, _ in got] == [one for one, _ in want]
    assert figures[0].draft_acceptance_rate == 1
    assert figures[0].mean_acceptance_length > 4
    assert sum(figures[0].acceptance_histogram) == figures[0].num_spec_steps


def test_the_words_of_older_scripts_mean_ngram(target, want):
    got, figures = answers(
        target,
        speculative_model="[ngram]",
        num_speculative_tokens=5,
        ngram_prompt_lookup_max=4,
        ngram_prompt_lookup_min=1,
        use_v2_block_manager=True,
    )
    assert got == want
    assert figures[0].num_draft_tokens > 0


def test_the_files_of_a_head_show_its_method(target, want, tmp_path):
    head = write(tmp_path / "head", PLAIN, head_tensors("midlayer."))
    got, figures = answers(target, spec_model=str(head), spec_tokens=2)
    assert [one for one, _ in got] == [one for one, _ in want]
    assert figures[0].num_draft_tokens > 0


def test_a_head_that_names_its_model_is_served_with_it(target, want, tmp_path):
    more = {**SPECULATORS["speculators_config"], "verifier": {"name_or_path": str(target)}}
    hf = {**SPECULATORS, "speculators_config": more}
    head = write(tmp_path / "head", hf, head_tensors("layers.0."))
    got, figures = answers(head)
    assert [one for one, _ in got] == [one for one, _ in want]
    assert figures[0].num_draft_tokens > 0
    with pytest.raises(ConfigError, match="is a head for speculative decoding: give its model"):
        answers(head, speculative_config={"method": "ngram"})
    nameless = write(tmp_path / "nameless", SPECULATORS, head_tensors("layers.0."))
    with pytest.raises(ConfigError, match="is a head for speculative decoding: give its model"):
        answers(nameless)


def test_drafters_that_cannot_serve_the_model_are_refused(target, tmp_path):
    other = write(tmp_path / "other", {**TARGET, "vocab_size": 96}, {})
    for given in ({"model": str(other)}, {"model": str(other), "method": "draft_model"}):
        with pytest.raises(ConfigError, match="96 tokens, and that of"):
            answers(target, speculative_config=given)
    head = write(tmp_path / "head", PLAIN, head_tensors("midlayer."))
    with pytest.raises(ConfigError, match="are those of method 'eagle3', not 'draft_model'"):
        answers(target, speculative_config={"model": str(head), "method": "draft_model"})
