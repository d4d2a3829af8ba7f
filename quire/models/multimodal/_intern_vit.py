"""InternViT: the tower of InternVL, and the names in checkpoints of transformers and of the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from quire.layers import Activation, LayerNorm, Linear
from quire.models.multimodal._base import Hf, Weights, field_of
from quire.models.multimodal._towers import tower_weights
from quire.models.multimodal._vit import Vit, VitConfig, vit_sizes

DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
"""What a vision section leaves out."""
NAMES = {
    "patch_embeddings.projection": "patch_embedding",
    "encoder.layer": "layers",
    "attention.projection_layer": "self_attn.out_proj",
    "attention": "self_attn",
    "layernorm_before": "layer_norm1",
    "layernorm_after": "layer_norm2",
    "layernorm": "post_layernorm",
}
"""Paths in checkpoints of transformers -> ours."""
HUB_NAMES = {
    "attn.qkv": "self_attn.qkv_proj",
    "attn.proj": "self_attn.out_proj",
    "attn": "self_attn",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "mlp1.0": "projector.layer_norm",
    "mlp1.1": "projector.linear_1",
    "mlp1.3": "projector.linear_2",
}
"""Paths in checkpoints of the hub, whose code is their own -> ours."""


def build_intern_vit(hf: Hf, wanted: Sequence[int]) -> Vit:
    """Build the tower of a vision section of either kind."""
    hub = "qkv_bias" in hf or "qk_normalization" in hf
    bias, norms = ("qkv_bias", "qk_normalization") if hub else ("attention_bias", "use_qk_norm")
    config = VitConfig(
        **vit_sizes(hf, **DEFAULTS),
        class_token=True,
        qkv_bias=field_of(hf, bias, bool, default=False),
        qk_norms=field_of(hf, norms, bool, default=False),
        rms_norms=hf.get("norm_type") == "rms_norm",
        scales=True,
    )
    pooled = hub or field_of(hf, "use_mean_pooling", bool, default=True)
    return Vit(config, wanted, last_norm=not pooled)


def intern_weights(tower: Vit, *, hub: bool) -> Weights:
    """Return the names in the checkpoint of a wrapper with such a tower and `projector`."""
    layers = range(len(tower.layers))
    if hub:
        alias = {
            "vision_model.embeddings.position_embedding": "embeddings.position_embedding.weight"
        }
        for i in layers:
            alias |= {
                f"vision_model.encoder.layers.{i}.ls{k}": f"layers.{i}.scale{k}.weight"
                for k in (1, 2)
            }
    else:
        at = "vision_tower.embeddings"
        alias = {
            f"{at}.cls_token": "embeddings.class_token.weight",
            f"{at}.position_embeddings": "embeddings.position_embedding.weight",
        }
        for i in layers:
            alias |= {
                f"vision_tower.encoder.layer.{i}.lambda_{k}": f"layers.{i}.scale{k}.weight"
                for k in (1, 2)
            }
    found = tower_weights(
        tower,
        paths=HUB_NAMES if hub else NAMES,
        alias={theirs: f"tower.{ours}" for theirs, ours in alias.items()},
    )
    return replace(found, ignore=(*found.ignore, "*.mask_token"))


class NormedProjector(nn.Module):
    """linear_2(act(linear_1(layer_norm(x))))."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        act: str,
        bias: bool = True,
        *,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(inputs, eps)
        self.linear_1 = Linear(inputs, hidden, bias)
        self.act = Activation(act)
        self.linear_2 = Linear(hidden, outputs, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.act(self.linear_1(self.layer_norm(x))))
