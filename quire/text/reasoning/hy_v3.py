"""Hunyuan 3: <think> tags, opened by the template; reasoning_effort "no_think" turns it off."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning, never_detected

FORMAT = TaggedReasoning(("<think>", "</think>"))

detect = never_detected
