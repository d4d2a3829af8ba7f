"""Qwen2.5-Omni's thinker in a checkpoint of its own.

Source: model_type "qwen2_5_omni_thinker"; transformers modeling_qwen2_5_omni.py
"""

from __future__ import annotations

from quire.models.multimodal import qwen2_5_omni

Encoder = qwen2_5_omni.Encoder
