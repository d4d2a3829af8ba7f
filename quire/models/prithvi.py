"""Prithvi-EO: layers of the encoder half of a masked autoencoder for satellite images.

    x = x + attn(norm_1(x))      attention sees all patches of all frames
    x = x + mlp(norm_2(x))

There are no words: every token of a prompt has a row of quire.models.multimodal, which embeds a
class token and patches. The states after the last norm are the results.

Source: https://huggingface.co/ibm-nasa-geospatial/Prithvi-EO-2.0-300M, prithvi_mae.py
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.models._plain import PlainConfig, PlainDecoder, plain_sizes
from quire.models.base import Hf, ModelConfig, Weights

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "computed",
    "bidirectional": True,
    "states_are_results": True,
}


class NoWords(nn.Module):
    """Zeros in place of embeddings of words, which no prompt has."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.vector_dtype = torch.float32

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, E]."""
        return torch.zeros(len(ids), self.size, dtype=self.vector_dtype, device=ids.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PlainConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        return cls(**plain_sizes(hf, tied=False), bidirectional=True)


class Model(PlainDecoder):
    is_recordable = False  # zeros are made by torch
    weights = Weights(
        strip=("model.encoder.", "encoder."),
        rename={
            "blocks": "layers",
            "norm1": "norm_1",
            "norm2": "norm_2",
            "qkv": "qkv_proj",
            "proj": "out_proj",
            "fc1": "c_fc",
            "fc2": "c_proj",
        },
        ignore=("decoder.*", "decoder_*", "mask_token"),  # of the autoencoder's other half
    )

    def __init__(self, c: PlainConfig) -> None:
        super().__init__(c)
        self.embed_tokens = NoWords(c.hidden)  # type: ignore[assignment]

    def prepare(self, dtype: torch.dtype, device: torch.device) -> None:
        super().prepare(dtype, device)
        cast(NoWords, self.embed_tokens).vector_dtype = dtype

    def set_head(self, c: ModelConfig, names: Collection[str]) -> None:
        if c.head != "none":
            raise ConfigError("this model encodes images: it has no labels; leave convert out")
        del self.lm_head
