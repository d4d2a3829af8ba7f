"""Magistral: tokens of its own around the thoughts; its first release wrote <think>."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("[THINK]", "[/THINK]"), ("<think>", "</think>"))


def detect(template: str) -> bool:
    return "[THINK]" in template
