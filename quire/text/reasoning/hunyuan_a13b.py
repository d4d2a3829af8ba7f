"""Hunyuan A13B: <think> tags, then the answer in <answer> tags."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<think>", "</think>"), wraps=[("<answer>", "</answer>")])


def detect(template: str) -> bool:
    return "<answer>" in template and "</think>" in template
