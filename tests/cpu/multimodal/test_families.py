"""Images of each family: tensors, tokens, rows and log-probabilities are those of transformers."""

import re

import pytest
import torch

from tests.cpu.multimodal.families import FAMILIES, image, made

SIZES = [(56, 56), (40, 120), (200, 61), (300, 333)]
PROMPTS = [(), (0,), (1, 2), (3, 0, 1)]
"""Which of the images each prompt has."""
KWARGS = {"gemma3": {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 40}}
"""Options of requests."""
FLAT = {"llava_onevision"}
"""Transformers tiles no image of a nested list that has several."""
CAUSAL = {"paligemma", "gemma3"}
"""Compared without spans in which tokens see each other in both directions."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp(request.param))


def prompt_of(pair, count):
    token = pair.own_processor.placeholder("image", 1)
    words = [f"w3 w17\n{token}\nw5" for _ in range(count)]
    return " ".join([*words, "w40 w41 w42"])


def both(pair, which):
    """What transformers' processor makes of a prompt with these images, and the images."""
    images = [image(*SIZES[i]) for i in which]
    text = prompt_of(pair, len(images))
    if not images:
        return pair.processor.tokenizer(text, return_tensors="pt"), images, text
    more = KWARGS.get(pair.hf["model_type"], {})
    given = images if pair.hf["model_type"] in FLAT else [images]
    found = pair.processor(images=given, text=[text], return_tensors="pt", **more)
    if pair.hf["model_type"] in CAUSAL:
        found.pop("token_type_ids", None)
        found.pop("labels", None)
    return found, images, text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("which", PROMPTS)
def test_logprobs_of_prompts_with_images_equal_transformers(pair, which):
    inputs, images, text = both(pair, which)
    items = pair.process(images, **KWARGS.get(pair.hf["model_type"], {}))
    if images:
        text = pair.own_processor.prompt_text(text, ["image"] * len(images))
    written = (pair.own_processor.item_text(item, 1) for item in items)
    token = re.escape(pair.own_processor.placeholder("image", 1))
    text = re.sub(token, lambda _: next(written), text)
    ids = pair.processor.tokenizer.encode(text)
    ids, runs = pair.expanded(ids, items)
    assert ids == inputs["input_ids"][0].tolist()
    rows = pair.rows(items) if items else []
    assert all(len(own) <= pair.ours[0].media_encoder.max_rows("image") for own in rows)
    with torch.inference_mode():
        wanted = pair.theirs(**inputs).logits[0].log_softmax(-1)
    got = pair.logits(ids, runs, rows).log_softmax(-1)
    assert (got - wanted).abs().max().item() < 1e-4
    assert not torch.isnan(got).any()
