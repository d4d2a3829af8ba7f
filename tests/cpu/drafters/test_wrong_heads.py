"""Heads of another model are refused before anything is loaded, with the sizes of both."""

import logging

import pytest
import torch

from quire import LLM
from quire.cli.plan import main as plan
from quire.config.options import Options
from quire.engine.startup.model_setup import describe_model
from quire.env import read as read_env
from quire.errors import ConfigError
from tests.cpu.drafters.heads import TARGET, E, V, target_tensors, write
from tests.cpu.drafters.test_eagle3 import DRAFT_VOCAB, PLAIN, head_tensors
from tests.cpu.drafters.test_paths import head_of

HEAD = head_tensors("midlayer.")
IDS = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
WIDE = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": V,
}  # fmt: skip
MEDUSA = {"medusa_num_heads": 1, "medusa_num_layers": 1}


def medusa(size, vocab):
    zeros = torch.zeros
    return {
        "0.0.linear.weight": zeros(size, size),
        "0.0.linear.bias": zeros(size),
        "0.1.weight": zeros(vocab, size),
    }


def without(tensors, *names):
    return {name: one for name, one in tensors.items() if name not in names}


WRONG = {
    "rows of its output": (
        {**PLAIN, "draft_vocab_size": 41}, HEAD, "lm_head.weight has 40 rows, .* ask for 41"),
    "no size of its vocabulary": (
        without(PLAIN, "draft_vocab_size"), HEAD, f"lm_head.weight has 40 rows, .* ask for {V}"),
    "a larger vocabulary": (
        {**PLAIN, "draft_vocab_size": 200}, HEAD, f"drafts 200 tokens .* the model has {V}"),
    "no map": (
        PLAIN, without(HEAD, "d2t"), f"drafts {DRAFT_VOCAB} of {V} tokens .* has no d2t"),
    "states": (
        {**PLAIN, "target_hidden_size": 64}, HEAD, f"states of 64 numbers, .* model have {E}"),
    "tapped layers": ({**PLAIN, "eagle_config": IDS}, HEAD, "fc.weight has 96 columns, .* 64"),
    "width": (*head_of(WIDE), f"the head has 64 hidden numbers .* the model's have {E}"),
    "width of Medusa": (
        {**MEDUSA, "hidden_size": 64}, medusa(64, V), f"read 64 hidden numbers, .* has {E}"),
    "layers of Medusa": (MEDUSA, medusa(64, V), "0.0.linear.weight has 64 rows, .* ask for 32"),
    "outputs of Medusa": (MEDUSA, medusa(E, 90), f"0.1.weight has 90 rows, .* ask for {V}"),
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write(tmp_path_factory.mktemp("target"), TARGET, target_tensors())


def describe(target, head, **more):
    given = {"model": str(head), "num_speculative_tokens": 1, **more}
    flat = {"model": str(target), "skip_tokenizer_init": True, "device": "cpu"}
    return describe_model(Options.from_flat({**flat, "speculative_config": given}), read_env())


@pytest.mark.parametrize("name", WRONG)
def test_a_head_of_another_model_is_refused(target, tmp_path, name):
    hf, tensors, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        describe(target, write(tmp_path, hf, tensors))


def test_a_head_for_shorter_texts_is_noted(target, tmp_path, caplog):
    head = write(tmp_path, {**PLAIN, "max_position_embeddings": 64}, HEAD)
    found = []
    for more in ({}, {"max_model_len": 64}):
        given = {"model": str(head), "num_speculative_tokens": 1, **more}
        with caplog.at_level(logging.INFO, "quire"):
            llm = LLM(
                str(target), skip_tokenizer_init=True, max_model_len=256, speculative_config=given
            )
        found.append(llm.llm_engine.config.speculation.max_len)
        assert ("trained for 64 tokens, and sequences have up to 256" in caplog.text) == (not more)
        caplog.clear()
    assert found == [None, 64]


def test_the_plan_has_the_head(target, tmp_path, capsys):
    head = write(tmp_path / "head", PLAIN, HEAD)
    assert plan([str(target), "--spec-model", str(head), "--spec-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert "drafts by eagle3, at most 3 of a row in a step" in out
    assert "of the memory its weights take 0.0" in out
    assert "it has 1 of the layers with KV" in out


def test_stages_are_refused_with_what_works_there(target, tmp_path):
    head = write(tmp_path, PLAIN, HEAD)
    given = {"model": str(head), "num_speculative_tokens": 1}
    message = (
        "one pipeline stage and one data-parallel rank, and there are 2: .* or ngram or suffix"
    )
    with pytest.raises(ConfigError, match=message):
        LLM(
            str(target), skip_tokenizer_init=True, device="cpu", pipeline_parallel_size=2,
            speculative_config=given,
        )  # fmt: skip
