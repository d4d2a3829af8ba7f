"""OLMo 3 Think: the template opens <think>."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<think>", "</think>"))


def detect(template: str) -> bool:
    return "<function_calls>" in template and "<think>" in template
