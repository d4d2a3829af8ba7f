"""LLaVA-NeXT: tiles of an image of any resolution, without their padding. A learned vector ends
each row of patches.

Source: model_type "llava_next", https://huggingface.co/llava-hf/llava-v1.6-mistral-7b-hf;
transformers modeling_llava_next.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.kernels.framework import lazy_fusion
from quire.models.multimodal import llava
from quire.models.multimodal._base import EncoderInput, Hf
from quire.models.multimodal._towers import text_hidden, tower_weights
from quire.models.multimodal._vit import Learned

PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
"""Sizes (height, width) of tiled images, if config.json states none."""


class Encoder(llava.Encoder):
    """An item has one tensor more

    order    int32 [n]: for each row of the item, its row among those of all its tiles; the number
             after these is the vector at the end of a line. Or [n, k], with
    weights  float32 [n, k]: such a row is the weighted sum of k of these
    """

    pinpoints: ClassVar[Sequence[Sequence[int]]] = PINPOINTS

    def __init__(self, hf: Hf) -> None:
        super().__init__(hf)
        self.image_newline = Learned(text_hidden(hf))
        self.weights = tower_weights(self.tower, alias={"image_newline": "image_newline.weight"})
        points: Any = hf.get("image_grid_pinpoints") or self.pinpoints
        self.largest = max(int(height) * int(width) for height, width in points)

    def max_rows(self, modality: str) -> int:
        side, grid = self.tower.config.image[0], self.tower.config.grid[0]
        tiles = self.largest // side**2
        return (tiles + 1) * self.tower.tokens + grid * tiles

    def arrange(self, item: EncoderInput, rows: Tensor) -> Tensor:
        lazy_fusion.flush()
        table = torch.cat((rows.flatten(0, 1), self.image_newline.weight[None]))
        found = table[item.tensors["order"].long()]
        if (weights := item.tensors.get("weights")) is None:
            return found
        return (found * weights[..., None]).sum(1).to(rows.dtype)
