"""Kimi K3: a part for thinking, then one for the response."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    wraps=[("<|open|>response<|sep|>", "<|close|>response<|sep|>")],
    breaks=("<|open|>tools<|sep|>",),
)


def detect(template: str) -> bool:
    return "<|open|>think" in template
