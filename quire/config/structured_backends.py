"""What backends of structured output are called: by us, by users, and in older releases.

Not here: what they do (quire.grammar). Options, requests and the backends read names through this.
"""

from __future__ import annotations

NAMES = ("auto", "llguidance", "xgrammar")
UNSUPPORTED = {
    "outlines": "it leaves out texts of a choice that another option begins, and skips keywords "
    "of a JSON schema that it does not know",
    "lm-format-enforcer": "it reads each mask in Python between two steps, and knows no letters "
    "but ASCII",
}
"""Backends of other engines, and why they are not here."""
KNOWN = (*NAMES, *UNSUPPORTED)
_ALIASES = {"guidance": "llguidance", "lm_format_enforcer": "lm-format-enforcer"}


def canonical_name(said: str) -> str:
    """The name as we have it; an unknown one as it is."""
    return _ALIASES.get(said, said)
