"""Holo2: reasoning is on unless the template variable turns it off."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning, never_detected

FORMAT = TaggedReasoning(
    ("<think>", "</think>"), implied=True, switches=("thinking", "enable_thinking")
)

detect = never_detected
