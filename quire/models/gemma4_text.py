"""Gemma-4, text: two head sizes, two rotary bases, inputs of each layer, caches that layers share.

Layers with full attention have larger heads than those with a window. The last layers have no keys
and values: they read the cache of the last layer of their kind that has. In some models values are
the keys before their norm and rotation. A second embedding table has a vector for each layer, which
gates a branch at its end. Mixtures have experts beside the MLP of each layer, with norms of their
own. The published config files leave out what equals the defaults.

Source: model_type "gemma4_text", https://huggingface.co/google/gemma-4-E2B-it; transformers
        modeling_gemma4.py
Axes:   T tokens in the step, E hidden, L layers, P size of a layer's input, H query heads,
        K kv heads, D head size
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from quire.config.facts import head_shapes
from quire.config.memory.kv_layout import LayerFacts
from quire.errors import ConfigError
from quire.kernels.moe_router import scale_routes
from quire.kernels.rms_norm import rms_norm
from quire.layers import (
    ACTIVATION_KINDS,
    AddRMSNorm,
    Attention,
    Embedding,
    ExpertActivation,
    Experts,
    Linear,
    ParamModule,
    QKVLinear,
    RMSNorm,
    Rope,
    RopeConfig,
    Router,
    RoutingMethod,
    RowLinear,
    SharedAttention,
    UnitRMSNorm,
    add,
    gated_act,
    scale,
)
from quire.models._decoder import Decoder, GatedMLP
from quire.models._rope import rope_of, section_of
from quire.models._windows import FULL, SLIDING, read_periodic_windows
from quire.models.base import (
    CarriedStates,
    Hf,
    ModelConfig,
    StepInputs,
    Weights,
    field_of,
    sizes_of,
)
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout

CONVENTIONS = {
    "windows": "periodic",
    "window": 512,
    "period": 6,
    "tied": True,
    "scaling_extends": False,
    "defaults": {
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
    },
    "nested_defaults": {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    shapes: tuple[tuple[int, int], ...]  # (KV heads, head size) of each layer
    shared: int  # so many last layers read the cache of an earlier one
    keys_are_values: bool  # in layers with full attention
    wide: bool  # the MLP of layers that share is twice as wide
    rope: RopeConfig  # of layers with full attention
    local_rope: RopeConfig  # of layers with a window
    bias: bool
    input_size: int  # P; 0: layers have no inputs of their own
    input_vocab: int
    experts: int  # 0: none
    top_k: int
    expert_mlp: int

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        bidirectional = field_of(hf, "use_bidirectional_attention", str, default=None)
        if bidirectional not in (None, "vision"):
            field_of(hf, "use_bidirectional_attention", str, one_of={"vision"})
        sizes = sizes_of(hf, act="hidden_activation", tied=True)
        windows = read_periodic_windows(hf, sizes["layers"], window=512, period=6)
        if windows[-1] is not None:
            raise ConfigError(f"config.json: layer_types must end with {FULL}")
        shapes = tuple(head_shapes(hf))
        full = {shape for shape, window in zip(shapes, windows) if window is None}
        local = {shape for shape, window in zip(shapes, windows) if window is not None}
        if len(full) > 1 or len(local) > 1:
            raise ConfigError(
                "config.json: per_layer_config gives layers of one kind different head shapes: "
                f"{sorted(full)} with full attention, {sorted(local)} with a window"
            )
        if uneven := [kv for kv, _ in shapes if sizes["heads"] % kv]:
            raise ConfigError(
                f"config.json: {uneven[0]} KV heads in a layer; they must divide "
                f"num_attention_heads, which is {sizes['heads']}"
            )
        config = cls(
            **sizes,
            embed_scale=sizes["hidden"] ** 0.5,
            windows=windows,
            shapes=shapes,
            shared=field_of(hf, "num_kv_shared_layers", int, default=0),
            keys_are_values=field_of(hf, "attention_k_eq_v", bool, default=False),
            wide=field_of(hf, "use_double_wide_mlp", bool, default=False),
            rope=rope_of(hf, shapes[-1][1], section=section_of(hf, FULL)),
            local_rope=rope_of(
                hf, local.pop()[1] if local else sizes["head_dim"], section=section_of(hf, SLIDING)
            ),
            bias=field_of(hf, "attention_bias", bool, default=False),
            logit_softcap=field_of(hf, "final_logit_softcapping", float, default=None),
            input_size=field_of(hf, "hidden_size_per_layer_input", int),
            input_vocab=field_of(hf, "vocab_size_per_layer_input", int),
            **_expert_sizes(hf),
        )
        config.check_sharing()
        return config

    def check_sharing(self) -> None:
        """Raises: ConfigError if a layer has no other whose cache it could read."""
        own = self.layers - self.shared
        if not 0 <= self.shared < self.layers or {*map(type, self.windows[own:])} - {
            *map(type, self.windows[:own])
        }:
            raise ConfigError(
                f"config.json: num_kv_shared_layers is {self.shared}; before the last of "
                f"{self.layers} layers there must be one of each kind with a cache of its own"
            )
        if self.input_size and self.input_vocab < self.vocab:
            raise ConfigError(
                f"config.json: vocab_size_per_layer_input is {self.input_vocab}; it must be at "
                f"least vocab_size, which is {self.vocab}"
            )

    def source(self, layer: int) -> int | None:
        """Return the layer whose cache a layer reads; None: its own."""
        own = self.layers - self.shared
        if layer < own:
            return None
        kind = self.windows[layer] is None
        return max(i for i in range(own) if (self.windows[i] is None) == kind)

    def attention_layers(self) -> tuple[LayerFacts, ...]:
        own = self.layers - self.shared
        return tuple(LayerFacts(*self.shapes[i], self.window(i)) for i in range(own))


def _expert_sizes(hf: Hf) -> dict[str, Any]:
    if not field_of(hf, "enable_moe_block", bool, default=False):
        return {"experts": 0, "top_k": 0, "expert_mlp": 0}
    experts, top_k = (field_of(hf, name, int) for name in ("num_experts", "top_k_experts"))
    if not 1 <= top_k <= experts:
        raise ConfigError(
            f"config.json: top_k_experts is {top_k}; it must be in [1, {experts}], {experts} being "
            "num_experts"
        )
    width = field_of(hf, "moe_intermediate_size", int)
    return {"experts": experts, "top_k": top_k, "expert_mlp": width}


class SelfAttention(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        (kv_heads, size), full = c.shapes[layer], c.windows[layer] is None
        own = c.source(layer) is None
        self.qkv_proj = QKVLinear(
            c.hidden,
            c.heads,
            kv_heads,
            size,
            c.bias,
            keys=own,
            values=not (full and c.keys_are_values),
        )
        self.o_proj = RowLinear(c.heads * size, c.hidden, c.bias)
        self.q_norm = RMSNorm(size, c.norm_eps)
        self.rope = Rope(c.rope if full else c.local_rope, c.max_len)
        self.attn: Attention | SharedAttention | None = None  # shared: from Model.__init__ on
        if own:
            self.k_norm, self.v_norm = RMSNorm(size, c.norm_eps), UnitRMSNorm(size, c.norm_eps)
            window = c.window(layer)
            self.attn = Attention(
                c.heads, kv_heads, size, scale=1.0, window=window, spans=window is not None
            )

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # [T, H, D] [T, K, D] [T, K, D]
        q = self.q_norm(q)
        if isinstance(self.attn, Attention):
            v = self.v_norm(v)
            q, k = self.rope(q, self.k_norm(k), step.positions)
            return self.o_proj(self.attn(q, k, v, step.attention))
        assert self.attn is not None
        q, _ = self.rope(q, k, step.positions)  # no heads of k
        return self.o_proj(self.attn(q, step.attention))


class ScaledRouter(ParamModule):
    """A router on a norm of its own, with a factor on the weight of each expert."""

    scale: Tensor
    per_expert_scale: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.hidden, self.experts, self.eps = c.hidden, c.experts, c.norm_eps
        self.proj = Router(c.hidden, c.experts, RoutingMethod(c.top_k, renormalise=True))
        self.declare("scale", "per_expert_scale")
        self._norm_weight = torch.empty(0)  # of `scale`, from after_load on

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, E] -> ids [T, k] int32, weights [T, k] float32."""
        ids, weights = self.proj(rms_norm(x, self._norm_weight, self.eps)[0])
        return ids, scale_routes(weights, ids, self.per_expert_scale)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((self.hidden if param == "scale" else self.experts,))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(1.0, 0.02)

    def after_load(self, dtype: torch.dtype) -> None:
        self._norm_weight = (self.scale.float() * self.hidden**-0.5).to(dtype)


