"""Molmo: CLIP-L on overlapping crops of an image and on the whole. Attention over 2 x 2 patches
whose query is their mean makes a row, and a gated MLP projects it.

States of two layers are joined. Patches outside of the image get a learned vector, those that are
partly outside another; as checkpoints were trained, the crop behind decides about a crop's patches,
and those of the last one count as partly outside. Rows are added to the embedding of <im_patch>.

Source: model_type "molmo", https://huggingface.co/allenai/Molmo-7B-D-0924 and MolmoE-1B-0924;
        arXiv 2409.17146
Axes:   N the whole image and the crops, P patches of one, S squares of 2 x 2 patches, E hidden size
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import GatedActivation, Linear, PatchLinear
from quire.layers.linear import OutputGroup
from quire.models.molmo import IMAGE_PATCH, mlp_width, vocabulary_rows
from quire.models.multimodal._base import EncoderInput, Hf, Weights, field_of
from quire.models.multimodal._towers import (
    ImageEncoder,
    chosen_states,
    merge_neighbours,
    text_hidden,
)
from quire.models.multimodal._vit import Learned, Vit, VitConfig, vit_sizes

STATES = (-2, -9)
MERGE = 2
MOST_CROPS = 36
AT = "model.vision_backbone"
SIZES = {
    "hidden_size": ("image_emb_dim", 1024),
    "num_hidden_layers": ("image_num_layers", 23),
    "num_attention_heads": ("image_num_heads", 16),
    "intermediate_size": ("image_mlp_dim", 4096),
    "patch_size": ("image_patch_size", 14),
    "layer_norm_eps": ("image_norm_eps", 1e-5),
    "hidden_act": ("image_mlp_activations", "quick_gelu"),
    "image_size": ("image_default_input_size", (336, 336)),
}
"""Usual names -> those of `vision_backbone`, and the values that checkpoints do not state."""


SERVED: Mapping[str, Sequence[Any]] = {
    "vit_layers": ([*STATES],),
    "image_pooling_2d": ("attention-meanq", "attention_meanq"),
    "image_padding_embed": ("pad_and_partial_pad",),
    "image_projector": ("mlp",),
    "use_cls_feature": (False,),
}
"""Fields of MolmoE's config.json, and what they may be; others do not state them."""


class FlatPatches(PatchLinear):
    """A checkpoint has flat patches, channels last."""

    def fused_shape(self, param: str) -> tuple[int, ...]:
        return (self.outputs[0].rows, self.inputs)

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[Tensor]:
        channels, *sides = self.kernel
        turned = tensor.view(-1, *sides, channels).permute(0, 3, 1, 2)
        return super().split_fused(param, turned.reshape(len(tensor), -1))


