"""Qwen3-Omni's thinker in a checkpoint of its own.

Source: model_type "qwen3_omni_moe_thinker"; transformers modeling_qwen3_omni_moe.py
"""

from __future__ import annotations

from quire.models.multimodal import qwen3_omni_moe

Encoder = qwen3_omni_moe.Encoder
