"""Gemma 4: a channel, whose name "thought" may be left out."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<|channel>", "<channel|>"), anywhere=True, label="thought\n")


def detect(template: str) -> bool:
    return "<|channel>" in template