class SquarePooling(nn.Module):
    """Attention from the mean of the patches of a square to each of them."""

    def __init__(self, c: VitConfig) -> None:
        super().__init__()
        inputs = len(STATES) * c.hidden
        self.heads = c.heads
        self.q_proj = Linear(inputs, c.hidden, bias=True)
        halves = OutputGroup(c.hidden), OutputGroup(c.hidden)
        self.kv_proj = Linear(inputs, halves, bias=True)
        self.o_proj = Linear(c.hidden, c.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [S, 4, I] -> [S, hidden of the tower]."""
        count = len(x)
        q = self.q_proj(x.mean(1))
        kv = self.kv_proj(x.flatten(0, 1))
        lazy_fusion.flush()
        q = q.view(count, 1, self.heads, -1).transpose(1, 2)
        k, v = kv.view(count, MERGE**2, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
        return self.o_proj(found.to(x.dtype).reshape(count, -1))


class RowProjector(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, inputs: int, mlp: int, outputs: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(inputs, (OutputGroup(mlp), OutputGroup(mlp)))
        self.act = GatedActivation("silu")
        self.down_proj = Linear(mlp, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class Encoder(ImageEncoder):
    """An item has two tensors more

    pads     uint8 [N, P]: of each patch 0, or 1: outside of the image, or 2: partly
    order    int32 [n]: for each row of the item, its square among those of all its crops
    """

    weights = Weights(
        strip=("model.",),
        paths={
            "vision_backbone.image_vit.patch_embedding": "tower.embeddings.patch_embedding",
            "vision_backbone.image_vit.pre_ln": "tower.pre_layrnorm",
            "vision_backbone.image_vit.transformer.resblocks": "tower.layers",
            "vision_backbone.image_pooling_2d.wo": "pooling.o_proj",
            "vision_backbone.image_pooling_2d.wq": "pooling.q_proj",
            "vision_backbone.image_pooling_2d": "pooling",
            "vision_backbone.image_projector.w2": "projector.down_proj",
            "vision_backbone.image_projector": "projector",
            "attention.wo": "self_attn.out_proj",
            "attention": "self_attn",
            "attention_norm": "layer_norm1",
            "ffn_norm": "layer_norm2",
            "feed_forward.w1": "mlp.fc1",
            "feed_forward.w2": "mlp.fc2",
        },
        alias={
            f"{AT}.image_vit.class_embedding": "tower.embeddings.class_token.weight",
            f"{AT}.image_vit.positional_embedding": "tower.embeddings.position_embedding.weight",
            f"{AT}.pad_embed": "pad_embed.weight",
        },
        fuse={
            "qkv_proj": ("wq", "wk", "wv"),
            "pooling.kv_proj": ("wk", "wv"),
            "gate_up_proj": ("w1", "w3"),
        },
    )

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        for name, served in SERVED.items():
            field_of(hf, name, type(served[0]), default=served[0], one_of=served)
        self.added_token = vocabulary_rows(hf["text_config"]) + IMAGE_PATCH
        stated = hf.get("vision_backbone") or {}
        sizes = {ours: stated.get(theirs, usual) for ours, (theirs, usual) in SIZES.items()}
        config = VitConfig(**vit_sizes(sizes), class_token=True, patch_bias=False, first_norm=True)
        self.tower = Vit(config, STATES)
        kernel = (config.patch, config.patch)
        self.tower.embeddings.patch_embedding = FlatPatches(config.channels, kernel, config.hidden)
        self.width = text_hidden(hf)
        self.pooling = SquarePooling(config)
        self.projector = RowProjector(config.hidden, mlp_width(hf["text_config"]), self.width)
        self.pad_embed = Learned(2, len(STATES) * config.hidden)
        absent = tuple(f"tower.{name}" for name in self.tower.unused())
        self.weights = replace(self.weights, absent=absent)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        side = -(-self.tower.config.grid[0] // MERGE)
        return (MOST_CROPS + 1) * side**2

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        x = chosen_states(self.states(items), 1)  # [N, P, I]
        pads = torch.cat([one.tensors["pads"] for one in items]).long()
        marks = self.pad_embed.weight
        x = x + torch.cat((torch.zeros_like(marks[:1]), marks))[pads]
        rows = self.project([x])
        lazy_fusion.flush()
        counts = [len(one.tensors["pixels"]) for one in items]
        return [
            own.flatten(0, 1)[one.tensors["order"].long()]
            for one, own in zip(items, torch.split(rows, counts), strict=True)
        ]

    def project(self, states: list[Tensor]) -> Tensor:
        """States of patches [N, P, I] -> rows of their squares [N, S, E]."""
        (x,) = states
        side = self.tower.config.grid[0]
        missing = side % MERGE
        cells = F.pad(x.view(len(x), side, side, -1), (0, 0, 0, missing, 0, missing))
        squares = merge_neighbours(cells.flatten(1, 2), MERGE)
        rows: Tensor = self.projector(self.pooling(squares.view(-1, MERGE**2, x.shape[-1])))
        return rows.view(len(x), -1, self.width)
