"""Images of each family: tensors, tokens, rows and log-probabilities are those of transformers."""

import re

import pytest
import torch

from quire.kernels.framework import lazy_fusion
from quire.media.expand import ReadyItem, place_items
from quire.media.processor import ProcessedMedia
from quire.text.media_prompt import _ItemTexts
from tests.cpu.multimodal.families import FAMILIES, Pair, image, made

SIZES = [(56, 56), (40, 120), (200, 61), (300, 333)]
SIZES_OF = {"phi4_multimodal": [(56, 56), (40, 112), (168, 61), (150, 168)]}
"""Where transformers has no processor that resizes as PIL does: sizes that need none."""
PROMPTS = [(), (0,), (1, 2), (3, 0, 1)]
"""Which of the images each prompt has."""
KWARGS = {
    "got_ocr2": {"crop_to_patches": True, "max_patches": 6},
    "gemma3": {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 40},
}
"""Options of requests."""
FLAT = {"llava_onevision", "got_ocr2"}
"""Transformers tiles no image of a nested list that has several."""
TAKES_ROWS = {
    *("llava", "vipllava", "llava_next", "llava_next_video", "llava_onevision", "paligemma"),
    *("gemma3", "internvl", "aya_vision", "got_ocr2", "deepseek_vl"),
}
"""Model types that read rows of an encoder in place of an image."""
CAUSAL = {"paligemma", "gemma3", "gemma4"}
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
    sizes = SIZES_OF.get(pair.hf["model_type"], SIZES)
    images = [image(*sizes[i]) for i in which]
    text = prompt_of(pair, len(images))
    if not images:
        return pair.processor.tokenizer(text, return_tensors="pt"), images, text
    more = KWARGS.get(pair.hf["model_type"], {})
    given = images if pair.hf["model_type"] in FLAT else [images]
    found = pair.processor(images=given, text=[text], return_tensors="pt", **more)
    for name, one in found.items():
        if torch.is_tensor(one) and one.dtype == torch.bfloat16:  # Llama 4's, for such a model
            found[name] = one.float()
    if pair.hf["model_type"] in CAUSAL:
        found.pop("token_type_ids", None)
        found.pop("mm_token_type_ids", None)
        found.pop("labels", None)
    return found, images, text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("which", PROMPTS)
def test_logprobs_of_prompts_with_images_equal_transformers(pair, which):
    inputs, images, text = both(pair, which)
    items = pair.process(images, **KWARGS.get(pair.hf["model_type"], {}))
    if images:
        text = pair.own_processor.prompt_text(text, ["image"] * len(images))
    waiting = iter(items)
    token = re.escape(pair.own_processor.placeholder("image", 1)) + "(?=(.?))"
    text = re.sub(
        token, lambda m: pair.own_processor.item_text(next(waiting), 1, m[1]), text, flags=re.S
    )
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


def test_rows_that_a_caller_gives_have_the_tokens_of_their_image(pair):
    ours, kind = pair.own_processor, pair.hf["model_type"]
    if pair.hf["vision_config"].get("model_type") == "pixtral" or kind not in TAKES_ROWS:
        assert not ours.takes_embeds
        return
    assert ours.takes_embeds
    items = pair.process([image(*SIZES[0]), image(*SIZES[2])], **KWARGS.get(kind, {}))
    for item, rows in zip(items, pair.rows(items)):
        given = ProcessedMedia("image", (), {"rows": len(rows)})
        assert rows.shape[1] == ours.row_width
        assert ours.expand(given, 1) == ours.expand(item, 1)
        assert ours.item_text(given, 1) == ours.item_text(item, 1)


@torch.inference_mode()
def test_rows_are_the_same_in_slices(pair):
    items = pair.process([image(*SIZES[0]), image(*SIZES[1])])
    encoder, given = pair.ours[0].media_encoder, pair.encoder_inputs(items)
    slices = encoder.encode_in_slices(given)
    for _ in range(encoder.slices if encoder.slices > 1 else 0):
        next(slices)
        lazy_fusion.flush()  # others run between two slices
        encoder.encode(given[:1])
    with pytest.raises(StopIteration) as ended:
        next(slices)
    found = zip(ended.value.value, encoder.encode(given), strict=True)
    assert all(torch.equal(*both) for both in found)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("form", ["{0}{0}\n{0}", "w3{0}w5", "{0}\n{0}<end_of_utterance>{0}{0}{0}."])
def test_images_of_idefics_2_share_tokens_and_take_a_space(tmp_path, form, split):
    config, processor = FAMILIES["idefics2"](do_image_splitting=split)
    pair = Pair(None, processor, tmp_path)
    pair.hf = config.to_dict()
    text = form.format("<image>")
    images = [image(*SIZES[i % 4]) for i in range(text.count("<image>"))]
    want = processor(images=[images], text=[text])["input_ids"][0]
    items = pair.process(images)
    ready = [
        ReadyItem("image", i, bytes([i]), one, pair.own_processor.expand(one, i))
        for i, one in enumerate(items, 1)
    ]
    texts = _ItemTexts(ready, pair.own_processor)
    tokenizer = processor.tokenizer
    found = place_items(tokenizer.encode(texts.write(text)), ready, pair.own_processor)
    assert list(found.ids) == want
    rows = [
        one.start + at
        for one in found.items
        for start, count in one.runs
        for at in range(start, start + count)
    ]
    assert rows == [at for at, token in enumerate(want) if token == 150]
    again = place_items(found.ids, ready, pair.own_processor, may_be_expanded=True)
    assert again == found
