"""Voxtral: Whisper's encoder over each 30 s of a recording, and an MLP over four positions at once.

Source: model_type "voxtral", https://huggingface.co/mistralai/Voxtral-Mini-3B-2507; transformers
        modeling_voxtral.py
Axes:   C pieces of 30 s, M mel bins, E hidden size of the text model
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import ACTIVATION_KINDS
from quire.models._whisper_encoder import ZERO_BIAS, EncoderSizes, WhisperEncoder
from quire.models.multimodal._base import EncoderInput, Hf, MediaEncoder, Weights, field_of
from quire.models.multimodal._towers import MLPProjector
from quire.models.multimodal._vit import Packing

AUDIO = {
    "num_mel_bins": 128,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "intermediate_size": 5120,
    "hidden_size": 1280,
    "max_source_positions": 1500,
}
"""What an audio section leaves out."""
NAMES = {
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
    "d_model": "hidden_size",
}
"""Whisper's names of fields -> those of an audio section."""
MAX_PIECES = 20
"""Of a recording: ten minutes."""


class Encoder(MediaEncoder):
    modalities: tuple[str, ...] = ("audio",)

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        audio = {**AUDIO, **(hf.get("audio_config") or {})}
        sizes = EncoderSizes.from_hf({**audio, **{ours: audio[it] for ours, it in NAMES.items()}})
        if sizes.mlp % sizes.hidden or sizes.positions * sizes.hidden % sizes.mlp:
            raise ConfigError(
                f"config.json: audio_config.intermediate_size is {sizes.mlp}; it must be a "
                f"multiple of hidden_size, {sizes.hidden}, that divides max_source_positions"
            )
        self.joined = sizes.mlp // sizes.hidden  # positions that make a row
        self.positions = sizes.positions
        self.width = field_of(hf["text_config"], "hidden_size", int)
        act = field_of(hf, "projector_hidden_act", str, default="gelu", one_of=ACTIVATION_KINDS)
        self.tower = WhisperEncoder(sizes)
        self.projector = MLPProjector(sizes.mlp, self.width, self.width, act, bias=False)
        self.weights = Weights(
            strip=("model.",),
            paths={"audio_tower": "tower", "multi_modal_projector": "projector"},
            rename={"layer_norm": "norm"},
            fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
            zero_bias=ZERO_BIAS,
        )

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return MAX_PIECES * self.positions // self.joined

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """input_features [C, M, frames]."""
        pieces = [piece for item in items for piece in item.tensors["input_features"]]
        x = self.tower.embed(pieces)
        x = self.tower.run(x, Packing.of([self.positions] * len(pieces), x.device))
        hidden = self.tower.norm(x, None)[0]
        lazy_fusion.flush()
        rows = self.projector(hidden.view(-1, self.joined * hidden.shape[1]))
        lazy_fusion.flush()
        per_piece = self.positions // self.joined
        return list(rows.split([len(one.tensors["input_features"]) * per_piece for one in items]))
