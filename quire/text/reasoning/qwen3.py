"""Qwen3, and all who put their reasoning into <think> tags: the prompt or the model opens."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<think>", "</think>"))


def detect(template: str) -> bool:
    return "</think>" in template
