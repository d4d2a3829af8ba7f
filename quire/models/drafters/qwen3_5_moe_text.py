"""The layer of Qwen3.5 with experts, text, that predicts further tokens."""

from __future__ import annotations

from quire.models import qwen3_5_moe_text
from quire.models.drafters import qwen3_next

read_config = qwen3_next.read_config


class Head(qwen3_next.Head):
    model = qwen3_5_moe_text.Model
