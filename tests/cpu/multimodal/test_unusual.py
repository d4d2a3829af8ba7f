"""LLM.generate with images in models of other architectures than a decoder with a tower: tokens and
log-probabilities of transformers, however the engine divides its work."""

import itertools

import pytest

from quire import LLM, RequestError, SamplingParams
from quire.errors import ConfigError
from tests.cpu.multimodal.families import image
from tests.cpu.multimodal.unusual import FAMILIES

SIZES = [(56, 56), (40, 120), (200, 61), (300, 333)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=7, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    found = FAMILIES[request.param](tmp_path_factory.mktemp(request.param))
    found.llm = llm_of(found)
    return found


def llm_of(pair, **settings):
    usual = {"dtype": "float32", "use_tqdm_on_load": False, "num_gpu_blocks_override": 400}
    return LLM(str(pair.folder), mm_processor_workers=1, **usual | pair.settings | settings)


def prompts_of(pair):
    """(text, images) of each prompt: with one image each, with all that are allowed, and none."""
    images = itertools.cycle(image(*size) for size in SIZES)
    found = [(text, [next(images)]) for text in pair.texts]
    if pair.limit > 1:
        found.append((pair.texts[0], [next(images) for _ in range(pair.limit)]))
    without = [] if pair.needs_image else [(pair.texts[1], [])]
    return [*found, *without, found[0]]


def asked(pair, prompts):
    return [
        {"prompt": pair.prompt(text, images)}
        | ({"multi_modal_data": {"image": images}} if images else {})
        for text, images in prompts
    ]


def result(output):
    tokens = list(output.token_ids)
    return tokens, [entry[token].logprob for token, entry in zip(tokens, output.logprobs)]


def check(pair, prompts, answers):
    """Each token is transformers' best, and its log-probability equal."""
    for (text, images), answer in zip(prompts, answers, strict=True):
        tokens, logprobs = result(answer.outputs[0])
        want = pair.logprobs(text, images, tokens)
        assert tokens == want.argmax(-1).tolist()
        assert logprobs == pytest.approx(want.max(-1).values.tolist(), abs=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.slow("starts an engine for each family, and imports transformers")
def test_tokens_and_logprobs_are_those_of_transformers(pair):
    prompts = prompts_of(pair)
    answers = pair.llm.generate(asked(pair, prompts), GREEDY, use_tqdm=False)
    check(pair, prompts, answers)
    several = {tuple(one.outputs[0].token_ids) for one in answers[: len(pair.texts)]}
    assert len(several) > 1, "the prompt changes nothing"


def test_an_image_changes_the_answer(pair):
    text = pair.texts[1]
    prompts = [(text, [image(*size)]) for size in SIZES[1:3]]
    one, two = pair.llm.generate(asked(pair, prompts), GREEDY, use_tqdm=False)
    assert result(one.outputs[0]) != result(two.outputs[0])


SETTINGS = {
    "chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 3},
    "few blocks": {"max_model_len": 96, "block_size": 8},
    "no prefix cache": {"enable_prefix_caching": False, "enforce_eager": True},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_the_same_in_any_engine(pair, name):
    prompts = prompts_of(pair)
    few = {"num_gpu_blocks_override": pair.few_blocks} if name == "few blocks" else {}
    llm = llm_of(pair, **SETTINGS[name], **few)
    check(pair, prompts, llm.generate(asked(pair, prompts), GREEDY, use_tqdm=False))


def test_a_prefix_is_found_again_with_the_same_image_alone(pair):
    text, images = prompts_of(pair)[0]
    other = [image(*SIZES[0], seed=9)] * len(images)
    prompts = [(text, images), (text, other), (text, images)]
    for one in prompts:
        check(pair, [one], pair.llm.generate(asked(pair, [one]), GREEDY, use_tqdm=False))


def test_several_answers_of_one_prompt_share_it(pair):
    text, images = prompts_of(pair)[1]
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, logprobs=0)
    (answer,) = pair.llm.generate(asked(pair, [(text, images)]), params, use_tqdm=False)
    for one in answer.outputs:
        tokens, logprobs = result(one)
        want = pair.logprobs(text, images, tokens)
        assert logprobs == pytest.approx(
            [want[i, token].item() for i, token in enumerate(tokens)], abs=1e-4
        )


def test_a_prompt_without_the_image_that_it_needs_is_refused(pair):
    if pair.needs_image:
        for prompt in ("w9", {"encoder_prompt": "w9", "decoder_prompt": "w5"}):
            with pytest.raises(RequestError, match="continues a text about an image"):
                pair.llm.generate([prompt], GREEDY, use_tqdm=False)
        with pytest.raises(ConfigError, match="without language_model_only"):
            llm_of(pair, language_model_only=True)


def test_more_images_than_a_prompt_may_have_are_refused(pair):
    images = [image(56, 56)] * (pair.limit + 1)
    if pair.limit < 3:
        with pytest.raises(RequestError, match=f"at most {pair.limit} image"):
            pair.llm.generate(asked(pair, [(pair.texts[0], images)]), GREEDY, use_tqdm=False)
