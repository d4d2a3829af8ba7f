"""params.json read as a config.json."""

import json

import pytest

from quire.config.facts import read_hf_config, read_model_facts
from quire.config.mistral_format import config_of_params
from quire.errors import ConfigError

NEMO = {
    "dim": 5120,
    "n_layers": 40,
    "head_dim": 128,
    "hidden_dim": 14336,
    "n_heads": 32,
    "n_kv_heads": 8,
    "rope_theta": 1000000.0,
    "norm_eps": 1e-05,
    "vocab_size": 131072,
}
YARN = {"original_max_position_embeddings": 16384, "factor": 16, "beta": 32, "alpha": 1}
GROWTH = {"original_max_position_embeddings": 16384, "beta": 0.1}


def test_a_dense_model():
    assert config_of_params(NEMO) == {
        "model_type": "mistral",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 128_000,
        "sliding_window": None,
    }


@pytest.mark.parametrize(
    ("more", "fields"),
    [
        ({"head_dim": None}, {"head_dim": 160}),
        ({"max_seq_len": 32768}, {"max_position_embeddings": 32768}),
        ({"max_position_embeddings": 4096, "max_seq_len": 8}, {"max_position_embeddings": 4096}),
        ({"tied_embeddings": True}, {"tie_word_embeddings": True}),
        ({"moe": {"num_experts": 8, "num_experts_per_tok": 2}},
         {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}),
        ({"sliding_window": 4096},
         {"sliding_window": 4096, "layer_types": ["sliding_attention"] * 40}),
        ({"n_layers": 4, "_sliding_window": [None, 64]},
         {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 2}),
        ({"yarn": YARN | {"apply_scale": False}},
         {"model_type": "mistral", "rope_parameters": {
             "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
             "beta_slow": 1.0, "original_max_position_embeddings": 16384, "attention_factor": 1.0}}),
        ({"yarn": {"original_max_position_embeddings": 16384, "factor": 2}, "llama_4_scaling": GROWTH},
         {"model_type": "ministral3", "rope_parameters": {
             "rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0,
             "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}}),
        ({"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}},
         {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static",
                                  "modules_to_not_convert": ["lm_head"]}}),
        ({"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"}},
         {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic",
                                  "modules_to_not_convert": ["lm_head"]}}),
    ],
)  # fmt: skip
def test_features_become_the_fields_of_a_config(more, fields):
    found = config_of_params(NEMO | more)
    assert {key: found[key] for key in fields} == fields


def test_towers_make_it_a_wrapper(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(NEMO | {"vision_encoder": {"hidden_size": 9}}))
    found = read_hf_config(tmp_path)
    assert (found["model_type"], found["wrapper_type"], found["hidden_size"]) == (
        "mistral",
        "mistral-format",
        5120,
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"dim": None}, "dim is None; it must be a positive integer"),
        ({"n_layers": -4}, "n_layers is -4; it must be a positive integer"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"n_heads": True}, "n_heads is True"),
        ({"model_type": "mamba"}, "model_type is 'mamba'; supported: transformer"),
        ({"q_lora_rank": 8}, "latent attention, which is read from config.json only"),
        ({"moe": {"num_shared_experts": 1}}, "shared experts, which is read from config.json"),
        ({"moe": {"num_experts": 8}}, "num_experts_per_tok is None"),
        ({"moe": [8]}, r"params\.json does not describe a valid model"),
        ({"yarn": {"factor": 2}}, "original_max_position_embeddings is None"),
        ({"yarn": 5}, r"params\.json does not describe a valid model"),
        ({"yarn": YARN, "llama_4_scaling": {"original_max_position_embeddings": 8}},
         "llama_4_scaling.original_max_position_embeddings is 8; it must be that of yarn"),
        ({"sliding_window": [None, 64, 65]}, "it must have one length"),
        ({"sliding_window": [None, 64, 64]}, "a number of entries that divides n_layers"),
        ({"quantization": {"qformat_weight": "int4"}}, "supported: qformat_weight fp8_e4m3"),
        ({"quantization": {"qscheme_act": "TENSOR"}}, "'qformat_weight' None; supported"),
        ({"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": ["BLOCK"]}}, "'qscheme_act'"),
        ({"quantization": {"qformat_weight": "fp8_e4m3", "new": 1}}, "quantization has 'new' 1"),
        ({"quantization": ["fp8_e4m3"]}, "quantization is .*; it must be an object"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path, more, words):
    (tmp_path / "params.json").write_text(json.dumps(NEMO | more))
    with pytest.raises(ConfigError, match=words):
        read_hf_config(tmp_path)


def test_config_json_wins_unless_mistral_is_demanded(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(NEMO))
    assert read_hf_config(tmp_path)["vocab_size"] == 131072
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 7}')
    assert read_hf_config(tmp_path)["vocab_size"] == 7
    assert read_hf_config(tmp_path, None, "mistral")["vocab_size"] == 131072
    assert read_hf_config(tmp_path, {"vocab_size": 9}, "mistral")["vocab_size"] == 9
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config.json in .*params\.json"):
        read_hf_config(tmp_path, None, "hf")
    (tmp_path / "params.json").unlink()
    with pytest.raises(ConfigError, match=r"no params.json in .* config_format=mistral needs"):
        read_hf_config(tmp_path, None, "mistral")


def test_a_folder_is_planned_without_weights(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(NEMO))
    facts = read_model_facts(tmp_path)
    assert (facts.max_len, facts.hidden, len(facts.layers)) == (128_000, 5120, 40)
