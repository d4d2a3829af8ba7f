"""Granite 3.2: plain sentences say where the thoughts begin and where the answer does."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

_ANSWER = ("Here is my response:", "Here's my response:")
FORMAT = TaggedReasoning(
    ("Here is my thought process:", _ANSWER),
    ("Here's my thought process:", _ANSWER),
)


def detect(template: str) -> bool:
    return "Here is my thought process" in template
