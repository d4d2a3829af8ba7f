"""The table of architectures: complete, unambiguous, and printed by `quire models`."""

import json

import pytest

from quire.cli import main
from quire.config.architectures import (
    CLASSES,
    LIMITS,
    POOLING_TASKS,
    REFUSED,
    architectures,
    refusal_of,
    similar_names,
)
from quire.registry import PluginRegistry

REFUSED_TYPES = [name for names in REFUSED.values() for name in names.split()]


def test_every_type_is_in_the_table_once():
    assert len(REFUSED_TYPES) == len(set(REFUSED_TYPES))
    assert not set(REFUSED_TYPES) & set(LIMITS)
    assert set(REFUSED_TYPES) | set(LIMITS) <= set(CLASSES)
    assert [row.model_type for row in architectures()].count("llama") == 1


def test_native_files_win_and_each_has_its_architecture_here():
    served = {row.model_type: row.served for row in architectures()}
    for model_type in set(PluginRegistry("quire.models").names()) - {"transformers"}:
        assert served[model_type] == "native"
    assert served["arcee"] == "transformers"
    assert served["rwkv"] == "refused"


def test_the_reason_is_a_clause():
    assert refusal_of("rwkv") in REFUSED
    assert refusal_of("arcee") is None
    assert refusal_of("no such type") is None
    for reason in REFUSED:
        assert reason[0].islower()
        assert reason[-1] not in ".;"
        assert len(reason) < 100


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("llama_3", "llama"),
        ("Qwen3ForCasualLM", "Qwen3ForCausalLM"),
        ("gptneox", "gpt_neox"),
        ("GPT-OSS", "gpt_oss"),
        ("deepseekv3", "deepseek_v3"),
    ],
)
def test_similar_names_of_what_was_mistyped(name, near):
    assert similar_names(name)[0] == near


def test_nothing_is_similar_to_nonsense():
    assert similar_names("x" * 10_000) == []


def run(capsys, *words):
    status = main(["models", *words])
    return status, *capsys.readouterr()


def test_the_command_prints_all_or_what_has_a_name(capsys):
    status, out, _ = run(capsys)
    assert status == 0
    assert len(out.splitlines()) == len(CLASSES) + 4
    status, out, _ = run(capsys, "GPTOSS")
    assert out.split()[:4] == ["GptOssForCausalLM", "gpt_oss", "native", "generate"]
    rows = json.loads(run(capsys, "rwkv", "--json")[1])
    assert {row["name"] for row in rows} == {"RwkvForCausalLM"}
    assert rows[0]["served"] == "refused"
    assert rows[0]["note"] == refusal_of("rwkv")


def test_what_an_architecture_does(capsys):
    tasks = {row.model_type: row.tasks for row in architectures()}
    assert tasks["llama"] == ("generate", *POOLING_TASKS)
    assert tasks["gemma3"] == tasks["gemma3_text"] == tasks["arcee"] == tasks["llama"]
    assert tasks["bert"] == tasks["xlm-roberta"] == POOLING_TASKS
    assert tasks["bart"] == tasks["marian"] == ("generate",)
    assert tasks["rwkv"] == ()
    (row,) = json.loads(run(capsys, "DistilBertForSequenceClassification", "--json")[1])
    assert (row["model_type"], row["tested"]) == ("distilbert", "tests/cpu/encoders")
    assert "native        pooling" in run(capsys, "BertModel")[1]


def test_the_command_has_near_names_for_an_unknown_one(capsys):
    status, out, err = run(capsys, "Qwem3ForCausalLM")
    assert (status, out) == (1, "")
    assert "no known architecture has 'Qwem3ForCausalLM'; did you mean Qwen3ForCausalLM" in err
    assert "`quire models` lists all" in run(capsys, "zzzzzz")[2]
