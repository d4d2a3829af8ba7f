"""SigLIP 2 with images of any shape, its text half: SigLIP's.

Source: model_type "siglip2", https://huggingface.co/google/siglip2-base-patch16-naflex;
        transformers modeling_siglip2.py
"""

from __future__ import annotations

from quire.models import siglip_text_model

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "bidirectional": True,
    "embedding_state": "last",
    "embedding_field": "projection_size",
    "pads_prompts": True,
    "nested_defaults": {
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 64,
        "pad_token_id": 1,
    },
}
Config = siglip_text_model.Config
Model = siglip_text_model.Model
