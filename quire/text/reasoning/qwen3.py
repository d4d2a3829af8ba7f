"""Qwen3, and other models with <think> tags: the prompt or the model opens them."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<think>", "</think>"))


def detect(template: str) -> bool:
    return "</think>" in template
