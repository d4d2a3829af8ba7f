"""Gemma 3: states of SigLIP, averaged over squares, normed, through one matrix.

Tokens of an image see each other in both directions.

Source: model_type "gemma3", https://huggingface.co/google/gemma-3-4b-it; transformers
modeling_gemma3.py
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers import Linear, RMSNorm
from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._towers import (
    ImageEncoder,
    build_siglip,
    merge_neighbours,
    text_hidden,
    tower_weights,
)

MAX_IMAGES = 5
"""Of an item: the image, and the crops of pan-and-scan."""


class PooledProjector(nn.Module):
    """[N, n, C] -> [N * rows, E]; `factor`: the side of the squares that are averaged."""

    def __init__(self, inputs: int, outputs: int, eps: float, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.mm_soft_emb_norm = RMSNorm(inputs, eps, offset=1.0)
        self.linear = Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        cells = merge_neighbours(x, self.factor).unflatten(2, (self.factor**2, -1))
        pooled = cells.float().mean(2).to(x.dtype)
        return self.linear(self.mm_soft_emb_norm(pooled.flatten(0, 1)))


class Encoder(ImageEncoder):
    has_graphs = True
    bidirectional = True

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        self.tower = build_siglip(hf.get("vision_config") or {})
        self.width = text_hidden(hf)
        rows = field_of(hf, "mm_tokens_per_image", int, default=256)
        side, tokens = math.isqrt(self.tower.tokens), math.isqrt(rows)
        if tokens < 1 or tokens**2 != rows or side % tokens:
            raise ConfigError(
                f"config.json: mm_tokens_per_image is {rows}; its square root must divide the "
                f"{side} patches of a side"
            )
        c = self.tower.config
        self.projector = PooledProjector(c.hidden, self.width, c.eps, side // tokens)
        self.rows = rows
        matrix = "multi_modal_projector.mm_input_projection_weight"
        weights = tower_weights(self.tower, alias={matrix: "projector.linear.weight"})
        self.weights = replace(weights, transpose=("linear",))

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return self.rows * MAX_IMAGES

    def project(self, states: list[Tensor]) -> Tensor:
        return self.projector(states[0]).view(-1, self.rows, self.width)
