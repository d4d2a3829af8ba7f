"""Which model a config.json names: class, type, alias, and the text half of a wrapper."""

import json

import pytest

from quire.config.facts import read_hf_config
from quire.config.model_identity import hoist_text, is_tower_tensor, resolve_identity
from quire.errors import ConfigError


def identity(*classes, model_type=None, **more):
    hf = more | ({"architectures": list(classes)} if classes else {})
    return resolve_identity(hf | ({"model_type": model_type} if model_type else {}))["model_type"]


@pytest.mark.parametrize(
    ("classes", "stated", "found"),
    [
        (["LlamaForCausalLM"], "llama", "llama"),
        (["LLaMAForCausalLM"], None, "llama"),
        ([], "qwen3", "qwen3"),
        (["Qwen3MoeForCausalLM"], None, "qwen3_moe"),
        (["GPT2LMHeadModel"], "gpt2", "gpt2"),
        (["Gemma3ForCausalLM"], "gemma3_text", "gemma3_text"),
        (["InternLM3ForCausalLM"], "internlm3", "llama"),
        (["TeleChat3ForCausalLM"], "telechat3", "llama"),
        (["DeepseekV3ForCausalLM"], "kimi_k2", "deepseek_v3"),
        ([], "kimi_k2", "deepseek_v3"),
        (["LlamaForCausalLM"], "a_type_of_its_own", "llama"),
        (["Qwen2Model"], "qwen2", "qwen2"),  # not a class that generates
        (["MyForCausalLM", "MistralForCausalLM"], None, "mistral"),
        (["Exaone4ForCausalLM"], "exaone4", "exaone4"),
        (["Exaone4ForCausalLM"], "exaone4_of_mine", "exaone4"),
        (["NobodysForCausalLM"], "nobodys", "nobodys"),
        (["NobodysForCausalLM"], None, "nobodys"),
        (["Exaone4ForCausalLM"], None, "exaone4"),
    ],
)
def test_the_class_decides_before_the_type(classes, stated, found):
    assert identity(*classes, model_type=stated) == found


