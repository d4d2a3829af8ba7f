"""Configs are read by name: an unsupported setting is refused with the name of its field."""

from dataclasses import replace

import pytest

from quire.config.architectures import ALIASES
from quire.config.conventions import conventions_of
from quire.config.memory.kv_layout import LayerFacts
from quire.config.model_identity import resolve_identity
from quire.errors import ConfigError
from quire.models.build import read_model_config
from tests.cpu.models.peers import tiny


def changed(variant, **changes):
    """A variant's config.json with fields replaced; None removes one."""
    hf, _ = tiny(variant)
    return {key: value for key, value in {**hf, **changes}.items() if value is not None}


SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}

REFUSED = [
    ("llama", {"hidden_size": None}, "hidden_size is missing; it must be an integer"),
    ("llama", {"hidden_size": "64"}, "hidden_size is '64'; it must be an integer"),
    ("llama", {"num_attention_heads": True}, "num_attention_heads is True"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide"),
    ("llama", {"num_attention_heads": 6, "head_dim": None}, "64; it must be a multiple of"),
    ("llama", {"hidden_act": "mish"}, "hidden_act is 'mish'; supported: silu"),
    ("llama", {"attention_bias": "yes"}, "attention_bias is 'yes'; it must be true or false"),
    ("llama", {"rope_scaling": {"type": "spiral"}}, "rope_scaling.type is 'spiral'; supported"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    ("llama", {"rope_scaling": SCALING}, "high_freq_factor is missing"),
    ("llama", {"rope_parameters": {"a": {"rope_theta": 1.0}}}, "differs by layer type"),
    ("llama", {"partial_rotary_factor": 2.0}, "partial_rotary_factor turns 32 of head_dim 16"),
    ("llama", {"quantization_config": {"quant_method": "aqlm"}}, "quantization_config.* 'aqlm'"),
    ("llama", {"model_type": "llama_3"}, "did you mean .*llama"),
    ("llama", {"model_type": "build"}, "known to neither quire nor transformers"),
    ("mistral_window", {"sliding_window": "4k"}, "sliding_window is '4k'"),
    ("mistral_window", {"sliding_window": 0}, "sliding_window is 0"),
    ("qwen2_windows", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    ("qwen3", {"use_sliding_window": True, "layer_types": ["a", "b"]}, "layer_types has a, b"),
    ("phi3_longrope_long", {"rope_scaling": {"type": "su", "long_factor": []}}, "short_factor"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
    ("opt", {"activation_function": "swiglu"}, "activation_function is 'swiglu'"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("gpt2", {"n_embd": None}, "hidden_size is missing"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma3_text", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0"),
    ("qwen3_moe", {"num_experts": None}, "num_local_experts is missing"),
    ("qwen3_moe", {"num_experts_per_tok": 13}, r"num_experts_per_tok is 13; it must be in \[1, 12"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be 1 or more"),
    ("qwen2_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers is .*must be layer numbers"),
    ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_.* is missing"),
    ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_.* is True"),
    ("bloom", {"n_head": 3}, "hidden_size is 64; it must be a multiple of num_attention_heads"),
    ("codegen", {"n_head": 2}, "n_head is 2; it must be a multiple of 4"),
    ("falcon_new", {"parallel_attn": False}, "parallel_attn is False; supported: True"),
    ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2; supported: 1"),
    ("gptj", {"rotary_dim": 80}, "rotary_dim is 80; it must be an even number of the 64"),
    ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings is True; supported: False"),
    ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("gpt_neo", {"attention_types": [[["local"], 2]]}, "gives 2 layers of local; it must give"),
    ("gpt_neo", {"attention_types": [[["near"], 3]]}, "gives 3 layers of near"),
    ("mpt", {"attn_config": {"prefix_lm": True}}, "prefix_lm is True; supported: False"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln is True; supported: False"),
    ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type is 'multiquery"),
    ("mpt", {"norm_type": "rmsnorm"}, "norm_type is 'rmsnorm'; supported"),
    ("mpt", {"logit_scale": "big"}, "logit_scale is 'big'; it must be a number"),
    ("granite", {"residual_multiplier": 0.0}, "residual_multiplier is 0.0; it must be positive"),
    ("olmo3", {"layer_types": ["linear_attention"] * 4}, "layer_types has linear_attention"),
    ("glm4_moe", {"n_group": 3}, "n_group is 3"),
    ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported: sigmoid"),
    ("minimax_m2", {"attn_type_list": [0, 1]}, "lightning attention is not supported"),
    ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size is 8"),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm is True"),
    ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers is .* it must be 1"),
    ("smollm3", {"use_sliding_window": True}, "layer_types is missing"),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_.* is 'all'"),
    ("gemma4_text", {"enable_moe_block": True}, "num_experts is missing"),
    ("gemma4_text_experts", {"top_k_experts": 13}, r"top_k_experts is 13; it must be in \[1, 12"),
    ("gemma4_text", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6; before the last"),
    ("gemma4_text", {"layer_types": ["sliding_attention"] * 7}, "layer_types must end with full"),
    ("gemma4_text", {"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input is 99; it"),
    ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 8}}}, "of one kind different head"),
    ("gemma4_text", {"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
    ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers is .* it must be 5 numbers"),
    ("falcon_h1", {"mlp_multipliers": [0.0, 1.0]}, "mlp_multipliers has 0.0 for gates"),
    ("falcon_h1", {"mamba_d_ssm": None}, "mamba_d_ssm is missing; it must be an integer or null"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "supported: rope, nope"),
    ("nemotron_h", {"hybrid_override_pattern": "M-X*-"}, "kinds of layers are 'X'; supported"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; supported: relu2"),
    ("nemotron_h", {"mamba_n_groups": 2}, "mamba_n_groups is an older name of n_groups"),
]


@pytest.mark.parametrize(("variant", "changes", "says"), REFUSED)
def test_what_cannot_be_run_is_refused_by_the_field_that_asks(variant, changes, says):
    with pytest.raises(ConfigError, match=says):
        read_model_config(changed(variant, **changes))


def test_null_means_absent():
    assert read_model_config({**tiny("llama")[0], "head_dim": None})[1].head_dim == 16


@pytest.mark.parametrize(
    ("variant", "changes", "max_len"),
    [
        ("llama", {}, 1024),
        ("llama_linear", {}, 4096),
        ("llama_dynamic", {}, 2048),
        ("llama_llama3", {}, 1024),
        ("llama_yarn", {}, 1024),
        ("qwen2_yarn", {}, 1024),
        ("phi3_longrope_long", {}, 1024),
        ("gemma3_text", {}, 1024),  # its factor is already in max_position_embeddings
        ("gpt2", {"n_positions": 77}, 77),
    ],
)
def test_the_longest_sequence_counts_the_stretch_of_rotary_scaling(variant, changes, max_len):
    assert read_model_config(changed(variant, **changes))[1].max_len == max_len


def test_older_names_of_things_are_read():
    _, config = read_model_config(changed("phi3_longrope_short", torch_dtype="float16"))
    assert config.dtype == "float16"
    for name in ("su", "yarn"):
        scaling = {**tiny("phi3_longrope_short")[0]["rope_scaling"], "type": name}
        assert (
            read_model_config(changed("phi3_longrope_short", rope_scaling=scaling))[1].rope
            == config.rope
        )
    _, published = read_model_config(changed("minimax_m2", partial_rotary_factor=None))
    assert published == read_model_config(changed("minimax_m2", rotary_dim=None))[1]


def test_layers_state_what_they_cache():
    _, config = read_model_config(tiny("gemma3_text")[0])
    windows = [layer.window for layer in config.attention_layers()]
    assert windows == [40] * 5 + [None, 40]
    assert config.attention_layers()[0] == LayerFacts(kv_heads=2, head_dim=24, window=40)


def test_a_window_as_long_as_everything_served_is_none():
    _, config = read_model_config(tiny("mistral_window")[0])
    short = replace(config, max_len=40)
    assert {layer.window for layer in config.attention_layers()} == {40}
    assert {layer.window for layer in short.attention_layers()} == {None}


def test_a_published_gemma3_config_may_leave_out_what_is_default():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    hf = {"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"}
    _, config = read_model_config(resolve_identity(hf))
    assert (config.heads, config.kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.max_len, config.vocab, config.tied) == (131_072, 262_208, True)
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)
    assert config.windows[:6] == (1024,) * 5 + (None,)
    assert config.dtype == "bfloat16"


SEMANTIC = (
    *("rms_norm_eps", "norm_topk_prob", "partial_rotary_factor", "rope_theta"),
    "attention_bias",
)


def semantic_defaults(config):
    found = config.to_dict()
    return {key: (found | (found.get("rope_parameters") or {})).get(key) for key in SEMANTIC}


@pytest.mark.parametrize("name", ALIASES)
def test_defaults_of_an_alias_are_those_of_transformers(name):
    import transformers

    nested = {
        "qwen2_5_omni_text": "Qwen2_5OmniTextConfig",
        "qwen3_omni_moe_text": "Qwen3OmniMoeTextConfig",
    }
    try:
        theirs = transformers.AutoConfig.for_model(name)
    except ValueError:
        if name not in nested:
            pytest.skip("transformers has no such model")
        theirs = getattr(transformers, nested[name])()
    alias, want = ALIASES[name], semantic_defaults(theirs)
    usual = semantic_defaults(transformers.AutoConfig.for_model(alias.target))
    want["partial_rotary_factor"] = want["partial_rotary_factor"] or 1.0
    usual["partial_rotary_factor"] = usual["partial_rotary_factor"] or 1.0
    stated = dict(alias.defaults)
    if want["attention_bias"] is None:  # fixed by the class; their models are compared elsewhere
        want["attention_bias"] = usual["attention_bias"]
        stated.pop("attention_bias", None)
    stated.pop("mrope_interleaved", None)  # not a field there: it is their class that does it
    assert stated == {key: want[key] for key in SEMANTIC if want[key] != usual[key]}


@pytest.mark.parametrize("name", ["llama", "mistral", "ministral3", "qwen2", "gemma3_text"])
def test_defaults_of_nested_configs_are_those_of_transformers(name):
    from transformers import AutoConfig

    theirs, stated = AutoConfig.for_model(name), conventions_of({"model_type": name})
    for key, value in {**stated.nested_defaults, **stated.defaults}.items():
        want = getattr(theirs, key, None)
        if key == "rope_parameters":
            value = {**want, **value}  # it has the maximal length and the older name of the type
        if key != "rope_local_base_freq":  # older than transformers 5
            assert value == want, key
