"""Nemotron-H: a layer is a Mamba-2 mixer, attention without positions, an MLP, or experts.

MLPs and experts have no gate: they square what is positive. Experts may read a narrower projection.
Time steps are bounded by time_step_limit, as in NVIDIA's code; transformers' class bounds those of
prompts from below by time_step_min, which NVIDIA's code initializes weights with.

Source: model_type "nemotron_h", https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16;
        transformers modeling_nemotron_h.py
Axes:   T tokens in the step, E hidden, F mlp width, L latent size
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.config.recurrent_layers import EXPERTS, MLP, RECURRENT
from quire.errors import ConfigError
from quire.layers import (
    AddRMSNorm,
    ColumnLinear,
    ExpertActivation,
    Experts,
    Linear,
    Router,
    RoutingMethod,
    RowLinear,
    add,
    gated_act,
)
from quire.layers.recurrent import Mamba2Mixer, Mamba2Sizes
from quire.models import jamba, llama
from quire.models._decoder import Decoder
from quire.models._experts import sigmoid_routing
from quire.models._recurrent import dt_limit, recurrent_fields, states_of
from quire.models._rope import rotary_sizes_of
from quire.models.base import CarriedStates, Hf, StepInputs, Weights, field_of

CONVENTIONS = {
    "recurrent": "mamba2",
    "recurrent_layers": "pattern",
    "mlp_kind": "plain",
    "positions_kind": "computed",
    "defaults": {
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
}
OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaredExpertSizes:
    """The fields of Config about experts."""

    experts: int
    mlp: int  # width of one
    shared: int  # width of the MLP beside them
    latent: int | None  # size of what they read; None: hidden
    routing: RoutingMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    mixer: Mamba2Sizes
    moe: SquaredExpertSizes | None

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        if older := [name for name in OLDER_NAMES if name in hf]:
            raise ConfigError(
                f"config.json: {older[0]} is an older name of {OLDER_NAMES[older[0]]}; rename it"
            )
        field_of(hf, "mlp_hidden_act", str, default="relu2", one_of=("relu2",))
        field_of(hf, "mamba_hidden_act", str, default="silu", one_of=("silu", "swish"))
        field_of(hf, "attention_bias", bool, default=False, one_of=(False,))
        field_of(hf, "sliding_window", int, default=None, one_of=(None,))
        eps = field_of(hf, "layer_norm_epsilon", float, default=1e-5)
        layers = recurrent_fields(hf)
        return cls(
            **rotary_sizes_of({**hf, "rms_norm_eps": eps, "hidden_act": "relu"}),
            **layers,
            mlp_bias=field_of(hf, "mlp_bias", bool, default=False),
            mixer=_mixer_sizes(hf, eps),
            moe=_expert_sizes(hf) if EXPERTS in layers["kinds"] else None,
        )


def _mixer_sizes(hf: Hf, eps: float) -> Mamba2Sizes:
    bias = field_of(hf, "use_bias", bool, default=False)
    return Mamba2Sizes(
        heads=field_of(hf, "mamba_num_heads", int),
        head_dim=field_of(hf, "mamba_head_dim", int),
        groups=field_of(hf, "n_groups", int),
        state=field_of(hf, "ssm_state_size", int),
        kernel=field_of(hf, "conv_kernel", int),
        eps=eps,
        bias=bias,
        out_bias=bias,
        conv_bias=field_of(hf, "use_conv_bias", bool, default=True),
        dt_limit=dt_limit(hf),
    )


def _expert_sizes(hf: Hf) -> SquaredExpertSizes:
    field_of(hf, "n_shared_experts", int, default=1, one_of=(1,))
    return SquaredExpertSizes(
        experts=field_of(hf, "n_routed_experts", int),
        mlp=field_of(hf, "moe_intermediate_size", int),
        shared=field_of(hf, "moe_shared_expert_intermediate_size", int),
        latent=field_of(hf, "moe_latent_size", int, default=None),
        routing=sigmoid_routing(hf),
    )


class UngatedMLP(nn.Module):
    """down(relu(up(x)) ** 2)."""

    def __init__(self, hidden: int, mlp: int, bias: bool) -> None:
        super().__init__()
        self.up_proj = ColumnLinear(hidden, mlp, bias)
        self.down_proj = RowLinear(mlp, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up_proj(x)  # [T, F]
        return self.down_proj(gated_act(x, x, "relu"))


class SparseMLP(nn.Module):
    """Routed experts, plus an MLP for all tokens."""

    def __init__(self, c: Config, moe: SquaredExpertSizes) -> None:
        super().__init__()
        size = moe.latent or c.hidden
        self.gate = Router(c.hidden, moe.experts, moe.routing, correction=True)
        self.experts = Experts(size, moe.mlp, moe.experts, ExpertActivation("relu2"))
        self.shared_experts = UngatedMLP(c.hidden, moe.shared, c.mlp_bias)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if moe.latent:
            self.fc1_latent_proj = Linear(c.hidden, size, c.mlp_bias)
            self.fc2_latent_proj = Linear(size, c.hidden, c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.gate(x)
        read = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)  # [T, L]
        y = self.experts(read, ids, weights)
        y = y if self.fc2_latent_proj is None else self.fc2_latent_proj(y)
        return add(y, self.shared_experts(x))


class Layer(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.norm = AddRMSNorm(c.hidden, c.norm_eps)
        self.kind, self.mixer = c.kinds[layer], self._build_mixer(c, c.kinds[layer])

    def _build_mixer(self, c: Config, kind: str) -> nn.Module:
        if kind == RECURRENT:
            return Mamba2Mixer(c.hidden, c.mixer)
        if kind == MLP:
            return UngatedMLP(c.hidden, c.mlp, c.mlp_bias)
        if kind == EXPERTS:
            assert c.moe is not None
            return SparseMLP(c, c.moe)
        return jamba.SelfAttention(c)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        x, res = self.norm(x, res)
        if self.kind == RECURRENT:
            return self.mixer(x, states_of(step)), res
        return self.mixer(x) if self.kind in (MLP, EXPERTS) else self.mixer(x, step), res


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("backbone.", "model."),
        alias={
            f"{prefix}.{theirs}.weight": f"{ours}.weight"
            for prefix in ("backbone", "model")
            for theirs, ours in (("embeddings", "embed_tokens"), ("norm_f", "norm"))
        },
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        experts={"gate_up_proj": ("up_proj",), "down_proj": ("down_proj",)},
        ignore=("mtp.*",),
        tie={"lm_head": "embed_tokens"},
    )
