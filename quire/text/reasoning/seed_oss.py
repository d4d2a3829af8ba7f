"""Seed-OSS: tags of its own."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<seed:think>", "</seed:think>"))


def detect(template: str) -> bool:
    return "<seed:think>" in template
