"""ViP-LLaVA: states of five layers of CLIP, normed and projected.

Source: model_type "vipllava", https://huggingface.co/llava-hf/vip-llava-7b-hf; transformers
        modeling_vipllava.py
"""

from __future__ import annotations

from quire.models.multimodal import llava
from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._intern_vit import NormedProjector
from quire.models.multimodal._towers import activation_of, feature_layers, tower_weights

LAYERS = [-2, -5, -8, -11, 6]
"""States that are read, if config.json states none."""


class Encoder(llava.Encoder):
    def __init__(self, hf: Hf) -> None:
        layers = LAYERS if hf.get("vision_feature_layer") is None else feature_layers(hf, -2)
        hf = {**hf, "vision_feature_layer": layers, "vision_feature_select_strategy": "default"}
        super().__init__(hf)
        eps = field_of(hf, "projector_layernorm_eps", float, default=1e-5)
        inputs = self.tower.config.hidden * len(layers)
        act = activation_of(hf, "projector_hidden_act")
        self.projector = NormedProjector(inputs, self.width, self.width, act, eps=eps)
        self.weights = tower_weights(
            self.tower,
            paths={"multi_modal_projector.projector_layernorm": "projector.layer_norm"},
        )
