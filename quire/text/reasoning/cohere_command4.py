"""Command 4: as Command A, with another token for the text."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    wraps=[("<|START_TEXT|>", "<|END_TEXT|>")],
)


def detect(template: str) -> bool:
    return "<|START_THINKING|>" in template and "<|START_TEXT|>" in template
