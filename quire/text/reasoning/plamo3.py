"""PLaMo 3: tokens of its own."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"))


def detect(template: str) -> bool:
    return "<|plamo:begin_think:plamo|>" in template
