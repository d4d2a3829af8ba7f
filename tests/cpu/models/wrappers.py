"""Tiny multimodal models of transformers, whose text half quire serves by itself."""

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
HALF_MROPE = MROPE | {"partial_rotary_factor": 0.5}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
GEMMA3 = {"head_dim": 24, "sliding_window": 40, "sliding_window_pattern": 3}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 199,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
}

WRAPPERS = {
    "gemma3": ("gemma3_text", GEMMA3, VISION | {"model_type": "siglip_vision_model"}),
    "gemma4": ("gemma4_text", GEMMA4, VISION | {"head_dim": 16, "num_key_value_heads": 2}),
    "gemma4_unified": ("gemma4_unified_text", GEMMA4, None),
    "glm4v": (
        "glm4v_text",
        {"head_dim": 16, "rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 32},
    ),
    "glm4v_moe": (
        "glm4v_moe_text",
        {"head_dim": 16, "rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
         "moe_intermediate_size": 40, "n_routed_experts": 4, "num_experts_per_tok": 2},
        {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 32},
    ),
    "llama4": (
        "llama4_text",
        {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 80},
        VISION | {"intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
    ),
    "llava of gemma": ("gemma", {"head_dim": 16}, VISION | {"model_type": "clip_vision_model"}),
    "idefics3": ("llama", {}, VISION),
    "internvl": ("qwen2", {}, VISION | {"image_size": [28, 28], "patch_size": [14, 14]}),
    "llava": ("llama", {}, VISION | {"model_type": "clip_vision_model"}),
    "llava_next": ("mistral", {"sliding_window": 20}, VISION | {"model_type": "clip_vision_model"}),
    "llava_onevision": ("qwen2", {}, VISION | {"model_type": "siglip_vision_model"}),
    "mistral3": ("mistral", {"head_dim": 16}, VISION | {"model_type": "pixtral"}),
    "mistral3 of ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": YARN}, VISION | {"model_type": "pixtral"}),
    "mllama": (
        "mllama_text_model",
        {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
        VISION | {"num_global_layers": 1, "attention_heads": 2, "max_num_tiles": 4,
                  "intermediate_layers_indices": [0], "vision_output_dim": 64},
    ),
    "qwen2_audio": ("qwen2", {}, None),
    "qwen2_vl": ("qwen2_vl_text", {"rope_parameters": MROPE}, QWEN_VISION | {"embed_dim": 32}),
    "qwen2_5_vl": (
        "qwen2_5_vl_text",
        {"rope_parameters": MROPE},
        QWEN_VISION | {"out_hidden_size": 64, "intermediate_size": 32},
    ),
    "qwen3_vl": (
        "qwen3_vl_text",
        {"head_dim": 16, "rope_parameters": MROPE},
        QWEN_VISION | {"out_hidden_size": 64, "intermediate_size": 32, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text",
        {"head_dim": 16, "rope_parameters": MROPE} | EXPERTS,
        QWEN_VISION | {"out_hidden_size": 64, "intermediate_size": 32, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {"head_dim": 32, "rope_parameters": HALF_MROPE} | DELTA_NET,
        QWEN_VISION | {"out_hidden_size": 64, "intermediate_size": 32},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {"head_dim": 32, "rope_parameters": HALF_MROPE, "shared_expert_intermediate_size": 40}
        | DELTA_NET | EXPERTS,
        QWEN_VISION | {"out_hidden_size": 64, "intermediate_size": 32},
    ),
    "smolvlm": ("llama", {}, VISION),
}  # fmt: skip
"""Wrapper, of what -> (type of the text half, its other fields, the tower's fields)."""


def wrapper_config(name):
    """The transformers config of a tiny wrapper."""
    from transformers import AutoConfig

    text_type, more, tower = WRAPPERS[name]
    sections = {"text_config": TEXT | more | {"model_type": text_type}}
    if tower is not None:
        sections["vision_config"] = tower
    else:
        sections["audio_config"] = {
            "encoder_layers": 1, "encoder_attention_heads": 2, "d_model": 32, "encoder_ffn_dim": 32,
            "num_mel_bins": 8,
        }  # fmt: skip
    ids = dict.fromkeys(("image_token_id", "image_token_index", "video_token_id"), 198)
    rows = {"mm_tokens_per_image": 4} if name == "gemma3" else {}
    return AutoConfig.for_model(name.split()[0], **sections, **ids, **rows)
