"""DeepSeek-V3 and R1: V2 with experts chosen by corrected sigmoid scores, group by group.

The layers after the last, which predict further tokens (MTP), are left in the checkpoint.

Source: model_type "deepseek_v3", https://huggingface.co/deepseek-ai/DeepSeek-V3; arXiv 2412.19437;
        transformers modeling_deepseek_v3.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models import deepseek_v2
from quire.models._experts import routed_sizes, sigmoid_routing
from quire.models.base import Hf, field_of

CONVENTIONS = {
    "defaults": {
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(deepseek_v2.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        return cls(
            **deepseek_v2.shared_fields(hf),
            interleaved=field_of(hf, "rope_interleave", bool, default=True),
            moe=routed_sizes(hf, sigmoid_routing(hf), correction=True),
            spare_layers=field_of(hf, "num_nextn_predict_layers", int, default=0),
        )


Model = deepseek_v2.Model
