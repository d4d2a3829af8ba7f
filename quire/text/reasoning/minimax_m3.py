"""MiniMax M3: tags of its own; `thinking_mode` has the template open them."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<mm:think>", "</mm:think>"))


def detect(template: str) -> bool:
    return "<mm:think>" in template
