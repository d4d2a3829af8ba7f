"""GLM-4V-9B: EVA2-CLIP, a convolution over squares of 2 x 2 patches and a gated MLP.

    x = x + norm_1(attn(x))
    x = x + norm_2(mlp(x))

Source: model_type "chatglm", https://huggingface.co/THUDM/glm-4v-9b
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import Activation, LayerNorm, Linear, PatchLinear, add
from quire.models._decoder import GatedMLP
from quire.models.multimodal._base import EncoderInput, Hf, Weights, field_of
from quire.models.multimodal._towers import ImageEncoder, merge_neighbours, text_hidden
from quire.models.multimodal._vit import (
    Learned,
    Packing,
    VitAttention,
    VitConfig,
    VitEmbeddings,
    VitMLP,
    vit_sizes,
)

MERGE = 2
AT = "transformer.vision"


class EvaLayer(nn.Module):
    def __init__(self, c: VitConfig) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(c.hidden, c.eps)
        self.self_attn = VitAttention(c)
        self.post_attention_layernorm = LayerNorm(c.hidden, c.eps)
        self.mlp = VitMLP(c.hidden, c.mlp, c.act)

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        x = add(x, self.input_layernorm(self.self_attn(x, packing)))
        return add(x, self.post_attention_layernorm(self.mlp(x)))


class EvaTower(nn.Module):
    def __init__(self, c: VitConfig) -> None:
        super().__init__()
        self.config = c
        self.embeddings = VitEmbeddings(c)
        self.layers = nn.ModuleList(EvaLayer(c) for _ in range(c.layers))

    def forward(self, patches: Tensor) -> list[Tensor]:
        """Patches of whole images -> the last states [N, n, E], with that of the class token."""
        x = self.embeddings(patches)
        tokens = self.embeddings.patches + 1
        packing = Packing.of([tokens] * (len(x) // tokens), x.device)
        for layer in self.layers:
            x = layer(x, packing)
        lazy_fusion.flush()
        return [x.view(-1, tokens, x.shape[-1])]


class NormedGatedProjector(GatedMLP):
    """A gated MLP of the normed activations of a projection."""

    def __init__(self, hidden: int, mlp: int) -> None:
        super().__init__(hidden, mlp, "silu")
        self.linear_proj = Linear(hidden, hidden)
        self.norm1 = LayerNorm(hidden, 1e-5)
        self.act1 = Activation("gelu")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.act1(self.norm1(self.linear_proj(x))))


class Encoder(ImageEncoder):
    weights = Weights(
        strip=("transformer.",),
        paths={
            "vision.patch_embedding.proj": "tower.embeddings.patch_embedding",
            "vision.patch_embedding.position_embedding": "tower.embeddings.position_embedding",
            "vision.transformer.layers": "tower.layers",
            "vision.linear_proj": "projector",
            "vision.conv": "conv",
            "attention.query_key_value": "self_attn.qkv_proj",
            "attention.dense": "self_attn.out_proj",
            "dense_4h_to_h": "down_proj",
        },
        alias={
            f"{AT}.patch_embedding.cls_embedding": "tower.embeddings.class_token.weight",
            f"{AT}.boi": "boi.weight",
            f"{AT}.eoi": "eoi.weight",
        },
        fuse={"gate_up_proj": ("gate_proj", "dense_h_to_4h")},
    )

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        vision = field_of(hf, "vision_config", dict)
        sizes = vit_sizes(
            {
                **vision,
                "num_attention_heads": vision.get("num_heads"),
                "num_channels": vision.get("in_channels"),
            },
            hidden_act="gelu",
            layer_norm_eps=1e-6,
        )
        self.tower = EvaTower(VitConfig(**sizes, class_token=True))  # type: ignore[assignment]
        self.scaling = field_of(vision, "scaling_factor", float, default=1.0)
        self.width = text_hidden(hf)
        self.conv = PatchLinear(sizes["hidden"], (MERGE, MERGE), self.width, bias=True)
        mlp = field_of(hf["text_config"], "intermediate_size", int)
        self.projector = NormedGatedProjector(self.width, mlp)
        self.boi = Learned(self.width)
        self.eoi = Learned(self.width)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        rows, columns = self.tower.config.grid
        return (rows // MERGE) * (columns // MERGE) + 2

    def project(self, states: list[Tensor]) -> Tensor:
        x = merge_neighbours(states[0][:, 1:], MERGE)
        count = len(x)
        cells = x.unflatten(-1, (MERGE**2, -1)).transpose(-1, -2).flatten(-2)  # channels first
        rows: Tensor = self.projector(self.conv(cells.flatten(0, 1)))
        return rows.view(count, -1, rows.shape[-1])

    def arrange(self, item: EncoderInput, rows: Tensor) -> Tensor:
        lazy_fusion.flush()
        parts = (self.boi.weight[None], rows.flatten(0, 1), self.eoi.weight[None])
        return torch.cat(parts) / self.scaling
