"""The words that model files are written in. They call kernels only: no torch arithmetic."""

from quire.kernels.add import add, softcap
from quire.kernels.gated_add import gated_add
from quire.layers.activation import KINDS, Activation, GatedActivation
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding, Positions
from quire.layers.leaf import Leaf
from quire.layers.linear import ColumnLinear, HeadsLinear, Linear, LMHead, RowLinear
from quire.layers.moe import Experts, Gate, Router, Routing
from quire.layers.norm import AddLayerNorm, AddNorm, LayerNorm, RMSNorm
from quire.layers.rope import Rope, RopeConfig

__all__ = [
    "KINDS",
    "Activation",
    "AddLayerNorm",
    "AddNorm",
    "Attention",
    "ColumnLinear",
    "Embedding",
    "Experts",
    "Gate",
    "GatedActivation",
    "HeadsLinear",
    "LMHead",
    "LayerNorm",
    "Leaf",
    "Linear",
    "Positions",
    "RMSNorm",
    "Rope",
    "RopeConfig",
    "Router",
    "Routing",
    "RowLinear",
    "add",
    "gated_add",
    "softcap",
]
