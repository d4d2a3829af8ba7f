"""EAGLE-3: a layer over the next token's embedding and the states of three layers of the target.

    g = fc(cat(states))        u = layer(cat(norm(embedding), norm(g)))        logits of norm(u)

Later passes read u in place of g. Drafts may be of a part of the vocabulary only (`d2t`).

Source: arXiv 2503.01840, https://github.com/SafeAILab/EAGLE; the layout of *speculators*
Axes:   n tokens, E hidden of the head
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import AddRMSNorm, Embedding, Linear, LMHead, QKVLinear, RMSNorm, add
from quire.models import llama, qwen3
from quire.models._decoder import GatedMLP, select_rows
from quire.models.base import Hf, ModelConfig, StepInputs, field_of
from quire.models.drafters._base import (
    DraftHead,
    HeadConfig,
    TokenMap,
    check_size,
    has_tensor,
    read_layer_config,
    side_by_side,
    taps_before,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(HeadConfig):
    draft_vocab: int
    taps: tuple[int, ...]
    target_hidden: int
    norm_before_residual: bool
    norm_before_fc: bool  # one norm of the states side by side
    fc_norm: bool  # a norm of each state
    norm_output: bool  # later passes read norm(u)


def read_config(hf: Hf, target: ModelConfig) -> Config:
    """Read config.json of either layout. Raises ConfigError."""
    speculators = hf.get("transformer_layer_config")
    own: dict[str, Any] = {**hf, **(speculators or {})}
    layer = read_layer_config(own, target)
    eagle = {**(hf.get("eagle_config") or {}), **hf}
    field_of(eagle, "use_aux_hidden_state", bool, default=True, one_of=(True,))
    depth = target.layers
    given = field_of(
        eagle, "eagle_aux_hidden_state_layer_ids", list, default=[2, depth // 2, depth - 3]
    )
    return Config(
        layer=layer,
        target=target,
        draft_vocab=field_of(hf, "draft_vocab_size", int, default=target.vocab),
        taps=taps_before(given, depth),
        target_hidden=field_of(hf, "target_hidden_size", int, default=target.hidden),
        norm_before_residual=field_of(
            eagle, "norm_before_residual", bool, default=speculators is not None
        ),
        norm_before_fc=field_of(eagle, "norm_before_fc", bool, default=False),
        fc_norm=field_of(eagle, "fc_norm", bool, default=False),
        norm_output=field_of(eagle, "norm_output", bool, default=False),
    )


class WideLayer(nn.Module):
    """Reads the embedding and the state side by side."""

    def __init__(self, config: Config, attention: type[llama.SelfAttention]) -> None:
        super().__init__()
        c = cast(llama.Config, config.layer)
        self.input_layernorm = RMSNorm(c.hidden, c.norm_eps)
        self.hidden_norm = RMSNorm(c.hidden, c.norm_eps)
        self.self_attn = attention(c, c.window(0))
        wide = 2 * c.hidden
        self.self_attn.qkv_proj = QKVLinear(wide, c.heads, c.kv_heads, c.head_dim, c.qkv_bias)
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = GatedMLP(c.hidden, c.mlp, c.act, c.mlp_bias)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self, embeddings: Tensor, states: Tensor, step: StepInputs, needed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """[n, E] each -> what the layer adds to the residual, and the residual. needed: as for
        quire.models._decoder.PreNormLayer."""
        normed = self.hidden_norm(states)
        both = side_by_side(self.input_layernorm(embeddings), normed)
        x = self.self_attn(both, step)
        res = normed if self.norm_before_residual else states
        if needed is not None:
            x, res = select_rows(x, res, needed)
        x, res = self.post_attention_layernorm(x, res)
        return self.mlp(x), res


class Head(DraftHead):
    selects_rows = True
    weights = replace(
        llama.Model.weights,
        paths={"midlayer": "layers.0"},
        alias={"d2t": "token_map.offsets", "model.d2t": "token_map.offsets"},
        ignore=("*.rotary_emb.inv_freq", "t2d", "model.t2d", "verifier_*"),
    )

    def __init__(self, config: Config, names: Collection[str]) -> None:
        """names: of the checkpoint's tensors; none: of dummy weights."""
        super().__init__(config)
        c = cast(llama.Config, config.layer)
        normed = has_tensor(names, "self_attn.q_norm")
        attention = qwen3.SelfAttention if normed else llama.SelfAttention
        self.taps = config.taps
        width, count = config.target_hidden, len(config.taps)
        self.input_norm = RMSNorm(count * width, c.norm_eps) if config.norm_before_fc else None
        norms = [RMSNorm(width, c.norm_eps) for _ in range(count)] if config.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.fc = Linear(count * width, c.hidden)
        layers: list[nn.Module] = [WideLayer(config, attention)]
        layers += [_layer(c, i, attention) for i in range(1, c.layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(c.hidden, c.norm_eps)
        self.norm_output = config.norm_output
        if has_tensor(names, "embed_tokens"):
            self.embed_tokens = Embedding(c.vocab, c.hidden)
        if has_tensor(names, "lm_head") or not names or config.draft_vocab != c.vocab:
            self.lm_head = LMHead(config.draft_vocab, c.hidden)
        if config.draft_vocab != c.vocab:
            self.token_map = TokenMap(config.draft_vocab, c.vocab)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        c = cast(Config, self.config)
        if c.target_hidden != c.target.hidden:
            raise ConfigError(
                f"speculative_config: the head reads states of {c.target_hidden} numbers, and "
                f"those of the model have {c.target.hidden}: the head was made for another model"
            )
        if not 1 <= c.draft_vocab <= c.target.vocab:
            raise ConfigError(
                f"speculative_config: the head drafts {c.draft_vocab} tokens (draft_vocab_size), "
                f"and the model has {c.target.vocab}: drafts need tokens of the model"
            )
        super().check_shapes(shapes)
        check_size(shapes, "lm_head.weight", 0, c.draft_vocab)
        check_size(shapes, "d2t", 0, c.draft_vocab)
        check_size(shapes, "fc.weight", 1, len(c.taps) * c.target_hidden)
        if shapes and c.draft_vocab < c.target.vocab and not {"d2t", "model.d2t"} & shapes.keys():
            raise ConfigError(
                f"speculative_config: the head drafts {c.draft_vocab} of {c.target.vocab} tokens "
                "of the model, and its checkpoint has no d2t that says which"
            )

    def begin(self, hidden: Tensor, taps: Mapping[int, Tensor], at: Tensor) -> Tensor:
        states = [taps[layer].index_select(0, at) for layer in self.taps]
        if self.fc_norm:
            states = [norm(one) for norm, one in zip(self.fc_norm, states)]
        x = side_by_side(*states)
        return self.fc(x if self.input_norm is None else self.input_norm(x))

    def forward(self, step: StepInputs, states: Tensor) -> Tensor:
        first, *others = self.layers
        x, res = first(self.embed(step), states, step, None if others else step.needed)
        for layer in others:
            x, res = layer(x, res, step, step.needed if layer is others[-1] else None)
        u = add(x, res)
        out = self.norm(u) if self.norm_output else u
        lazy_fusion.flush()  # it is read by torch
        return out

    def head_input(self, states: Tensor) -> Tensor:
        return states if self.norm_output else self.norm(states)


def _layer(c: llama.Config, number: int, attention: type[llama.SelfAttention]) -> llama.Layer:
    kind = qwen3.Layer if attention is qwen3.SelfAttention else llama.Layer
    return kind(c, number)
