"""Mistral layout: the names and the order of rows of tensors in consolidated*.safetensors.

Queries and keys have the two channels of a rotated pair next to each other there; in the layout of
transformers, which models here have, they are half a head apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.mistral_format import head_size, read_params

if TYPE_CHECKING:
    from torch import Tensor

_LAYER_PARTS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
}
_TOP_PARTS = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_PARAMS = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
_LAYER = re.compile(r"(layers\.\d+)\.(.+)")
_EXPERT = re.compile(r"(?:feed_forward|block_sparse_moe)\.(experts\.\d+\.w[123])")
_EMBEDDINGS = re.compile(r"mm_\w+_embeddings\.(?:embedding_module\.)?(?=tok_embeddings\.)")


def is_mistral_file(path: Path) -> bool:
    """Whether a weight file has this layout."""
    return path.name.startswith("consolidated")


def hf_name(name: str) -> str:
    """Return the name of a tensor in the layout of transformers; others stay as they are."""
    path, _, param = _EMBEDDINGS.sub("", name).rpartition(".")
    param = _PARAMS.get(param, param)
    if path in _TOP_PARTS:
        return f"{_TOP_PARTS[path]}.{param}"
    if layer := _LAYER.fullmatch(path):
        at, part = f"model.{layer[1]}", layer[2]
        if expert := _EXPERT.fullmatch(part):
            return f"{at}.block_sparse_moe.{expert[1]}.{param}"
        if part in _LAYER_PARTS:
            return f"{at}.{_LAYER_PARTS[part]}.{param}"
    return name


def convert_tensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Rename tensors, and reorder the rows of queries and keys. Raises ConfigError."""
    size = head_size(read_params(folder))
    for name, tensor in tensors:
        ours = hf_name(name)
        turned = ours.rpartition(".")[0].endswith(("self_attn.q_proj", "self_attn.k_proj"))
        rows = tensor.shape[0] if tensor.dim() else 1
        yield ours, _half_split(tensor, size) if turned and rows % size == 0 else tensor


def _half_split(tensor: Tensor, size: int) -> Tensor:
    """[heads * size, ...]: channels (2i, 2i + 1) of each head become (i, i + size / 2)."""
    pairs = tensor.reshape(-1, size // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
