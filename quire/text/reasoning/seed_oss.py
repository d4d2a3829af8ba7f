"""Seed-OSS: tags of its own."""

from __future__ import annotations

from quire.text.reasoning.base import Tags

DIALECT = Tags(("<seed:think>", "</seed:think>"))


def detect(template: str) -> bool:
    return "<seed:think>" in template
