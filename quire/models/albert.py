"""ALBERT: layers share weights, in one or several groups; the embeddings are smaller and projected.

Source: model_type "albert", https://huggingface.co/albert/albert-base-v2; transformers
modeling_albert.py
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quire.layers import Linear
from quire.models._encoder import Encoder, EncoderConfig, EncoderLayer, encoder_sizes
from quire.models.base import Hf, ModelConfig, Weights, field_of
from quire.models.bert import EMBEDDINGS, FUSED

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "tied": True,
    "bidirectional": True,
    "defaults": {"num_hidden_groups": 1, "type_vocab_size": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(EncoderConfig):
    """layers: those that run; each repetition of a group has `group_size`."""

    groups: int
    group_size: int

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = encoder_sizes(hf, word_size="embedding_size", default_act="gelu_new")
        size = field_of(hf, "inner_group_num", int, default=1)
        return cls(
            **{**sizes, "layers": sizes["layers"] * size},
            types=(field_of(hf, "type_vocab_size", int),),
            groups=field_of(hf, "num_hidden_groups", int),
            group_size=size,
        )


class Model(Encoder):
    weights = Weights(
        strip=("albert.",),
        paths={
            **EMBEDDINGS,
            "encoder.embedding_hidden_mapping_in": "project_in",
            "encoder.albert_layer_groups": "groups",
            "albert_layers": "",
            "attention.dense": "self_attn.out_proj",
            "attention.LayerNorm": "self_attn_layer_norm",
            "attention": "self_attn",
            "full_layer_layer_norm": "final_layer_norm",
            "ffn": "fc1",
            "ffn_output": "fc2",
            "pooler": "head.dense",
            "classifier": "head.out_proj",
            "predictions.dense": "lm_transform.dense",
            "predictions.LayerNorm": "lm_transform.norm",
            "predictions.decoder": "lm_head",
        },
        alias={"predictions.bias": "lm_bias.bias"},
        fuse=FUSED,
        ignore=(
            "*embeddings.position_ids",
            "*embeddings.token_type_ids",
            "sop_classifier.*",
            "predictions.decoder.bias",
        ),
        tie={"lm_head": "embed_tokens"},
    )

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        if self.project_in is None:  # there is one whatever the sizes are
            self.project_in = Linear(c.word_size, c.hidden, bias=True)

    def build_layers(self, c: ModelConfig) -> nn.ModuleList:
        """All layers, in order: the same ones over and over."""
        assert isinstance(c, Config)
        groups = [[EncoderLayer(c, i) for i in range(c.group_size)] for _ in range(c.groups)]
        self.groups = nn.ModuleList(nn.ModuleList(group) for group in groups)
        times = c.layers // c.group_size
        chosen = [groups[i * c.groups // times] for i in range(times)]
        return nn.ModuleList(layer for group in chosen for layer in group)
