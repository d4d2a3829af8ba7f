"""LLM.embed and LLM.score of CLIP, SigLIP and SigLIP 2 against get_text_features and
get_image_features of transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams
from quire.config.facts import read_hf_config
from quire.media.image_ops import from_tensor
from quire.media.processor import DecodedImage, ProcessorFiles, processor_type
from quire.models.base import EncoderInput
from quire.models.build import build_model, read_model_config
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


def normalized(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.slow("imports torch and transformers, and starts four engines")
def test_texts_have_the_features_of_transformers(pair):
    want = np.array([text_features(pair, pair[2](one)["input_ids"]) for one in TEXTS])
    assert np.ptp(normalized(want) @ normalized(want).T) > 0.1
    for active in (False, True):
        got = embed(pair, TEXTS, use_activation=active)
        np.testing.assert_allclose(got, normalized(want) if active else want, atol=2e-5, rtol=2e-5)


def test_token_ids_end_where_transformers_pools(pair):
    eos = dual_encoders.EOS
    given = [[1, 7, 8, eos], [1, 7, eos, 9, eos, 10], [1, 7, 8, 9], [1, 20, 197, 30, 197]]
    want = np.array([text_features(pair, ids) for ids in given])
    got = embed(pair, [{"prompt_token_ids": ids} for ids in given], use_activation=False)
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-5)


@torch.inference_mode()
def test_images_have_the_features_of_transformers(pair):
    """As items of one step, beside texts, whose places they take in the result."""
    images, config = images_of(), pair[-1].llm_engine.config.media
    files = ProcessorFiles(config.config, config.preprocessors, config.processor)
    processor = processor_type(config.family)(files)
    items = [processor.process(DecodedImage(np.asarray(one)), {}) for one in images]
    assert all(processor.expand(one, 1).rows == 1 for one in items)
    folder = Path(pair[-1].llm_engine.config.model.name)
    model_type, made = read_model_config(read_hf_config(folder), head="none")
    model = build_model(model_type, made, folder=folder, dtype=torch.float32, progress=False)
    rows = model.media_encoder.encode(
        [
            EncoderInput(
                "image", {x.name: torch.from_numpy(from_tensor(x).copy()) for x in one.tensors}
            )
            for one in items
        ]
    )
    want = image_features(pair, images)
    np.testing.assert_allclose(torch.cat(rows).numpy(), want, atol=2e-5, rtol=2e-5)
    assert model.media_encoder.makes_results
