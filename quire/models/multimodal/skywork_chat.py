"""Skywork-R1V: InternVL in the form of the hub, with InternViT-6B and a Qwen2 that reasons.

Source: model_type "skywork_chat", https://huggingface.co/Skywork/Skywork-R1V2-38B
"""

from __future__ import annotations

from quire.models.multimodal import internvl_chat

Encoder = internvl_chat.Encoder
