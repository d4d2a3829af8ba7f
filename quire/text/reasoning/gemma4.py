"""Gemma 4: a channel for thoughts."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<|channel>thought", "<channel|>"), anywhere=True)


def detect(template: str) -> bool:
    return "<|channel>" in template
