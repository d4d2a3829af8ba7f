"""Holo2: reasons unless the template was told not to."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning, never_detected

FORMAT = TaggedReasoning(
    ("<think>", "</think>"), implied=True, switches=("thinking", "enable_thinking")
)

detect = never_detected
