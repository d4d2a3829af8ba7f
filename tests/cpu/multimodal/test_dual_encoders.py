"""LLM.embed and LLM.score of CLIP, SigLIP and SigLIP 2 against get_text_features and
get_image_features of transformers."""

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams, RequestError
from tests.cpu.multimodal import dual_encoders
from tests.cpu.multimodal.families import image

KINDS = ["clip", "clip with the old end token", "siglip", "siglip2"]
SIZES = [(56, 56), (40, 120), (300, 61), (200, 333), (5, 9)]
TEXTS = ["w7", "w5 w6 w7 w8", "w9 w180 w10 w11 w12 w13", ""]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """(model of transformers, its image processor, its tokenizer, ours)"""
    folder = tmp_path_factory.mktemp("model")
    theirs = dual_encoders.write(request.param, folder)
    llm = LLM(str(folder), dtype="float32", use_tqdm_on_load=False, mm_processor_workers=2)
    return *theirs, llm


def images_of(seed=0):
    return [image(*size, seed=seed) for size in SIZES]


@torch.inference_mode()
def image_features(pair, images):
    model, processor, _, _ = pair
    found = [processor(one, return_tensors="pt") for one in images]
    return torch.cat([model.get_image_features(**one).pooler_output for one in found]).numpy()


@torch.inference_mode()
def text_features(pair, ids):
    """ids: of one text. SigLIP's are padded to all positions."""
    model, _, tokenizer, _ = pair
    if model.config.model_type != "clip":
        length = model.config.text_config.max_position_embeddings
        ids = [*ids, *[tokenizer.pad_token_id] * (length - len(ids))]
    return model.get_text_features(torch.tensor([ids])).pooler_output[0].numpy()


def embed(pair, prompts, **params):
    found = pair[-1].embed(prompts, use_tqdm=False, pooling_params=PoolingParams(**params))
    return np.array([one.outputs.embedding for one in found])


def picture(one):
    return {"prompt": "", "multi_modal_data": {"image": one}}


def normalized(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.sampled(2)
@pytest.mark.slow("starts four engines, and imports transformers")
def test_texts_and_images_have_the_features_of_transformers(pair):
    images, tokenizer = images_of(), pair[2]
    prompts = []
    for text, one in zip(TEXTS, images):  # texts and images in the same steps
        prompts += [text, picture(one)]
    prompts.append(picture(images[-1]))
    texts = np.array([text_features(pair, tokenizer(one)["input_ids"]) for one in TEXTS])
    want = np.concatenate((texts, image_features(pair, images)))
    assert np.ptp(normalized(want) @ normalized(want).T) > 0.1
    for active in (False, True):
        got = embed(pair, prompts, use_activation=active)
        got = np.concatenate((got[:-1:2], got[1::2], got[-1:]))
        np.testing.assert_allclose(got, normalized(want) if active else want, atol=2e-5, rtol=2e-5)


def test_token_ids_end_where_transformers_pools(pair):
    eos = dual_encoders.EOS
    given = [[1, 7, 8, eos], [1, 7, eos, 9, eos, 10], [1, 7, 8, 9], [1, 20, 197, 30, 197]]
    want = np.array([text_features(pair, ids) for ids in given])
    got = embed(pair, [{"prompt_token_ids": ids} for ids in given], use_activation=False)
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-5)


def test_texts_are_scored_against_images(pair):
    llm, images = pair[-1], images_of(seed=1)
    documents = [{"content": [{"type": "image_pil", "image_pil": one}]} for one in images]
    found = llm.score("w7 w8", [*documents, "w7 w8"], use_tqdm=False)
    text = text_features(pair, pair[2]("w7 w8")["input_ids"])
    want = normalized(np.concatenate((image_features(pair, images), text[None])))
    np.testing.assert_allclose(
        [one.outputs.score for one in found], want @ normalized(text), atol=1e-5
    )


def test_an_image_is_cached_by_its_content(pair):
    llm, (first, second, *_) = pair[-1], images_of(seed=2)
    got = embed(pair, [picture(first), picture(second), picture(first)])
    assert (got[0] == got[2]).all()
    assert (got[0] != got[1]).any()
    assert (embed(pair, [picture(first)]) == got[:1]).all()
    assert llm.llm_engine.config.media_encoder.step_rows >= 1


def test_a_prompt_has_a_text_or_one_image(pair):
    one = image(56, 56)
    for prompt in (
        {"prompt": "w7", "multi_modal_data": {"image": one}},
        {"prompt_token_ids": [7], "multi_modal_data": {"image": one}},
        {"prompt": "", "multi_modal_data": {"image": [one, one]}},
    ):
        with pytest.raises(RequestError, match="a text or one image, never both"):
            embed(pair, [prompt])
    part = {"type": "image_pil", "image_pil": one}
    with pytest.raises(RequestError, match="a text or one image, never both"):
        pair[-1].score("w7", {"content": [part, {"type": "text", "text": "w7"}]})
    with pytest.raises(RequestError, match="this model has no task 'token_embed'"):
        embed(pair, ["w7"], task="token_embed")
