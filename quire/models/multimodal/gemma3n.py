"""Gemma 3n: MobileNet-v5 for images, a Conformer for recordings, and their own tables of tokens.

The last row of an item is that of the token at its end, whose vector is in the table of the
modality and not in that of the text. A recording has as many rows whatever its length: those that
are left have the vector of the table's last token.

Source: model_type "gemma3n", https://huggingface.co/google/gemma-3n-E4B-it; transformers
        modeling_gemma3n.py
Axes:   n rows of an item, S width of a tower, E hidden size of the text model, B mel bins, F frames
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import Linear, RMSNorm, UnitRMSNorm
from quire.models.base import run_to_end
from quire.models.multimodal._base import EncoderInput, Hf, MediaEncoder, Weights, field_of
from quire.models.multimodal._gemma3n_audio import SpeechConformer
from quire.models.multimodal._mobilenet_v5 import MobileNetV5, layout_of
from quire.models.multimodal._towers import text_hidden
from quire.models.multimodal._vit import Learned

TEXT_VOCAB = 262_144
"""Token ids below have vectors in the table of the text model."""
IMAGES_AT_ONCE = 4
MAYBE_CLIPPED = ("ffw_layer_1", "ffw_layer_2", "linear_start", "linear_end")
"""Layers whose class has a matrix inside, as Gemma 4's."""


class ModalityEmbedder(nn.Module):
    """Rows of the text model: of what a tower returns, and of tokens of a table."""

    def __init__(self, hf: Hf, width: int, first: int, inputs: int) -> None:
        """hf: of the modality. first: the usual id of its first token. inputs: S."""
        super().__init__()
        self.first = field_of(hf, "vocab_offset", int, default=first)
        eps = field_of(hf, "rms_norm_eps", float, default=1e-6)
        self.embedding = Learned(field_of(hf, "vocab_size", int, default=128), inputs)
        self.hard_embedding_norm, self.soft_embedding_norm = (RMSNorm(inputs, eps) for _ in "ab")
        self.embedding_projection = Linear(inputs, width)
        self.embedding_post_projection_norm = UnitRMSNorm(width, eps)

    def forward(self, states: Tensor) -> Tensor:
        """[n, S] -> [n, E]."""
        return self._project(self.soft_embedding_norm(states))

    def token(self, token_id: int) -> Tensor:
        """The vector of a token: [1, E]."""
        at = token_id - self.first
        return self._project(self.hard_embedding_norm(self.embedding.weight[at : at + 1]))

    def check(self, token_id: int, name: str) -> None:
        """Raise ConfigError if a token is not in the table."""
        if not 0 <= token_id - self.first < self.embedding.shape[0]:
            raise ConfigError(
                f"config.json: {name} is {token_id}; it must be in the table of its modality, "
                f"{self.first} to {self.first + self.embedding.shape[0] - 1}"
            )

    def _project(self, x: Tensor) -> Tensor:
        y: Tensor = self.embedding_post_projection_norm(self.embedding_projection(x))
        lazy_fusion.flush()
        return y


class Encoder(MediaEncoder):
    """An item has the tensors pixels [1, H, W, 3] and scale_shift [2, 3], or features [F, B]."""

    modalities: tuple[str, ...] = ("image", "audio")
    patches_per_row = 1
    weights = Weights(
        strip=("model.",),
        paths={
            "vision_tower.timm_model": "images",
            "embed_vision": "image_rows",
            "audio_tower": "audio",
            "embed_audio": "audio_rows",
            "attn.relative_position_embedding.pos_proj": "attn.pos_proj",
            **{name: f"{name}.linear" for name in MAYBE_CLIPPED},
        },
    )

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        vision, audio = (
            field_of(hf, f"{name}_config", dict, default={}) for name in ("vision", "audio")
        )
        self.width = text_hidden(hf)
        self.rows = {
            "image": field_of(hf, "vision_soft_tokens_per_image", int, default=256),
            "audio": field_of(hf, "audio_soft_tokens_per_image", int, default=188),
        }
        side, states = (
            math.isqrt(self.rows["image"]),
            field_of(vision, "hidden_size", int, default=2048),
        )
        if side**2 != self.rows["image"]:
            raise ConfigError(
                f"config.json: vision_soft_tokens_per_image is {self.rows['image']}; it must be a "
                "square"
            )
        name = field_of(vision, "architecture", str, default="mobilenetv5_300m_enc")
        field_of(vision, "do_pooling", bool, default=False, one_of={False})
        self.images = MobileNetV5(layout_of(name), states, side)
        self.image_rows = ModalityEmbedder(vision, self.width, TEXT_VOCAB, states)
        self.audio = SpeechConformer(audio)
        heard = self.audio.config.hidden
        self.audio_rows = ModalityEmbedder(audio, self.width, TEXT_VOCAB + 128, heard)
        self.image_end = field_of(hf, "eoi_token_id", int, default=TEXT_VOCAB)
        self.audio_end = field_of(hf, "eoa_token_id", int, default=TEXT_VOCAB + 128)
        self.silence = field_of(hf["text_config"], "vocab_size", int) - 1
        self.image_rows.check(self.image_end, "eoi_token_id")
        self.audio_rows.check(self.audio_end, "eoa_token_id")
        self.audio_rows.check(self.silence, "vocab_size - 1")

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return self.rows[modality] + 1

    @property
    def slices(self) -> int:
        return self.images.slices

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        return run_to_end(self.encode_in_slices(items))

    def encode_in_slices(
        self, items: Sequence[EncoderInput]
    ) -> Generator[None, None, list[Tensor]]:
        """It stops between blocks of the tower of images; recordings are encoded before, whole."""
        found: dict[int, Tensor] = {}
        seen = [i for i, one in enumerate(items) if one.modality != "audio"]
        for i, one in enumerate(items):
            if one.modality == "audio":
                found[i] = self._hear(one.tensors["features"])
        for _ in range(0 if seen else self.slices):
            yield
        for at in range(0, len(seen), IMAGES_AT_ONCE):
            some = seen[at : at + IMAGES_AT_ONCE]
            rows = yield from self._see([items[i] for i in some])
            found |= zip(some, rows, strict=True)
        return [found[i] for i in range(len(items))]

    def _see(self, items: Sequence[EncoderInput]) -> Generator[None, None, list[Tensor]]:
        dtype = self.image_rows.embedding.weight.dtype
        lazy_fusion.flush()
        images = [self._normalized(one).to(dtype) for one in items]
        states = yield from self.images.in_slices(torch.cat(images))  # [N, n, S]
        lazy_fusion.flush()
        scaled = states * states.shape[-1] ** 0.5
        rows = self.image_rows(scaled.flatten(0, 1)).view(len(items), -1, self.width)
        end = self.image_rows.token(self.image_end)
        return [torch.cat((one, end)) for one in rows]

    def _normalized(self, item: EncoderInput) -> Tensor:
        scale, shift = item.tensors["scale_shift"]
        return item.tensors["pixels"] * scale + shift

    def _hear(self, features: Tensor) -> Tensor:
        rows = self.audio_rows(self.audio(features))[: self.rows["audio"]]
        silence, end = (self.audio_rows.token(one) for one in (self.silence, self.audio_end))
        missing = self.rows["audio"] - len(rows)
        return torch.cat((rows, silence.expand(missing, -1), end))
