"""Names of structured output backends: ours, and those of other engines and older releases."""

from __future__ import annotations

NAMES = ("auto", "llguidance")
UNSUPPORTED = {
    "outlines": "it omits choices that begin another choice, and skips unknown keywords of a "
    "JSON schema",
    "lm-format-enforcer": "it reads each mask in Python between two steps, and reads no letters "
    "but ASCII",
}
"""Backends of other engines, and why they are not supported."""
KNOWN = (*NAMES, *UNSUPPORTED)
_ALIASES = {
    "guidance": "llguidance",
    "xgrammar": "llguidance",  # the default of other engines, so that scripts and configs name it
    "lm_format_enforcer": "lm-format-enforcer",
}


def canonical_name(name: str) -> str:
    """Return quire's name for a backend; an unknown one is returned unchanged."""
    return _ALIASES.get(name, name)
