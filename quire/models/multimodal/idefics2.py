"""Idefics 2: SigLIP over images of any size, and a perceiver that makes 64 rows of each.

    x = mlp(states);  latents += attn(norm(latents), [norm(x), norm(latents)]);  latents += mlp(...)

Source: model_type "idefics2", https://huggingface.co/HuggingFaceM4/idefics2-8b; transformers
        modeling_idefics2.py
Axes:   P patches of all images, N images, Q latents of one, H heads, K KV heads, D head size
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import ColumnLinear, GatedActivation, Linear, RMSNorm
from quire.models.multimodal._base import (
    EncoderInput,
    Hf,
    MediaEncoder,
    field_of,
    normalized_patches,
)
from quire.models.multimodal._packed_vit import PackedVit, packed_weights
from quire.models.multimodal._towers import activation_of, text_hidden
from quire.models.multimodal._vit import Learned

VISION = {"patch_size": 32, "image_size": 224}
"""What a vision section leaves out."""
PERCEIVER: dict[str, Any] = {
    "hidden_act": "silu",
    "resampler_n_latents": 64,
    "resampler_depth": 3,
    "resampler_n_heads": 16,
    "resampler_head_dim": 96,
    "num_key_value_heads": 4,
}
"""What a perceiver section leaves out."""
PARTS = 5
"""Images that one is read as, if it is split: its quarters and itself."""


class ProjectingMLP(nn.Module):
    """down(act(gate(x)) * up(x)), of another width than x."""

    def __init__(self, inputs: int, mlp: int, outputs: int, act: str) -> None:
        super().__init__()
        self.gate_up_proj = ColumnLinear(inputs, (mlp, mlp), bias=False)
        self.act = GatedActivation(act)
        self.down_proj = Linear(mlp, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class PerceiverAttention(nn.Module):
    def __init__(self, hf: Hf, hidden: int) -> None:
        super().__init__()
        self.heads = field_of(hf, "resampler_n_heads", int)
        self.kv_heads = field_of(hf, "num_key_value_heads", int)
        self.size = field_of(hf, "resampler_head_dim", int)
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ConfigError(
                f"config.json: num_key_value_heads of the perceiver is {self.kv_heads}; it must "
                f"divide resampler_n_heads, {self.heads}"
            )
        self.query = Linear(hidden, self.heads * self.size)
        self.key = Linear(hidden, self.kv_heads * self.size)
        self.value = Linear(hidden, self.kv_heads * self.size)
        self.o_proj = Linear(self.heads * self.size, hidden)

    def forward(self, latents: Tensor, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """latents [N * Q, E] attend to themselves and to the states [P, E] of their image."""
        count = len(lengths)
        q = self.query(latents)
        own = self.key(latents), self.value(latents)
        given = self.key(x), self.value(x)
        lazy_fusion.flush()
        k, v = (
            pad_sequence(
                [torch.cat(pair) for pair in zip(mine.chunk(count), one.split(lengths))],
                batch_first=True,
            )
            .view(count, -1, self.kv_heads, self.size)
            .repeat_interleave(self.heads // self.kv_heads, dim=2)
            .transpose(1, 2)
            for mine, one in zip(own, given, strict=True)
        )  # [N, H, Q + n, D], the latents first
        queries = len(latents) // count
        counts = torch.tensor(lengths, device=x.device) + queries
        seen = torch.arange(queries + max(lengths), device=x.device) < counts[:, None]
        q = q.view(count, queries, self.heads, self.size).transpose(1, 2)
        found = scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])
        return self.o_proj(found.transpose(1, 2).reshape(len(latents), -1))


class PerceiverLayer(nn.Module):
    def __init__(self, hf: Hf, hidden: int, eps: float) -> None:
        super().__init__()
        self.input_latents_norm = RMSNorm(hidden, eps)
        self.input_context_norm = RMSNorm(hidden, eps)
        self.self_attn = PerceiverAttention(hf, hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = ProjectingMLP(hidden, 4 * hidden, hidden, activation_of(hf, "hidden_act"))

    def forward(self, latents: Tensor, x: Tensor, lengths: Sequence[int]) -> Tensor:
        normed = self.input_latents_norm(latents)
        more = self.self_attn(normed, self.input_context_norm(x), lengths)
        lazy_fusion.flush()
        latents = latents + more
        more = self.mlp(self.post_attention_layernorm(latents))
        lazy_fusion.flush()
        return latents + more


class Perceiver(nn.Module):
    def __init__(self, hf: Hf, hidden: int, eps: float) -> None:
        super().__init__()
        self.latents = Learned(field_of(hf, "resampler_n_latents", int), hidden)
        self.layers = nn.ModuleList(
            PerceiverLayer(hf, hidden, eps) for _ in range(field_of(hf, "resampler_depth", int))
        )
        self.norm = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """States [P, E] of images -> [N * Q, E]."""
        latents = self.latents.weight.repeat(len(lengths), 1)
        for layer in self.layers:
            latents = layer(latents, x, lengths)
        return self.norm(latents)


def perceiver_names(layers: int) -> dict[str, str]:
    """Names in checkpoints -> ours, of what has another name."""
    outer = "connector.perceiver_resampler"
    names = {f"{outer}.latents": "perceiver.latents.weight"}
    for i in range(layers):
        for theirs, ours in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
            one = f"layers.{i}.self_attn"
            names[f"{outer}.{one}.{theirs}.weight"] = f"perceiver.{one}.{ours}.weight"
    return names


class Encoder(MediaEncoder):
    modalities: tuple[str, ...] = ("image",)

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        text, self.width = hf["text_config"], text_hidden(hf)
        given = {**(hf.get("perceiver_config") or {})}
        eps = field_of(given, "rms_norm_eps", float, default=1e-6)
        if given.get("hidden_size", 4096) != self.width:  # the class of transformers does so
            eps = field_of(text, "rms_norm_eps", float, default=1e-5)
        self.tower = PackedVit.of({**VISION, **(hf.get("vision_config") or {})})
        self.projection = ProjectingMLP(
            self.tower.config.hidden,
            field_of(text, "intermediate_size", int, default=14336),
            self.width,
            activation_of(text, "hidden_act", "silu"),
        )
        self.perceiver = Perceiver({**PERCEIVER, **given}, self.width, eps)
        self.rows = len(self.perceiver.latents.weight)
        most = self.tower.config.grid
        self.patches_per_row = -(-most[0] * most[1] // self.rows)
        self.weights = packed_weights(
            {
                "connector.modality_projection": "projection",
                "connector.perceiver_resampler": "perceiver",
            },
            alias=perceiver_names(len(self.perceiver.layers)),
        )

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return PARTS * self.rows

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """pixels0, pixels1, ... uint8 [1, H, W, C] of the parts, scale_shift float32 [2, C]."""
        dtype, patch = self.perceiver.latents.weight.dtype, self.tower.config.patch
        counts = [sum(name.startswith("pixels") for name in one.tensors) for one in items]
        cut, grids = [], []
        for one, count in zip(items, counts, strict=True):
            for i in range(count):
                pixels = one.tensors[f"pixels{i}"]
                cut.append(normalized_patches(pixels, one.tensors["scale_shift"], patch, dtype))
                grids.append((pixels.shape[1] // patch, pixels.shape[2] // patch))
        states = self.projection(self.tower(torch.cat(cut), grids))
        rows = self.perceiver(states, [down * across for down, across in grids])
        lazy_fusion.flush()
        return list(rows.split([count * self.rows for count in counts]))
