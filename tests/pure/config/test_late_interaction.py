"""Files of ColBERT models, and families of rerankers that are decoders."""

import json
import string

import pytest

from quire.config.engine_config import DenseSection, LateInteractionSection
from quire.config.late_interaction import read_colbert_folder, resolve_late_interaction
from quire.config.sentence_transformers import FolderModules
from quire.errors import ConfigError
from tests.pure.config.test_pooling import section, use

PUNCTUATION = tuple(string.punctuation)


def resolved(settings=None, transformer=None, mask=None):
    return resolve_late_interaction(
        FolderModules(
            kind="multi_vector",
            settings=settings or {},
            transformer=transformer or {},
            mask=mask or {},
        )
    )


def test_other_models_have_none():
    assert resolve_late_interaction(FolderModules()) is None


def test_fields_of_pylate():
    given = {
        "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 48,
        "document_length": 300, "attend_to_expansion_tokens": True, "skiplist_words": ["!"],
    }  # fmt: skip
    want = LateInteractionSection(
        query_prefix="[Q] ",
        document_prefix="[D] ",
        query_length=48,
        max_query_length=48,
        document_length=300,
        attends_to_expansion=True,
        skiplist=("!",),
    )
    assert resolved(given) == want
    usual = resolved({"query_prefix": "[Q] "})
    assert (usual.query_length, usual.attends_to_expansion) == (32, False)
    assert usual.skiplist == PUNCTUATION
    without = resolved({"query_prefix": "[Q] ", "do_query_expansion": False, "query_length": 9})
    assert (without.query_length, without.max_query_length) == (None, 9)


@pytest.mark.parametrize(
    ("strategy", "limit", "want"),
    [("fixed", 64, 16), ("min", None, None), ("min", 64, 64), ("min", 8, 16)],
)
def test_fields_of_sentence_transformers(strategy, limit, want):
    expansion = {"strategy": strategy, "length": 16, "attend": False, "token": "[X]"}
    found = resolved(
        transformer={"query_expansion": expansion, "query_length": limit, "document_length": 20},
        mask={"skiplist_words": ["a", "b"], "skiplist_tasks": ["document"]},
    )
    assert found == LateInteractionSection(
        query_length=16,
        max_query_length=want,
        document_length=20,
        expansion_token="[X]",
        skiplist=("a", "b"),
    )
    assert resolved() == LateInteractionSection()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transformer": {"query_expansion": {"strategy": "x"}}}, "strategy fixed or min"),
        ({"transformer": {"query_expansion": {"strategy": "min"}}}, "and a length"),
        ({"transformer": {"document_length": 0}}, "document_length must be an integer >= 1, got 0"),
        ({"mask": {"skiplist_tasks": ["query"]}}, "skiplist_tasks"),
        ({"mask": {"keep_only_token_ids": [1]}}, "keep_only_token_ids"),
        ({"settings": {"skiplist_words": [1]}}, "a list of tokens"),
        ({"settings": {"query_prefix": 5}}, "query_prefix must be a string"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        resolved(**fields)


def test_a_decoder_attends_to_what_expands_a_query():
    files = FolderModules(kind="multi_vector", settings={"query_prefix": "[Q]"})
    with pytest.raises(ConfigError, match="attend is false"):
        resolve_late_interaction(files, bidirectional=False)


def test_a_folder_of_colbert_itself(tmp_path):
    hf = {"architectures": ["HF_ColBERT"], "hidden_size": 64}
    assert read_colbert_folder(tmp_path, {"architectures": ["BertModel"]}) is None
    stated = {"dim": 96, "query_maxlen": 24, "doc_maxlen": 180, "attend_to_mask_tokens": False}
    (tmp_path / "artifact.metadata").write_text(json.dumps(stated))
    files = read_colbert_folder(tmp_path, hf)
    (dense,) = files.dense
    assert dense == DenseSection(
        folder="", inputs=64, outputs=96, bias=False, activation="identity"
    )
    assert files.normalize
    found = resolve_late_interaction(files)
    assert (found.query_prefix, found.document_prefix) == ("[unused0]", "[unused1]")
    assert (found.query_length, found.document_length) == (24, 180)
    assert found.skiplist == PUNCTUATION
    (tmp_path / "artifact.metadata").unlink()
    assert read_colbert_folder(tmp_path, hf).dense[0].outputs == 128


CLASSIFY = {"runner": "pooling", "convert": "classify"}


@pytest.mark.parametrize(
    ("name", "model_type", "tokens", "score_format"),
    [
        ("Qwen/Qwen3-Reranker-0.6B", "qwen3", ("no", "yes"), "qwen3_reranker"),
        ("mixedbread-ai/mxbai-rerank-base-v2", "qwen2", ("0", "1"), "mxbai_rerank_v2"),
        ("BAAI/bge-reranker-v2-gemma", "gemma", ("Yes",), "bge_reranker_gemma"),
    ],
)
def test_published_rerankers_are_known_by_name(name, model_type, tokens, score_format):
    hf = {"model_type": model_type}
    found = use("LlamaForCausalLM", name=name, hf=hf, **CLASSIFY)
    assert found.label_tokens == tokens
    assert found.label_difference == (len(tokens) == 2)
    _, made = section("LlamaForCausalLM", hf=hf, name=name, **CLASSIFY)
    assert (made.score_format, made.size, made.activation) == (score_format, 1, "sigmoid")
    assert not use("LlamaForCausalLM", name="any", hf=hf, **CLASSIFY).label_tokens


@pytest.mark.parametrize(
    ("hf", "score_format"),
    [
        ({"model_type": "qwen3", "classifier_from_token": ["no", "yes"]}, "qwen3_reranker"),
        ({"model_type": "llama", "classifier_from_token": ["no", "yes"]}, "concatenated"),
        ({"model_type": "llama", "num_labels": 1}, "pair"),
        ({"model_type": "bert", "num_labels": 1}, "pair"),
    ],
)
def test_prompts_of_pairs(hf, score_format):
    _, made = section("AForSequenceClassification", hf=hf)
    assert made.score_format == score_format


@pytest.mark.parametrize(
    ("hf", "types"),
    [
        ({"model_type": "bert"}, 2),
        ({"model_type": "xlm-roberta", "type_vocab_size": 1}, 0),
        ({"model_type": "mpnet"}, 0),
        ({"model_type": "llama", "type_vocab_size": 2}, 0),
    ],
)
def test_token_types_are_those_of_the_class(hf, types):
    assert section("AModel", hf=hf, runner="pooling")[1].token_types == types
