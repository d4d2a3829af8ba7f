"""What GGUF files call architectures and tensors. Imports no torch.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from typing import NamedTuple

from quire.errors import ConfigError

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
"""model_type -> general.architecture."""

MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
"""Module of a decoder layer -> its name in a block."""

GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

OTHERS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")
_BLOCK = re.compile(r"layers\.(\d+)\.(.+)")


class GgufName(NamedTuple):
    """The place of a tensor in a GGUF file."""

    matrix: str  # "attn_q", "output", "ffn_gate_exps"
    block: int | None
    param: str  # "weight" or "bias"
    expert: int | None = None  # of a tensor that holds all experts

    @property
    def tensor(self) -> str:
        """The tensor's name."""
        at = "" if self.block is None else f"blk.{self.block}."
        return f"{at}{self.matrix}.{self.param}"


def architecture_of(model_type: str) -> str:
    """Return general.architecture. Raises ConfigError for a model that is not written."""
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"GGUF files of {model_type} models are not written; supported: {known}. "
            "compressed-tensors (--to int4, int8, fp8) is written of every native model"
        )
    return ARCHITECTURES[model_type]


def gguf_name(architecture: str, path: str, param: str) -> GgufName:
    """Return the place of a parameter. path: of its module in a checkpoint, without prefixes.

    Raises ConfigError for a module that the architecture does not have.
    """
    if path in OTHERS:
        return GgufName(OTHERS[path], None, param)
    found = _BLOCK.fullmatch(path)
    if found is not None:
        block, module = int(found[1]), found[2]
        if expert := _EXPERT.fullmatch(module):
            return GgufName(f"ffn_{expert[2]}_exps", block, param, int(expert[1]))
        names = MODULES | GEMMA_NORMS if architecture.startswith("gemma") else MODULES
        if module in names:
            return GgufName(names[module], block, param)
    raise ConfigError(f"{path}.{param} has no name in GGUF files of architecture {architecture}")
