"""Inkling: a message of thoughts, then one of text."""

from __future__ import annotations

from quire.text.reasoning.base import Tags

DIALECT = Tags(
    ("<|message_model|><|content_thinking|>", "<|end_message|>"),
    ("<|content_thinking|>", "<|end_message|>"),
)


def detect(template: str) -> bool:
    return "<|content_thinking|>" in template
