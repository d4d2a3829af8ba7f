"""ChatGLM 2 and 3, GLM-4 (9B) in the form of the hub: GLM with names of its own.

In a checkpoint with a tower (GLM-4V-9B) the patches of an image share one position.

Source: model_type "chatglm", https://huggingface.co/THUDM/glm-4v-9b, whose Python code is in the
checkpoint
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.models import llama
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {
    "names": {
        "padded_vocab_size": "vocab_size",
        "num_layers": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "kv_channels": "head_dim",
        "multi_query_group_num": "num_key_value_heads",
        "layernorm_epsilon": "rms_norm_eps",
        "seq_length": "max_position_embeddings",
    },
    "defaults": {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        for name, only in {
            "multi_query_attention": True,
            "rmsnorm": True,
            "post_layer_norm": True,
            "original_rope": True,
            "apply_residual_connection_post_layernorm": False,
            "add_bias_linear": False,
        }.items():
            field_of(hf, name, bool, default=only, one_of={only})
        theta = 10000.0 * field_of(hf, "rope_ratio", float, default=1.0)
        sizes = rotary_sizes_of({**hf, "rope_theta": theta})
        if hf.get("wrapper_type"):  # positions of images do not grow by one
            rope = sizes["rope"]
            sizes["rope"] = replace(rope, axes=(0,) * (rope.dims // 2))
        bias = field_of(hf, "add_qkv_bias", bool, default=False)
        return cls(**sizes, interleaved=True, qkv_bias=bias)


class Model(llama.Model):
    weights = Weights(
        strip=("transformer.",),
        paths={
            "embedding.word_embeddings": "embed_tokens",
            "encoder.layers": "layers",
            "encoder.final_layernorm": "norm",
            "output_layer": "lm_head",
            "self_attention.query_key_value": "self_attn.qkv_proj",
            "self_attention.dense": "self_attn.o_proj",
            "mlp.dense_h_to_4h": "mlp.gate_up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        },
        ignore=("*rotary_pos_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )
