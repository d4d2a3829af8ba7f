"""Pooling models on the GPU: the numbers of the CPU, with graphs and without, and no late kernel."""

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams
from tests.cpu.pooling.folders import encoder_folder, st_folder, texts
from tests.cpu.tiny_models import write_model

TEXTS = texts(50)
METHODS = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
TOLERANCE = 2e-3
IDS = [[3 + i * 7 % 80 for i in range(length)] for length in (1, 5, 64, 129, 300, 700, 17, 2)]


def llm_of(folder, **settings):
    return LLM(str(folder), dtype="float32", use_tqdm_on_load=False, **settings)


def vectors(outputs):
    return np.array([one.outputs.embedding for one in outputs])


@pytest.fixture(scope="module", params=["bert", "roberta", "mpnet", "modernbert"])
def encoder(request, tmp_path_factory):
    """(folder, vectors on the CPU)"""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    dense = [(24, torch.nn.Tanh())]
    st_folder(folder, request.param, METHODS, dense=dense, normalize=True)
    given = {"truncate_prompt_tokens": -1, "use_tqdm": False}
    return folder, vectors(llm_of(folder, device="cpu").embed(TEXTS, **given))


@pytest.mark.parametrize("eager", [False, True])
def test_an_encoder_gives_the_vectors_of_the_cpu(encoder, eager):
    folder, want = encoder
    llm = llm_of(folder, enforce_eager=eager, gpu_memory="2GiB")
    given = {"truncate_prompt_tokens": -1, "use_tqdm": False}
    np.testing.assert_allclose(vectors(llm.embed(TEXTS, **given)), want, atol=TOLERANCE)
    alone = np.concatenate([vectors(llm.embed([one], **given)) for one in TEXTS])
    np.testing.assert_allclose(alone, want, atol=TOLERANCE)
    assert llm.llm_engine.engine.health_probe_step()
    assert llm.llm_engine.engine.executor.late_work().seconds == 0.0


def test_pairs_have_their_token_types(tmp_path):
    encoder_folder(tmp_path / "bert", "bert", "classify", num_labels=1)
    given = ("what is the time", ["the time", "only now and then"])
    cpu, gpu = (
        [
            one.outputs.score
            for one in llm_of(tmp_path / "bert", **more).score(*given, use_tqdm=False)
        ]
        for more in ({"device": "cpu"}, {"gpu_memory": "2GiB"})
    )
    np.testing.assert_allclose(gpu, cpu, atol=TOLERANCE)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    write_model(folder, "llama", max_position_embeddings=1024)
    return folder


@pytest.mark.parametrize("pooling", ["LAST", "MEAN", "CLS"])
@pytest.mark.parametrize(
    "settings", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 96}], ids=str
)
def test_a_decoder_gives_the_vectors_of_the_cpu(decoder, pooling, settings):
    more = {
        "runner": "pooling",
        "convert": "embed",
        "pooler_config": {"seq_pooling_type": pooling},
        "skip_tokenizer_init": True,
    }
    prompts = [{"prompt_token_ids": one} for one in IDS]
    cpu = vectors(llm_of(decoder, device="cpu", **more).embed(prompts, use_tqdm=False))
    llm = llm_of(decoder, gpu_memory="2GiB", **more, **settings)
    for _ in range(2):  # the second time from the prefix cache
        got = vectors(llm.embed(prompts, use_tqdm=False))
        np.testing.assert_allclose(got, cpu, atol=TOLERANCE)
    assert llm.llm_engine.engine.executor.late_work().seconds == 0.0


def test_vectors_and_tokens_share_an_engine(decoder):
    llm = llm_of(decoder, gpu_memory="2GiB", skip_tokenizer_init=True)
    prompts = [{"prompt_token_ids": one} for one in IDS]
    raw = PoolingParams(use_activation=False)
    got = vectors(llm.embed(prompts, pooling_params=raw, use_tqdm=False))
    cpu = llm_of(decoder, device="cpu", skip_tokenizer_init=True)
    want = vectors(cpu.embed(prompts, pooling_params=raw, use_tqdm=False))
    np.testing.assert_allclose(got, want, atol=TOLERANCE * 4)
