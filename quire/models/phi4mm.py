"""Phi-4-multimodal as the hub has it, its text half: Phi-3 beside adapters in the same checkpoint.

Their tensors are left there: the folders `vision-lora` and `speech-lora` hold them too, as adapters
that requests ask for.

Source: model_type "phi4mm", https://huggingface.co/microsoft/Phi-4-multimodal-instruct
"""

from __future__ import annotations

from dataclasses import replace

from quire.models import phi3

Config = phi3.Config


class Model(phi3.Model):
    weights = replace(
        phi3.Model.weights,
        paths={"base_layer": ""},
        ignore=(*phi3.Model.weights.ignore, "*.lora_A.*", "*.lora_B.*"),
    )
