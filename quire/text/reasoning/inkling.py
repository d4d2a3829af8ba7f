"""Inkling: a message of thoughts, then one of text."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(
    ("<|message_model|><|content_thinking|>", "<|end_message|>"),
    ("<|content_thinking|>", "<|end_message|>"),
)


def detect(template: str) -> bool:
    return "<|content_thinking|>" in template
