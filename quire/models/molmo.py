"""Molmo, its text half: Qwen2, OLMo-2 or OLMoE with names of its own, beside CLIP-L.

Rows for the tokens of images are a table of their own in checkpoints, behind the embeddings of the
vocabulary, which are padded, as the head is. Of the two halves of the gated MLP the second one is
the gate. MolmoE has experts in place of the MLP in every layer, whose weights do not sum to one;
its config.json has the names of OLMo, and its tensors are in modules for attention and experts.

Source: model_type "molmo", https://huggingface.co/allenai/Molmo-7B-D-0924, Molmo-7B-O-0924 and
        MolmoE-1B-0924; arXiv 2409.17146
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from quire.distributed.mesh import vocab_range
from quire.errors import ConfigError
from quire.layers import (
    ACTIVATION_KINDS,
    AllHeadsRMSNorm,
    Embedding,
    ExpertActivation,
    Experts,
    LMHead,
    Router,
    RoutingMethod,
)
from quire.models import llama, olmo2
from quire.models._decoder import GatedMLP
from quire.models._experts import ExpertSizes, expert_counts
from quire.models._rope import rotary_sizes_of
from quire.models._rotary_encoder import UpGateLinear
from quire.models.base import Hf, Weights, field_of
from quire.weights.mapping import WeightShard

MORE_ROWS = 128
"""Rows of the embedding for tokens of images."""
IMAGE_PATCH = 2
"""Number of the row of <im_patch> among them."""
CONVENTIONS = {
    "names": {
        "layer_norm_eps": "rms_norm_eps",
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "mlp_hidden_size": "intermediate_size",
        "mlp_ratio": "expansion_ratio",
        "moe_num_experts": "num_experts",
        "moe_top_k": "num_experts_per_tok",
    },
    "defaults": {"rms_norm_eps": 1e-5},
    "mlp_joined": True,
    "embedding_keys": (),  # embedding_size is a number of rows
}
NOT_SERVED = (
    *("weight_tying", "tie_word_embeddings", "include_bias", "alibi", "scale_logits"),
    *("normalize_input_embeds", "moe_interleave", "moe_shared_expert"),
)
"""Fields that must be false."""


def mlp_width(hf: Hf) -> int:
    """Return the width of the MLP, and of what projects images: fields are of two matrices."""
    both = field_of(hf, "intermediate_size", int, default=None)
    if both is None:
        both = field_of(hf, "expansion_ratio", int) * field_of(hf, "hidden_size", int)
    return both // 2


def vocabulary_rows(hf: Hf) -> int:
    """Return the rows of the embedding without those for images. Raises ConfigError."""
    vocab = field_of(hf, "vocab_size", int)
    rows = field_of(hf, "embedding_size", int, default=None) or vocab
    if rows < vocab:
        raise ConfigError(
            f"config.json: embedding_size is {rows}; it must be vocab_size, {vocab}, or more"
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    rows: int  # of the embedding, without those for images, and of the head
    norms_after: bool = False  # of attention and MLP, not before them
    qk_norms: bool = False  # of all heads at once
    moe: ExpertSizes | None = None  # None: layers have an MLP

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "layer_norm_type", str, default="rms", one_of={"rms"})
        field_of(hf, "clip_qkv", float, default=None, one_of={None})
        field_of(hf, "rope", bool, default=True, one_of={True})
        for name in NOT_SERVED:
            field_of(hf, name, bool, default=False, one_of={False})
        pairs = field_of(hf, "rope_impl", str, default="llama", one_of=("llama", "cockatoo"))
        mlp = mlp_width(hf)
        has_experts = field_of(hf, "num_experts", int, default=0) > 0
        after = {False} if has_experts else None
        return cls(
            **rotary_sizes_of({**hf, "intermediate_size": mlp}),
            rows=vocabulary_rows(hf),
            qkv_bias=field_of(hf, "qkv_bias", bool, default=False),
            interleaved=pairs == "cockatoo",
            norms_after=field_of(hf, "norm_after", bool, default=False, one_of=after),
            qk_norms=field_of(hf, "attention_layer_norm", bool, default=False),
            moe=ExpertSizes(*expert_counts(hf), mlp, renormalise=False) if has_experts else None,
        )


class SelfAttention(llama.SelfAttention):
    def __init__(self, c: Config, window: int | None) -> None:
        super().__init__(c, window)
        if c.qk_norms:
            self.q_norm = AllHeadsRMSNorm(c.heads, c.head_dim, c.norm_eps, c.kv_heads)
            self.k_norm = AllHeadsRMSNorm(c.kv_heads, c.head_dim, c.norm_eps)


class LayerMLP(GatedMLP):
    def __init__(self, c: Config) -> None:
        super().__init__(c.hidden, c.mlp, c.act)
        self.gate_up_proj = UpGateLinear(c.hidden, (c.mlp, c.mlp))


class SparseMLP(nn.Module):
    def __init__(self, c: Config, moe: ExpertSizes) -> None:
        super().__init__()
        routing = RoutingMethod(moe.top_k, renormalise=moe.renormalise)
        self.gate = Router(c.hidden, moe.experts, routing)
        act = ExpertActivation(ACTIVATION_KINDS[c.act])
        self.experts = Experts(c.hidden, moe.mlp, moe.experts, act)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x))


class Layer(llama.Layer):
    attention_class = SelfAttention

    def __init__(self, c: Config, layer: int) -> None:
        super().__init__(c, layer)
        self.mlp = LayerMLP(c) if c.moe is None else SparseMLP(c, c.moe)


class LayerWithNormsAfter(olmo2.Layer):
    attention_class = staticmethod(lambda c, layer: SelfAttention(c, c.window(layer)))

    def __init__(self, c: Config, layer: int) -> None:
        super().__init__(c, layer)  # type: ignore[arg-type]
        self.mlp = LayerMLP(c)


class JoinedEmbedding(Embedding):
    """Two tables of a checkpoint, one behind the other."""

    def __init__(self, rows: int, more: int, size: int) -> None:
        self.rows = rows
        super().__init__(rows + more, size)

    def weight_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        mine, width = vocab_range(self.vocab, self.mesh), range(self.size)
        shards, start = [], 0
        for table in (range(self.rows), range(self.rows, self.vocab)):
            low = min(max(mine.start, table.start), table.stop)
            kept = range(low, max(min(mine.stop, table.stop), low))
            own = range(kept.start - table.start, kept.stop - table.start)
            shards.append(WeightShard((len(table), self.size), (own, width), start))
            start += len(own)
        return tuple(shards)


class PaddedHead(LMHead):
    """A head whose last rows are of no token."""

    def __init__(self, vocab: int, rows: int, hidden: int) -> None:
        self.rows = rows
        super().__init__(vocab, hidden)

    def weight_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        (one,) = super().weight_layout(matrix)
        return (replace(one, shape=(self.rows, self.inputs)),)


AT = "model.transformer"
LAYER_PATHS = {
    "att_proj": "self_attn.qkv_proj",
    "attn_out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "ff_proj": "mlp.gate_up_proj",
    "ff_out": "mlp.down_proj",
}
NORM_PATHS: dict[bool, Mapping[str, str]] = {
    False: {"attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm"},
    True: {"attn_norm": "post_attention_layernorm", "ff_norm": "post_feedforward_layernorm"},
}
"""By Config.norms_after: theirs -> ours."""
SPARSE_PATHS = {
    "attn.att_proj": "self_attn.qkv_proj",
    "attn.attn_out": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.attn_norm": "input_layernorm",
    "mlp.ff_norm": "post_attention_layernorm",
}
"""Those of layers with experts."""


class Model(llama.Model):
    weights = Weights(
        strip=(f"{AT}.",),
        rename={"blocks": "layers", "ln_f": "norm"},
        alias={
            f"{AT}.wte.embedding": "embedding.weight",
            f"{AT}.wte.new_embedding": "new_embedding.weight",
            f"{AT}.ff_out.weight": "lm_head.weight",
        },
        fuse={
            "embed_tokens": ("embedding", "new_embedding"),
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        },
        experts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    )

    @staticmethod
    def layer_class(c: Config, layer: int) -> Any:
        return (LayerWithNormsAfter if c.norms_after else Layer)(c, layer)

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.embed_tokens = JoinedEmbedding(c.rows, MORE_ROWS, c.hidden)
        self.lm_head = PaddedHead(c.vocab, c.rows, c.hidden)
        dense = {**LAYER_PATHS, **NORM_PATHS[c.norms_after]}
        self.weights = replace(self.weights, paths=dense if c.moe is None else SPARSE_PATHS)
