"""Qwen3-VL-MoE: the vision tower of Qwen3-VL, beside a text model with experts.

Source: model_type "qwen3_vl_moe", https://huggingface.co/Qwen/Qwen3-VL-30B-A3B-Instruct
"""

from __future__ import annotations

from quire.models.multimodal import qwen3_vl

Encoder = qwen3_vl.Encoder
