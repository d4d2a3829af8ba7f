"""GLM-4.5V and GLM-4.6V: the vision tower of GLM-4.1V, beside a text model with experts.

Source: model_type "glm4v_moe", https://huggingface.co/zai-org/GLM-4.5V
"""

from __future__ import annotations

from quire.models.multimodal import glm4v

Encoder = glm4v.Encoder
