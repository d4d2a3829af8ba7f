"""Qwen3.5: the vision tower of Qwen3-VL without DeepStack.

Source: model_type "qwen3_5", https://huggingface.co/Qwen/Qwen3.5-27B; transformers
        modeling_qwen3_5.py
"""

from __future__ import annotations

from typing import ClassVar

from quire.models.multimodal import qwen3_vl


class Encoder(qwen3_vl.Encoder):
    default_levels: ClassVar[tuple[int, ...]] = ()
