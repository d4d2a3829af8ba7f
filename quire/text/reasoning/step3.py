"""Step 3: everything before </think> is reasoning."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(("<think>", "</think>"), implied=True)


def detect(template: str) -> bool:
    return "steptml:" in template
