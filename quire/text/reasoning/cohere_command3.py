"""Command A Reasoning: thoughts, then the response, in tokens of their own."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    wraps=[("<|START_RESPONSE|>", "<|END_RESPONSE|>")],
)


def detect(template: str) -> bool:
    return "<|START_THINKING|>" in template and "<|START_TEXT|>" not in template
