"""Qwen3-Omni's thinker: the vision tower of Qwen3-VL, and an audio tower over chunks.

Rows of recordings are not added after the first layers, as those of images are: the further levels
of DeepStack are zero there. What speaks (the talker, and what makes waves of its tokens) is not
loaded: answers are text.

Source: model_type "qwen3_omni_moe", https://huggingface.co/Qwen/Qwen3-Omni-30B-A3B-Instruct;
        transformers modeling_qwen3_omni_moe.py
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from quire.models._whisper_encoder import EncoderSizes
from quire.models.multimodal import qwen2_5_omni, qwen3_vl
from quire.models.multimodal._base import EncoderInput, Hf, Weights, field_of
from quire.models.multimodal._omni3_audio import ChunkedAudioTower
from quire.models.multimodal.qwen2_audio import AUDIO


class Encoder(qwen2_5_omni.Encoder):
    weights = Weights(
        strip=("thinker.model.", "thinker.", "model."),
        paths={
            "mlp.0": "fc1",
            "mlp.2": "fc2",
            "ln_q": "norm",
            "merger_list": "deepstack",
            "visual.patch_embed.proj": "vision.patch_embed",
            "visual": "vision",
            "audio_tower": "audio",
        },
        rename={"mlp.linear_fc1": "c_fc", "mlp.linear_fc2": "c_proj"},
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        ignore=("talker.*", "code2wav.*"),
    )

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        hf = qwen2_5_omni.thinker_of(hf)
        audio = AUDIO | field_of(hf, "audio_config", dict, default={})
        field_of(audio, "scale_embedding", bool, default=False, one_of={False})
        vision = qwen3_vl.Encoder.from_hf(hf)
        tower = ChunkedAudioTower(EncoderSizes.from_hf(audio), audio, vision.config.outputs)
        return cls(vision, tower)

    def hear(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        rows = super().hear(items)
        return [functional.pad(one, (0, self.width - one.shape[1])) for one in rows]
