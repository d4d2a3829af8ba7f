"""Holo2: reasons unless the template was told not to."""

from __future__ import annotations

from quire.text.reasoning.base import Tags, never

DIALECT = Tags(("<think>", "</think>"), implied=True, switches=("thinking", "enable_thinking"))

detect = never
