"""Qwen3-VL-MoE, its text half: Qwen3-MoE with weights of experts that always add up to one.

Rotary positions have three axes, as those of all of Qwen's multimodal models. The checkpoint
has one tensor for all experts of a layer, with the axes in the opposite order.

Source: model_type "qwen3_vl_moe_text", https://huggingface.co/Qwen/Qwen3-VL-30B-A3B-Instruct;
        transformers modeling_qwen3_vl_moe.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.models import qwen3_moe
from quire.models.base import Hf

CONVENTIONS = {"windows_on_request": True, "defaults": {"mrope_interleaved": True}}
Model = qwen3_moe.Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen3_moe.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> qwen3_moe.Config:
        made = qwen3_moe.Config.from_hf(hf)
        return replace(made, moe=replace(made.moe, renormalise=True), turned_experts=True)
