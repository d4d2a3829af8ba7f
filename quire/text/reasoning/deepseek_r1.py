"""DeepSeek R1: reasons whether or not anything opens; without an end all of it is reasoning."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<think>", "</think>"), implied=True)


def detect(template: str) -> bool:
    is_deepseek = "<｜Assistant｜>" in template and "</think>" in template
    return is_deepseek and "thinking" not in template  # a switch: that is V3.1
