"""The layer of DeepSeek-V3 and R1 that predicts further tokens."""

from __future__ import annotations

from quire.models import deepseek_v2
from quire.models.drafters import _mtp

read_config = _mtp.read_config


class Head(_mtp.MTPHead):
    layer_class = deepseek_v2.Layer
    weights_of = staticmethod(deepseek_v2.weights_of)
