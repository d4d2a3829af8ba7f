"""MiniMax M2, for clients that split the text themselves: it begins with the tag of the prompt."""

from __future__ import annotations

from quire.text.reasoning.base import Dialect, Kind, Mode, never

DIALECT = Dialect({"start": Mode(kind=Kind.CONTENT)}, "start", prefix="<think>")

detect = never
