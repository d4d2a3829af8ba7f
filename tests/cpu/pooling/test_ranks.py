"""Models that pool, on two ranks: the results of one."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from quire import LLM, PoolingParams
from tests import tiers
from tests.cpu.pooling.folders import encoder_folder, st_folder, texts
from tests.cpu.tiny_models import write_model

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of two processes")]

QUIET = {"dtype": "float32", "use_tqdm_on_load": False, "device": "cpu"}
QUERY, DOCUMENTS = "what is the time of day", ["the time", "only now and then", "they were " * 9]


def embedder(folder):
    """With a Dense layer: of whole texts, of tokens, and scores of two vectors."""
    st_folder(folder, "bert", dense=[(24, torch.nn.Tanh())])
    return {}, [
        lambda llm: llm.embed(texts(30), truncate_prompt_tokens=-1, use_tqdm=False),
        lambda llm: llm.encode(DOCUMENTS, pooling_task="token_embed", use_tqdm=False),
        lambda llm: llm.score(QUERY, DOCUMENTS, use_tqdm=False),
    ]


def cross_encoder(folder):
    encoder_folder(folder, "roberta", "classify", num_labels=1)
    raw = PoolingParams(activation=False)
    return {}, [lambda llm: llm.score(QUERY, DOCUMENTS, pooling_params=raw, use_tqdm=False)]


def classifier(folder):
    encoder_folder(folder, "modernbert", "classify", num_labels=3)
    return {}, [lambda llm: llm.classify(DOCUMENTS, use_tqdm=False)]


def splade(folder):
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    encoder = folder.with_name("transformers")
    encoder_folder(encoder, "bert", "lm")
    pooling = SpladePooling(pooling_strategy="max")
    SparseEncoder(modules=[MLMTransformer(str(encoder)), pooling], device="cpu").save(str(folder))
    return {}, [lambda llm: llm.embed(DOCUMENTS, use_tqdm=False)]


def late_interaction(folder):
    encoder_folder(folder, "bert")
    path = folder / "model.safetensors"
    matrix = torch.randn(32, 64, generator=torch.Generator().manual_seed(5)) * 0.15
    names = {f"bert.{name}": value for name, value in load_file(path).items()}
    save_file(names | {"linear.weight": matrix}, path)
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | {"architectures": ["HF_ColBERT"]}))
    metadata = {"dim": 32, "query_maxlen": 32, "doc_maxlen": 60, "attend_to_mask_tokens": True}
    metadata |= {"query_token_id": "[UNK]", "doc_token_id": "[SEP]"}
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    return {}, [
        lambda llm: llm.encode(DOCUMENTS, pooling_task="token_embed", use_tqdm=False),
        lambda llm: llm.score(QUERY, DOCUMENTS, use_tqdm=False),
    ]


def reranker(folder):
    """A decoder, whose labels are rows of the cut output head; in chunks."""
    write_model(folder, "qwen3", max_position_embeddings=2048, vocab_size=1300)
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary.add_tokens(["yes", "no"])
    vocabulary.save(str(folder / "tokenizer.json"))
    return {"runner": "pooling", "convert": "classify", "max_num_batched_tokens": 64}, [
        lambda llm: llm.score(QUERY, DOCUMENTS, use_tqdm=False),
        lambda llm: llm.score(QUERY, DOCUMENTS, use_tqdm=False),
    ]


KINDS = [reranker, *tiers.long(embedder, cross_encoder, classifier, splade, late_interaction)]


def numbers(outputs):
    found = [one.outputs for one in outputs]
    for name in ("embedding", "data", "probs", "score"):
        if hasattr(found[0], name):
            return [np.asarray(getattr(one, name)) for one in found]
    raise AssertionError(found[0])


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_pool_as_one_does(kind, tmp_path):
    folder = tmp_path / ("Qwen3-Reranker-tiny" if kind is reranker else kind.__name__)
    options, calls = kind(folder)
    one, two = (LLM(str(folder), **QUIET | options, tensor_parallel_size=ranks) for ranks in (1, 2))
    for call in calls:
        for a, b in zip(numbers(call(one)), numbers(call(two)), strict=True):
            np.testing.assert_allclose(b, a, atol=2e-5)
    two.llm_engine.engine.shutdown()
