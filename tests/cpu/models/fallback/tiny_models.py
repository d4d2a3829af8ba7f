"""Tiny random models of the architectures of transformers that have no file in quire/models.

A config is the default of its class with sizes replaced (SIZES); HAND holds what that leaves wrong.
"""

import copy

import torch

LAYERS, HIDDEN, HEADS, VOCAB, WINDOW = 4, 64, 4, 300, 7
SIZES = [
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers"),
    (
        HIDDEN,
        "hidden_size d_model n_embd embedding_size word_embed_proj_dim attention_hidden_size emb_dim",
    ),
    (96, "intermediate_size ffn_dim dff dim_ff ffn_hidden_size decoder_ffn_dim n_inner mlp_dim"),
    (96, "intermediate_size_mlp encoder_ffn_dim shared_intermediate_size lru_width"),
    (32, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
    (32, "shared_experts_intermediate_size hidden_size_per_layer_input kv_lora_rank q_lora_rank"),
    (HEADS, "num_attention_heads n_head n_heads num_heads decoder_attention_heads"),
    (
        HEADS,
        "encoder_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k",
    ),
    (2, "top_k_experts num_local_experts_per_tok n_group topk_group encoder_layers"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts num_kv_shared_layers"),
    (1, "num_dense_layers first_k_dense_replace"),
    (
        16,
        "head_dim v_head_dim kv_channels index_head_dim dim_head global_head_dim laurel_rank d_kv",
    ),
    (16, "linear_head_dim linear_key_head_dim linear_value_head_dim"),
    (8, "qk_nope_head_dim qk_rope_head_dim attention_chunk_size rotary_dim"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length"),
    (VOCAB, "vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    (WINDOW, "sliding_window window_size sliding_window_size keep_window_size"),
]
NEW_SIZE = {name: size for size, names in SIZES for name in names.split()}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DROPPED = {"transformers_version", "model_type", "architectures", "_name_or_path", "dtype"}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0} | {
    "original_max_position_embeddings": 64
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}
WINDOWS = ["sliding_attention", "full_attention"] * 2
WIDE_FULL = {"per_layer_config": {str(i): {"head_dim": 32} for i in (1, 3)}, "layer_types": WINDOWS}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
HAND = {
    "bailing_hybrid": {"num_expert_group": 1, "topk_group": 1, "num_experts": 4},
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.3},
    "cohere2": {"layer_types": WINDOWS, "logit_scale": 0.3},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default"}
            | {"rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}}
    | {"ffn_config": {"ffn_hidden_size": 32, "hidden_size": HIDDEN}},
    "deepseek_v2": {"num_experts_per_tok": 2, "rope_parameters": YARN},
    "deepseek_v3": {"rope_parameters": YARN},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
    | {"layer_types": WINDOWS, "first_k_dense_replace": 1},
    "dots3_note_text": {"per_layer_config": {}},
    "exaone4": {"layer_types": WINDOWS},
    "exaone_moe": {"layer_types": WINDOWS},
    "falcon_h1": {"mamba_d_ssm": 128} | MAMBA2,
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": WINDOWS},
    "gemma4_text": WIDE_FULL | {"num_kv_shared_layers": 2, "final_logit_softcapping": 5.0},
    "gemma4_unified_text": WIDE_FULL | {"attention_k_eq_v": True},
    "glm": {"head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]}
    | {"attention_layers": ["global", "local"] * 2},
    "granite": MULTIPLIERS,
    "granite_swa": MULTIPLIERS | {"layer_types": WINDOWS},
    "granitemoe": MULTIPLIERS,
    "granitemoe_swa": MULTIPLIERS | {"layer_types": WINDOWS},
    "granitemoehybrid": MULTIPLIERS | MAMBA2 | {"layer_types": ["full_attention"] * 4},
    "granitemoeshared": MULTIPLIERS,
    "hrm_text": {"num_layers_per_stack": None, "num_hidden_layers": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"num_expert_group": 1, "topk_group": 1, "num_experts": 4}
    | {"num_experts_per_token": 2},
    "laguna": {"layer_types": WINDOWS, "num_attention_heads_per_layer": [4, 8, 4, 8]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 2, "qk_head_dim": 16, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mellum": {"layer_types": WINDOWS},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "ministral": {"head_dim": 16, "layer_types": WINDOWS},
    "ministral3": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    "mistral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "olmo": {"clip_qkv": 1.0},
    "olmo3": {"layer_types": WINDOWS},
    "phi": {"qk_layernorm": False},
    "phimoe": {"lm_head_bias": True},
    "seed_oss": {"head_dim": 16},
    "stablelm": {"qk_layernorm": True, "use_parallel_residual": True},
    "zamba": {"attention_head_dim": 32, "attention_hidden_size": 128}
    | {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"attention_head_dim": 32, "attention_hidden_size": 128, "mamba_headdim": 16}
    | {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""model_type -> arguments that differ from the shrunk default."""


def shrink(default, layers):
    """The fields of a default config with small sizes. layers: how many it has by default."""
    small = {}
    for name, value in default.items():
        if name in DROPPED or name.startswith("_"):
            continue
        if isinstance(value, dict) and name.endswith("_config"):
            value = shrink(value, value.get("num_hidden_layers"))
        elif isinstance(value, list) and layers and len(value) == layers:
            kinds = list(dict.fromkeys(map(str, value)))
            values = {str(one): one for one in value}
            value = [values[kinds[i % len(kinds)]] for i in range(LAYERS)]
            if name == "intermediate_size":
                value = [96] * LAYERS
        elif name in NEW_SIZE and value is not None and not isinstance(value, bool):
            value = NEW_SIZE[name]
        elif name in TOKENS and value is not None:
            value = TOKENS[name]
        small[name] = value
    if small.get("kv_lora_rank"):
        small |= {"num_key_value_heads": HEADS, "head_dim": small["qk_rope_head_dim"]}
    return small


def tiny_config(model_type, **more):
    from transformers import CONFIG_MAPPING

    base = CONFIG_MAPPING[model_type]
    default = base().to_dict()
    small = shrink(default, default.get("num_hidden_layers"))
    small |= copy.deepcopy(HAND.get(model_type, {})) | more
    return base(**small)


def tiny_model(model_type, seed=1, **more):
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type, **more)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    spread(model)
    return model.eval()


@torch.no_grad()
def spread(model):
    """Weights as large as a trained model's: by default all logits are nearly alike."""
    for _, value in model.named_parameters():
        noise = torch.randn_like(value)
        if value.ndim > 1:
            value.copy_(0.15 * noise)
        else:
            value += 0.1 * noise
