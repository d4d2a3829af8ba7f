"""Names of tensors in GGUF files, and what transformers calls them. No torch.

Each architecture has its names of a layer's tensors (`blk.N.attn_q`) and of the others
(`token_embd`). A name that is in no table stays as it is, so that the loader reports it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
}
_ROUTED = {"ffn_gate_inp": "mlp.gate"}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT = re.compile(r"ffn_(gate|up|down)_exps")
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Divisors of rotary frequencies, which are part of the configuration and no weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The tensors of one architecture."""

    layer: dict[str, str]
    top: dict[str, str] = field(default_factory=lambda: _TOP)
    prefix: str = "model.layers"
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    bank: str = "mlp.experts"
    fused_bank: bool = False  # one tensor for all experts, gate and up rows in turn
    rotated_pairs: bool = False  # rows of q and k are in pairs: see tensors.py
    norm_offset: float = 0.0  # what norms in the file have more
    transposed: tuple[str, ...] = ()  # matrices that transformers has as [I, O]

    def split(self, name: str) -> tuple[str, str, str]:
        """Return (module, part, parameter) of a tensor's name: its place, and its own name."""
        path, _, param = name.rpartition(".")
        if found := _LAYER.fullmatch(path):
            return f"{self.prefix}.{found[1]}", found[2], param
        return "", path, param

    def module_of(self, at: str, part: str) -> str | None:
        """Return what transformers calls a module. None: nothing. Not of experts."""
        found = self.layer.get(part) if at else self.top.get(part)
        if at and part.startswith("nextn."):
            found = part  # of a layer after the last, which no model here has
        if found is None:
            return None
        return f"{at}.{found}" if at else found

    def projection_of(self, part: str) -> int | None:
        """Return which projection of experts a part is: 0 gate, 1 up, 2 down. None: no experts'."""
        found = _EXPERT.fullmatch(part)
        return ("gate", "up", "down").index(found[1]) if found else None


_DENSE = TensorNames(layer=_ATTENTION | _MLP)
_QWEN_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{one}_shexp": f"mlp.shared_expert.{one}_proj" for one in ("gate", "up", "down")},
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{one}_shexp": f"mlp.shared_experts.{one}_proj" for one in ("gate", "up", "down")},
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}

NAMES: dict[str, TensorNames] = {
    "llama": TensorNames(layer=_ATTENTION | _MLP, rotated_pairs=True),
    "mixtral": TensorNames(
        layer=_ATTENTION | _MLP | {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts=("w1", "w3", "w2"),
        bank="block_sparse_moe.experts",
        rotated_pairs=True,
    ),
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen2_moe": TensorNames(layer=_ATTENTION | _MLP | _ROUTED | _QWEN_SHARED),
    "qwen3_moe": TensorNames(layer=_ATTENTION | _MLP | _ROUTED),
    "gemma2": TensorNames(layer=_ATTENTION | _MLP | _GEMMA, norm_offset=1.0),
    "gemma3_text": TensorNames(layer=_ATTENTION | _MLP | _GEMMA, norm_offset=1.0),
    "phi3": TensorNames(
        layer=_ATTENTION | _MLP | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "gpt2": TensorNames(
        layer=_GPT2,
        top={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        prefix="transformer.h",
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3"), TensorNames(layer=_ATTENTION | _MLP | _ROUTED | _LATENT)
    ),
    "gpt_oss": TensorNames(
        layer=_ATTENTION
        | {
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        fused_bank=True,
    ),
}
"""Model type -> names of its tensors."""
