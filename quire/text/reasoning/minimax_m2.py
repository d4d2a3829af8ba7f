"""MiniMax M2: everything before </think> is reasoning, with or without an opening tag."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<think>", "</think>"), implied=True)


def detect(template: str) -> bool:
    return "<minimax:tool_call>" in template
