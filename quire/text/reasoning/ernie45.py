"""ERNIE 4.5: reasoning up to </think>, then the answer in <response> tags."""

from __future__ import annotations

from quire.text.reasoning.base import TaggedReasoning

FORMAT = TaggedReasoning(
    ("<think>", "</think>"),
    implied=True,
    switches=("enable_thinking",),
    wraps=[("<response>", "</response>")],
)


def detect(template: str) -> bool:
    return "<response>" in template and "</think>" in template
