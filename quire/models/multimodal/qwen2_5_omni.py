"""Qwen2.5-Omni's thinker: the vision tower of Qwen2.5-VL, and Whisper's layers over windows.

What speaks (the talker, and what makes waves of its tokens) is not loaded: answers are text.

Source: model_type "qwen2_5_omni", https://huggingface.co/Qwen/Qwen2.5-Omni-7B; transformers
        modeling_qwen2_5_omni.py
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.models._whisper_encoder import ZERO_BIAS, EncoderSizes
from quire.models.multimodal import qwen2_5_vl
from quire.models.multimodal._base import EncoderInput, Hf, MediaEncoder, Weights, field_of
from quire.models.multimodal._omni3_audio import ChunkedAudioTower
from quire.models.multimodal._omni_audio import OmniAudioTower
from quire.models.multimodal._qwen_vision import MERGER_2_PATHS, VisionTower
from quire.models.multimodal.qwen2_audio import AUDIO


class Encoder(MediaEncoder):
    modalities: tuple[str, ...] = ("image", "video", "audio")
    weights = Weights(
        strip=("thinker.model.", "thinker.", "model."),
        paths={f"visual.{theirs}": f"vision.{ours}" for theirs, ours in MERGER_2_PATHS.items()}
        | {
            "audio_tower.ln_post": "audio.norm",
            "audio_tower.proj": "audio.projector",
            "visual": "vision",
            "audio_tower": "audio",
        },
        fuse={
            "gate_up_proj": ("gate_proj", "up_proj"),
            "qkv": ("q", "k", "v"),
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        },
        ignore=(
            "talker.*",
            "token2wav.*",
            "*audio_bos_eos_token.weight",
            "*audio_tower.positional_embedding*",
        ),
        zero_bias=ZERO_BIAS,
    )

    def __init__(self, vision: VisionTower, audio: OmniAudioTower | ChunkedAudioTower) -> None:
        super().__init__()
        self.vision, self.audio, self.width = vision, audio, vision.width

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        hf = thinker_of(hf)
        audio = AUDIO | field_of(hf, "audio_config", dict, default={})
        field_of(audio, "scale_embedding", bool, default=False, one_of={False})
        vision = qwen2_5_vl.Encoder.from_hf(hf)
        window = field_of(audio, "n_window", int, default=100)
        return cls(vision, OmniAudioTower(EncoderSizes.from_hf(audio), window, vision.width))

    def max_rows(self, modality: str) -> int:
        return self.audio.max_rows if modality == "audio" else self.vision.max_rows(modality)

    @property
    def slices(self) -> int:
        return self.vision.slices

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        self.vision.graphs = self.graphs
        seen = [one for one in items if one.modality != "audio"]
        return self._in_order(items, self.vision.encode(seen) if seen else [])

    def encode_in_slices(
        self, items: Sequence[EncoderInput]
    ) -> Generator[None, None, list[Tensor]]:
        """Recordings are encoded behind the last slice, whole."""
        seen = [one for one in items if one.modality != "audio"]
        rows: list[Tensor] = []
        if seen:
            rows = yield from self.vision.encode_in_slices(seen)
        for _ in range(0 if seen else self.slices):
            yield
        return self._in_order(items, rows)

    def _in_order(self, items: Sequence[EncoderInput], seen: Sequence[Tensor]) -> list[Tensor]:
        """Rows of all items; seen: those of images and videos, without their sounds."""
        heard = [one for one in items if "input_features" in one.tensors]
        frames, sounds = iter(seen), iter(self.hear(heard) if heard else [])
        found = []
        for one in items:
            parts = [next(frames)] if one.modality != "audio" else []
            if "input_features" in one.tensors:
                parts.append(next(sounds))
            rows = torch.cat(parts) if len(parts) > 1 else parts[0]
            found.append(rows[one.tensors["order"]] if "order" in one.tensors else rows)
        return found

    def hear(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """Rows of recordings."""
        return self.audio.encode(items)

    def graph_sizes(self) -> Sequence[int]:
        return self.vision.graph_sizes()

    def graph_inputs(self, size: int) -> tuple[int, Mapping[str, np.ndarray]]:
        return self.vision.graph_inputs(size)

    def graph_forward(self, size: int, patches: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        return self.vision.graph_forward(size, patches, arrays)


def thinker_of(hf: Hf) -> Hf:
    """The fields of the thinker, of a whole model or alone, with the text half of `hf`."""
    inner = field_of(hf, "thinker_config", dict, default={})
    return {**hf, **inner, "text_config": hf["text_config"]}
