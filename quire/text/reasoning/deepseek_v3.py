"""DeepSeek V3.1 and V3.2: reasoning is on if the template variable is set: (`thinking`)."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(
    ("<think>", "</think>"), implied=True, switches=("thinking", "enable_thinking"), default=False
)


def detect(template: str) -> bool:
    return "<｜Assistant｜>" in template and "</think>" in template and "thinking" in template
