"""Model facts from config.json."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from quire.config.facts import (
    count_weights_in_headers,
    model_facts,
    read_hf_config,
    read_model_facts,
)
from quire.config.memory.weight_facts import WeightFacts
from quire.errors import ConfigError
from quire.registry import PluginRegistry
from quire.weights.headers import TensorHeader

BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def facts(**more):
    return model_facts(BASE | more)


def windows(**more):
    return [layer.window for layer in facts(**more).layers]


def test_the_names_of_several_families_are_read():
    m = model_facts(
        {
            "model_type": "gpt2",
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 9,
            "n_positions": 32,
        }
    )
    assert (m.hidden, m.mlp, m.heads, len(m.layers), m.max_len) == (64, 256, 4, 2, 32)
    assert m.layers[0].kv_heads == 4


def test_widths_of_each_layer_count_as_the_widest():
    assert facts(intermediate_size=[96, 128, 128, 96]).mlp == 128


def test_windows_follow_each_family():
    assert windows() == [None] * 4
    assert windows(sliding_window=8, model_type="mistral") == [8] * 4
    assert windows(sliding_window=8, model_type="qwen2") == [None] * 4
    assert windows(sliding_window=8, model_type="qwen2", use_sliding_window=True, max_window_layers=2) == [
        None, None, 8, 8,
    ]  # fmt: skip
    assert windows(sliding_window=8, model_type="gemma2") == [8, None, 8, None]
    assert windows(sliding_window=8, model_type="gemma3_text", sliding_window_pattern=2) == [
        8, None, 8, None,
    ]  # fmt: skip
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows(sliding_window=8, layer_types=kinds) == [None, 8, None, 8]


def test_a_family_states_its_conventions_in_its_own_file(tmp_path, monkeypatch):
    (tmp_path / "a_family.py").write_text(
        "import something_that_is_not_installed\n"
        'CONVENTIONS = {"windows": "periodic", "window": 8, "period": 4, "mlp_kind": "plain",\n'
        '    "positions_kind": "learned", "tied": True}\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("a_family", "a_family", "quire.models")
    monkeypatch.setattr(PluginRegistry, "_entry_points", {"a_family": entry})
    assert windows(model_type="a_family") == [8, 8, 8, None]
    assert facts(model_type="a_family").rotary == 0
    assert facts().rotary > 0
    mlp, tables = 4 * 64 * 128, (512 + 2) * 64
    more = facts().weights.matrices - facts(model_type="a_family").weights.matrices
    assert more == mlp + 100 * 64 - tables  # a third matrix and a head, but no positions


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        ({"type": "dynamic", "factor": 2.0}, 1024),
        ({"rope_type": "llama3", "factor": 8.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    ],
)
def test_rope_scaling_stretches_the_context(rope, length):
    assert facts(rope_scaling=rope).max_len == length


def test_the_tokenizer_may_shorten_the_context():
    assert model_facts(BASE, tokenizer_length=128).max_len == 128
    assert model_facts(BASE, tokenizer_length=10**30).max_len == 512


def test_a_length_that_the_user_sets_is_not_shortened_by_the_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    assert read_model_facts(tmp_path).max_len == 128
    overrides = {"max_position_embeddings": 2048}
    assert read_model_facts(tmp_path, overrides=overrides).max_len == 2048


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="no num_attention_heads"):
        model_facts({k: v for k, v in BASE.items() if k != "num_attention_heads"})


def test_a_folder_is_read_with_overrides(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(BASE | {"eos_token_id": 1, "torch_dtype": "bfloat16"})
    )
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [2, 3]}')
    m = read_model_facts(tmp_path, overrides={"max_position_embeddings": 64})
    assert (m.max_len, m.dtype, set(m.eos_ids)) == (64, "bfloat16", {1, 2, 3})
    assert m.generation["temperature"] == 0.6
    m = read_model_facts(
        tmp_path, generation_config="vllm", override_generation_config={"top_k": 4}
    )
    assert m.generation == {"top_k": 4}
    assert set(m.eos_ids) == {1, 2, 3}
    m = read_model_facts(tmp_path, overrides=lambda hf: hf | {"vocab_size": 7})
    assert m.vocab == 7


@pytest.mark.parametrize("as_function", [False, True])
def test_rotary_overrides_of_the_older_style_reach_newer_checkpoints(tmp_path, as_function):
    stored = {"rope_theta": 5e5, "rope_type": "default"}
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"rope_parameters": stored}))

    def read(**given):
        return read_hf_config(tmp_path, (lambda hf: hf | given) if as_function else given)

    yarn = {"type": "yarn", "factor": 4.0}
    found = read(rope_scaling=yarn)
    assert found["rope_parameters"] == {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}
    assert "rope_scaling" not in found
    assert read(rope_theta=7.0)["rope_parameters"]["rope_theta"] == 7.0
    assert read(hidden_size=32)["rope_parameters"] == stored
    if as_function:
        assert read(rope_parameters={"rope_theta": 1.0})["rope_parameters"] == {"rope_theta": 1.0}
    nested = {"rope_parameters": {"full_attention": stored}}
    (tmp_path / "config.json").write_text(json.dumps(BASE | nested))
    with pytest.raises(ConfigError, match="per layer type"):
        read(rope_theta=7.0)


def test_a_folder_without_config_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ConfigError, match=r"no config.json .*x\.txt"):
        read_model_facts(tmp_path)


def test_headers_count_the_weights():
    def header(*shape):
        return TensorHeader("BF16", shape, Path())

    headers = {"a": header(4, 5), "b": header(6), "lm_head.weight": header(2, 2)}
    assert count_weights_in_headers(headers, {}).matrices == 24
    assert count_weights_in_headers(headers, {"tie_word_embeddings": True}).matrices == 20
    assert count_weights_in_headers(headers, {}).vectors == 6
    headers = {"model.layers.1.q_norm.weight": header(2, 3), "model.layers.2.a": header(4, 5)}
    spare = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    assert count_weights_in_headers(headers, spare) == WeightFacts(0, 6)


def test_what_makes_speech_is_no_part_of_an_encoder():
    headers = {
        f"{part}.weight": TensorHeader("BF16", (2, size), Path())
        for size, part in enumerate(("thinker.visual.a", "thinker.audio_tower.a"), 1)
    }
    headers |= {
        f"{part}.weight": TensorHeader("BF16", (9, 9), Path())
        for part in ("talker.model.a", "token2wav.a", "code2wav.a")
    }
    hf = {"model_type": "qwen3_moe", "wrapper_type": "qwen3_omni_moe"}
    assert count_weights_in_headers(headers, hf) == WeightFacts(0, 0, media=6)
