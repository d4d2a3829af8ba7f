"""The layer of GLM-4.5 to 4.7 that predicts further tokens."""

from __future__ import annotations

from quire.models import glm4_moe
from quire.models.drafters import _mtp

read_config = _mtp.read_config


class Head(_mtp.MTPHead):
    layer_class = glm4_moe.Layer
    weights_of = staticmethod(lambda _: glm4_moe.Model.weights)
