"""Qwen2-Audio: Whisper's encoder over the frames of a recording, pooled by two, and a projection.

Source: model_type "qwen2_audio", https://huggingface.co/Qwen/Qwen2-Audio-7B-Instruct; transformers
        modeling_qwen2_audio.py
Axes:   M mel bins, L frames of a recording, n positions (L / 2), E hidden size of the text model
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.framework import lazy_fusion
from quire.layers import Linear
from quire.models._whisper_encoder import ZERO_BIAS, EncoderSizes, WhisperEncoder
from quire.models.multimodal._base import EncoderInput, Hf, MediaEncoder, Weights, field_of
from quire.models.multimodal._vit import Packing

AUDIO = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "max_source_positions": 1500,
}
"""What an audio section leaves out."""


class Encoder(MediaEncoder):
    modalities: tuple[str, ...] = ("audio",)

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        sizes = EncoderSizes.from_hf({**AUDIO, **(hf.get("audio_config") or {})})
        self.positions = sizes.positions
        self.width = field_of(hf["text_config"], "hidden_size", int)
        self.tower = WhisperEncoder(sizes)
        self.projector = Linear(sizes.hidden, self.width, bias=True)
        self.weights = Weights(
            strip=("model.",),
            paths={"audio_tower": "tower", "multi_modal_projector.linear": "projector"},
            rename={"layer_norm": "norm"},
            fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
            zero_bias=ZERO_BIAS,
        )

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return self.positions // 2

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """input_features [M, frames], feature_attention_mask [L]: ones of the frames of audio."""
        features = [item.tensors["input_features"] for item in items]
        frames = [len(item.tensors["feature_attention_mask"]) for item in items]
        lengths = [(count - 1) // 2 + 1 for count in frames]
        x = self.tower.embed(features, lengths)
        x = self.tower.run(x, Packing.of(lengths, x.device))
        lazy_fusion.flush()
        pairs = [one[: len(one) // 2 * 2].unflatten(0, (-1, 2)) for one in x.split(lengths)]
        pooled = torch.cat([one.mean(1) for one in pairs])
        rows = self.projector(self.tower.norm(pooled, None)[0])
        lazy_fusion.flush()
        return list(rows.split([length // 2 for length in lengths]))
