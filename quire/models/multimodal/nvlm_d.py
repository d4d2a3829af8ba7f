"""NVLM-D: InternViT-6B with heads of zeros in its checkpoint, and an MLP without biases.

Source: model_type "NVLM_D", https://huggingface.co/nvidia/NVLM-D-72B; arXiv 2409.11402
"""

from __future__ import annotations

from typing import cast

from quire.layers import Linear, QKVLinear, RMSNorm
from quire.models.multimodal import internvl_chat
from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._intern_vit import NormedProjector
from quire.models.multimodal._vit import VitAttention, VitLayer
from quire.weights.mapping import WeightShard

HEADS_STORED = 8
"""A checkpoint has a multiple of this number of heads; those after the tower's own are zero."""


class Encoder(internvl_chat.Encoder):
    def __init__(self, hf: Hf) -> None:
        super().__init__(hf)
        hidden = field_of(hf["text_config"], "intermediate_size", int)
        inputs = self.tower.config.hidden * self.factor**2
        self.projector = NormedProjector(inputs, hidden, self.width, "gelu", bias=False)
        c = self.tower.config
        stored = -(-c.heads // HEADS_STORED) * HEADS_STORED * (c.hidden // c.heads)
        for layer in self.tower.layers:
            _read_stored_heads(cast(VitLayer, layer).self_attn, stored)


def _read_stored_heads(attention: VitAttention, stored: int) -> None:
    """Have the layers of an attention take their part of tensors with further heads.

    stored: channels of all heads in the checkpoint.
    """
    old = attention.qkv_proj
    attention.qkv_proj = _StoredQKV(stored, old)
    attention.out_proj = _StoredOutputs(stored, attention.out_proj)
    for name in ("q_norm", "k_norm"):
        if (norm := getattr(attention, name)) is not None:
            setattr(attention, name, _StoredNorm(stored, norm))


class _StoredQKV(QKVLinear):
    def __init__(self, stored: int, like: QKVLinear) -> None:
        self.stored, heads = stored, like.outputs[0].units
        super().__init__(like.inputs, heads, heads, like.head_dim, like.bias is not None)

    def weight_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        cols = self.rank_columns()
        return tuple(
            WeightShard((self.stored, self.inputs), (rows, cols), at)
            for _, rows, at in self._parts()
        )

    def vector_layout(self, param: str) -> tuple[WeightShard, ...]:
        return tuple(WeightShard((self.stored,), (rows,), at) for _, rows, at in self._parts())


class _StoredOutputs(Linear):
    def __init__(self, stored: int, like: Linear) -> None:
        self.stored = stored
        super().__init__(like.inputs, like.outputs, like.bias is not None)

    def weight_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        rows = range(self.outputs[0].rows)
        return (WeightShard((len(rows), self.stored), (rows, self.rank_columns())),)


class _StoredNorm(RMSNorm):
    def __init__(self, stored: int, like: RMSNorm) -> None:
        self.stored = stored
        super().__init__(like.size, like.eps)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return (WeightShard((self.stored,), (range(self.size),)),)
