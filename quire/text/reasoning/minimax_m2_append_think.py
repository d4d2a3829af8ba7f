"""MiniMax M2, for clients that split the text themselves: it begins with the tag of the prompt."""

from __future__ import annotations

from quire.text.reasoning.base import ModeKind, ParserMode, ReasoningFormat, never_detected

FORMAT = ReasoningFormat({"start": ParserMode(kind=ModeKind.CONTENT)}, "start", prefix="<think>")

detect = never_detected
