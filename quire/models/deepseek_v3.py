"""DeepSeek-V3 and R1: V2 with experts chosen by corrected sigmoid scores, group by group.

The layers after the last, which predict further tokens (MTP), are left in the checkpoint.

Source: model_type "deepseek_v3", https://huggingface.co/deepseek-ai/DeepSeek-V3; arXiv 2412.19437;
        transformers modeling_deepseek_v3.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.layers import RoutingMethod
from quire.models import deepseek_v2
from quire.models.base import Hf, field_of

CONVENTIONS = {"defaults": {"n_shared_experts": 1, "first_k_dense_replace": 3}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(deepseek_v2.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        return cls(
            **deepseek_v2.shared_fields(hf),
            interleaved=field_of(hf, "rope_interleave", bool, default=True),
            routing=_routing(hf),
            correction=True,
            spare_layers=field_of(hf, "num_nextn_predict_layers", int, default=0),
        )


def _routing(hf: Hf) -> RoutingMethod:
    field_of(hf, "scoring_func", str, default="sigmoid", one_of=("sigmoid",))
    field_of(hf, "topk_method", str, default="noaux_tc", one_of=("noaux_tc",))
    routing = RoutingMethod(
        field_of(hf, "num_experts_per_tok", int, default=8),
        "sigmoid",
        renormalise=field_of(hf, "norm_topk_prob", bool, default=True),
        scale=field_of(hf, "routed_scaling_factor", float, default=2.5),
        groups=field_of(hf, "n_group", int, default=8),
        top_groups=field_of(hf, "topk_group", int, default=4),
        group_score="top2",
    )
    return deepseek_v2.checked(hf, routing)


Model = deepseek_v2.Model