def test_an_alias_has_defaults_of_its_own():
    half = {"model_type": "qwen3_omni_moe_text", "rope_theta": 7.0}
    found = resolve_identity(
        {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": half}}
    )
    assert (found["model_type"], found["norm_topk_prob"], found["rope_theta"]) == (
        "qwen3_moe",
        True,
        7.0,
    )


def test_an_alias_holds_only_without_features_of_its_own():
    assert identity("InternLM3ForCausalLM", model_type="internlm3", bias=True) == "internlm3"


@pytest.mark.parametrize(
    ("model_type", "class_name", "causal"),
    [
        ("llama_bidirec", "LlamaBidirectionalModel", False),
        ("llama", "LlamaEncoderModel", False),
        ("llama", "LlamaBiForMNTP", False),
        ("mistral", "MistralBiModel", False),
        ("qwen2", "Qwen2BidirectionalForSequenceClassification", False),
        ("llama", "LlamaModel", True),
        ("llama", "LlamaForCausalLM", True),
    ],
)
def test_the_class_says_whether_a_decoder_attends_in_both_directions(
    model_type, class_name, causal
):
    found = resolve_identity({"model_type": model_type, "architectures": [class_name]})
    assert found["model_type"] == model_type.removesuffix("_bidirec")
    assert found.get("is_causal", True) == causal
    stated = {"model_type": model_type, "architectures": [class_name], "is_causal": True}
    assert resolve_identity(stated)["is_causal"]


@pytest.mark.parametrize(
    ("hf", "words"),
    [
        ({"hidden_size": 4}, "neither architectures nor model_type"),
        ({"architectures": []}, "neither architectures nor model_type"),
        ({"architectures": ["Qwen2Model"]}, "neither architectures nor model_type"),
        ({"model_type": 5}, "model_type is 5; it must be a string"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'Llama.*it must be a list"),
        ({"architectures": [5]}, r"architectures is \[5\]; it must be a list of class names"),
    ],
)
def test_a_config_that_names_no_model_is_refused_in_one_sentence(hf, words):
    with pytest.raises(ConfigError, match=words):
        resolve_identity(hf)


TEXT = {"model_type": "llama", "hidden_size": 64, "dtype": "float32", "eos_token_id": 2}


@pytest.mark.parametrize("section", ["text_config", "llm_config", "language_config"])
def test_a_nested_text_half_is_hoisted_with_the_flags_of_the_wrapper(section):
    outer = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    outer |= {"torch_dtype": "bfloat16", "tie_word_embeddings": True, "eos_token_id": [2, 5]}
    quantized = {"quant_method": "fp8"}
    hf = {**outer, section: TEXT, "vision_config": {"a": 1}, "quantization_config": quantized}
    found = resolve_identity(hf)
    assert (found["model_type"], found["wrapper_type"], found["hidden_size"]) == (
        "llama",
        "llava",
        64,
    )
    assert (found["torch_dtype"], found["dtype"]) == ("bfloat16", None)
    assert (found["tie_word_embeddings"], found["eos_token_id"]) == (True, [2, 5])
    assert found["quantization_config"] == quantized
    assert section not in found
    assert resolve_identity(found) == found


def test_flags_that_only_the_text_half_states_stay():
    found = resolve_identity(
        {"model_type": "llava", "text_config": TEXT | {"tie_word_embeddings": True}}
    )
    assert (found["tie_word_embeddings"], found["dtype"]) == (True, "float32")


def test_the_text_half_of_a_thinker_is_nested_twice():
    half = {"model_type": "qwen2_5_omni_text", "hidden_size": 64}
    thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": half}
    found = resolve_identity({"model_type": "qwen2_5_omni", "thinker_config": thinker})
    assert (found["model_type"], found["wrapper_type"]) == ("qwen2", "qwen2_5_omni")


def test_what_a_nested_config_leaves_out_is_the_default_of_its_family():
    found = resolve_identity({"model_type": "llava", "text_config": {"vocab_size": 32_064}})
    assert (found["model_type"], found["vocab_size"], found["hidden_size"]) == (
        "llama",
        32_064,
        4096,
    )
    assert "hidden_size" not in resolve_identity({"model_type": "llama", "vocab_size": 7})


def test_sections_that_are_no_text_half_change_nothing():
    hf = TEXT | {"text_config": {"auto_map": {"AutoConfig": "evil.Evil"}}}
    assert hoist_text(hf) == hf


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        ({"text_config": {"hidden_size": 8}}, "hidden_size", 8),
        ({"hidden_size": 8}, "hidden_size", 8),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters",
         {"rope_theta": 5.0, "rope_type": "linear", "factor": 2.0}),
        ({"text_config": {"rope_theta": 7.0}}, "rope_parameters", {"rope_theta": 7.0}),
        ({"architectures": ["MistralForCausalLM"]}, "model_type", "mistral"),
        ({"text_config": {"model_type": "qwen2"}}, "model_type", "qwen2"),
        ({"dtype": "float16"}, "dtype", "float16"),
    ],
)  # fmt: skip
def test_overrides_reach_the_text_half_nested_or_flat(tmp_path, overrides, field, value):
    half = TEXT | {"rope_parameters": {"rope_theta": 5.0}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": half}))
    assert read_hf_config(tmp_path, overrides)[field] == value


@pytest.mark.parametrize(
    ("name", "is_tower"),
    [
        ("vision_tower.encoder.layers.0.weight", True),
        ("model.visual.merger.mlp.0.weight", True),
        ("model.multi_modal_projector.linear_1.weight", True),
        ("thinker.audio_tower.layers.0.weight", True),
        ("mlp1.0.weight", True),
        ("image_newline", True),
        ("model.language_model.layers.0.visual.weight", False),
        ("language_model.model.layers.0.mlp.up_proj.weight", False),
        ("model.layers.0.vision.weight", False),
        ("lm_head.weight", False),
        ("extra.weight", False),
    ],
)
def test_towers_are_found_by_the_first_words_of_a_name(name, is_tower):
    assert is_tower_tensor(name) == is_tower
