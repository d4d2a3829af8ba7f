"""The layers that model files are made of. They call kernels only: no torch arithmetic."""

from quire.kernels.act import gated_act
from quire.kernels.add import add, scale, softcap
from quire.kernels.gated_add import gated_add
from quire.layers.activation import ACTIVATION_KINDS, Activation, GatedActivation
from quire.layers.attention import Attention, SharedAttention
from quire.layers.embedding import Embedding, PositionEmbedding
from quire.layers.linear import ColumnLinear, Linear, LMHead, QKVLinear, RowLinear
from quire.layers.moe import ExpertActivation, Experts, Router, RoutingMethod
from quire.layers.norm import (
    AddLayerNorm,
    AddRMSNorm,
    AllHeadsRMSNorm,
    HeadLayerNorm,
    LayerNorm,
    RMSNorm,
    UnitRMSNorm,
)
from quire.layers.param_module import ParamModule
from quire.layers.rope import Rope, RopeConfig, RopeTemperature
from quire.layers.weight_module import WeightModule

__all__ = [
    "ACTIVATION_KINDS",
    "Activation",
    "AddLayerNorm",
    "AddRMSNorm",
    "AllHeadsRMSNorm",
    "Attention",
    "ColumnLinear",
    "Embedding",
    "ExpertActivation",
    "Experts",
    "GatedActivation",
    "HeadLayerNorm",
    "LMHead",
    "LayerNorm",
    "Linear",
    "ParamModule",
    "PositionEmbedding",
    "QKVLinear",
    "RMSNorm",
    "Rope",
    "RopeConfig",
    "RopeTemperature",
    "Router",
    "RoutingMethod",
    "RowLinear",
    "SharedAttention",
    "UnitRMSNorm",
    "WeightModule",
    "add",
    "gated_act",
    "gated_add",
    "scale",
    "softcap",
]
