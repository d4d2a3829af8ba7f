"""Kimi K2 Thinking: <think> tags; the section of tool calls ends reasoning too."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<think>", "</think>"), breaks=("<|tool_calls_section_begin|>",))


def detect(template: str) -> bool:
    return "<|tool_calls_section_begin|>" in template and "</think>" in template