class Layer(ParamModule):
    """Owns the factor on its result, under the name that checkpoints give it."""

    layer_scalar: Tensor

    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        wide = 2 if c.wide and c.source(layer) is not None else 1
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.norm_eps)
        self.pre_feedforward_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = GatedMLP(c.hidden, wide * c.mlp, c.act)
        self.post_feedforward_layernorm = RMSNorm(c.hidden, c.norm_eps)
        self.router: ScaledRouter | None = None
        if c.experts:
            self.router = ScaledRouter(c)
            activation = ExpertActivation(ACTIVATION_KINDS[c.act])
            self.experts = Experts(c.hidden, c.expert_mlp, c.experts, activation)
            self.post_feedforward_layernorm_1 = RMSNorm(c.hidden, c.norm_eps)
            self.pre_feedforward_layernorm_2 = RMSNorm(c.hidden, c.norm_eps)
            self.post_feedforward_layernorm_2 = RMSNorm(c.hidden, c.norm_eps)
        self.input_size, self.input_at = c.input_size, layer * c.input_size
        if c.input_size:
            self.per_layer_input_gate = Linear(c.hidden, c.input_size)
            self.per_layer_projection = Linear(c.input_size, c.hidden)
            self.post_per_layer_input_norm = RMSNorm(c.hidden, c.norm_eps)
            self.act_kind = ACTIVATION_KINDS[c.act]
        self.declare("layer_scalar")
        self.factor = 1.0  # the value of layer_scalar

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        x, res = self.input_layernorm(x, res)
        x = self.post_attention_layernorm(self.self_attn(x, step))
        x, res = self.pre_feedforward_layernorm(x, res)
        x = self.mlp(x)
        if self.router is not None:
            chosen = self.experts(self.pre_feedforward_layernorm_2(res), *self.router(res))
            x = self.post_feedforward_layernorm_1(x)
            x = add(x, self.post_feedforward_layernorm_2(chosen))
        x = add(self.post_feedforward_layernorm(x), res)
        if step.layer_inputs is not None:
            own = step.layer_inputs[:, self.input_at : self.input_at + self.input_size]  # [T, P]
            gated = gated_act(self.per_layer_input_gate(x), own, self.act_kind)
            x = add(x, self.post_per_layer_input_norm(self.per_layer_projection(gated)))
        return scale(x, self.factor), None

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((1,))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(1.0, 0.0)

    def after_load(self, dtype: torch.dtype) -> None:
        if not self.layer_scalar.is_meta:
            self.factor = float(self.layer_scalar)


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        ignore=("*.rotary_emb.*",),
        tie={"lm_head": "embed_tokens"},
    )

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.hidden, self.depth, self.input_size = c.hidden, c.layers, c.input_size
        self.span_window = next(filter(None, c.windows), None)
        unused: list[str] = []
        attentions = [cast(Layer, layer).self_attn for layer in self.layers]
        for i, attention in enumerate(attentions):
            if (source := c.source(i)) is not None:
                attention.attn = SharedAttention(cast(Attention, attentions[source].attn))
                unused.append(f"*layers.{i}.self_attn.[kv]_*")  # some checkpoints have them
        self.weights = replace(self.weights, ignore=(*self.weights.ignore, *unused))
        if c.input_size:
            width = c.layers * c.input_size
            self.embed_tokens_per_layer = Embedding(c.input_vocab, width, scale=c.input_size**0.5)
            self.per_layer_model_projection = Linear(c.hidden, width)
            self.per_layer_projection_norm = RMSNorm(c.input_size, c.norm_eps)

    def run_layers(self, step: StepInputs) -> CarriedStates:
        if self.input_size:
            x = self.embed(step)
            inputs = self._layer_inputs(x, step.token_ids)
            step = replace(step, inputs_embeds=x, layer_inputs=inputs)
        return super().run_layers(step)

    def _layer_inputs(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """[T, L * P], of the embeddings x [T, E] and of a table of their own."""
        made = scale(self.per_layer_model_projection(x), self.hidden**-0.5)
        made = self.per_layer_projection_norm(made.view(-1, self.depth, self.input_size))
        made = made.view(-1, self.depth * self.input_size)
        return scale(add(made, self.embed_tokens_per_layer(token_ids)), 2.0**-0.5)

    def keep_stage(self, stage: range, *, tied: bool) -> None:
        raise ConfigError(
            "pipeline_parallel_size must be 1 for Gemma-4: its layers share keys and values, and "
            "inputs that are made of the tokens; use tensor_parallel_size"
        )
