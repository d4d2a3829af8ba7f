"""Qwen3.5 with experts: the vision tower of Qwen3.5.

Source: model_type "qwen3_5_moe", https://huggingface.co/Qwen/Qwen3.5-35B-A3B
"""

from __future__ import annotations

from quire.models.multimodal import qwen3_5

Encoder = qwen3_5.Encoder
