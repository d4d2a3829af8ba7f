"""GLM 4.5 and later: <think> tags, opened by the model or the template."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<think>", "</think>"))


def detect(template: str) -> bool:
    return "[gMASK]" in template and "</think>" in template
