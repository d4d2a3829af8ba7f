"""The layers that model files are made of. They call kernels only: no torch arithmetic."""

from quire.kernels.act import gated_act
from quire.kernels.add import add, scale, softcap
from quire.kernels.gated_add import gated_add
from quire.layers.activation import ACTIVATION_KINDS, Activation, GatedActivation
from quire.layers.attention import (
    Attention,
    CrossAttention,
    DisentangledAttention,
    EncoderAttention,
    SharedAttention,
)
from quire.layers.conv import Conv1d, Conv2d
from quire.layers.embedding import (
    Embedding,
    PositionEmbedding,
    PositionTypeEmbedding,
    SinusoidalEmbedding,
    TypeEmbedding,
)
from quire.layers.linear import (
    ClassifierLinear,
    ColumnLinear,
    KVLinear,
    Linear,
    LMHead,
    LogitsBias,
    PatchLinear,
    QKVLinear,
    QueryLinear,
    RowLinear,
)
from quire.layers.moe import ExpertActivation, Experts, Router, RoutingMethod
from quire.layers.norm import (
    AddLayerNorm,
    AddRMSNorm,
    AllHeadsRMSNorm,
    ClassifierNorm,
    HeadLayerNorm,
    LayerNorm,
    RMSNorm,
    UnitRMSNorm,
)
from quire.layers.param_module import ParamModule
from quire.layers.relative_bias import RelativeBias
from quire.layers.rope import Rope, RopeConfig, RopeTemperature
from quire.layers.weight_module import WeightModule

__all__ = [
    "ACTIVATION_KINDS",
    "Activation",
    "AddLayerNorm",
    "AddRMSNorm",
    "AllHeadsRMSNorm",
    "Attention",
    "ClassifierLinear",
    "ClassifierNorm",
    "ColumnLinear",
    "Conv1d",
    "Conv2d",
    "CrossAttention",
    "DisentangledAttention",
    "Embedding",
    "EncoderAttention",
    "ExpertActivation",
    "Experts",
    "GatedActivation",
    "HeadLayerNorm",
    "KVLinear",
    "LMHead",
    "LayerNorm",
    "Linear",
    "LogitsBias",
    "ParamModule",
    "PatchLinear",
    "PositionEmbedding",
    "PositionTypeEmbedding",
    "QKVLinear",
    "QueryLinear",
    "RMSNorm",
    "RelativeBias",
    "Rope",
    "RopeConfig",
    "RopeTemperature",
    "Router",
    "RoutingMethod",
    "RowLinear",
    "SharedAttention",
    "SinusoidalEmbedding",
    "TypeEmbedding",
    "UnitRMSNorm",
    "WeightModule",
    "add",
    "gated_act",
    "gated_add",
    "scale",
    "softcap",
]
