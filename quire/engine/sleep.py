"""What of an engine sleeps, and the words for it. Not here: what falling asleep does.

Three things can sleep: the weights and the KV cache (level 1 and up) and the scheduling of steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.errors import RequestError, Unsupported

LEVELS = (0, 1)
MODES = ("abort", "wait", "keep")
TAGS = frozenset(("weights", "kv_cache", "scheduling"))


def check(level: int, mode: str) -> None:
    """Raise RequestError for what sleep() does not take."""
    if level not in LEVELS:
        message = "sleep level must be 0 or 1 (2, discarding weights, is not supported yet)"
        raise Unsupported(f"{message}, got {level!r}", param="level")
    if mode not in MODES:
        message = f"mode must be one of {', '.join(MODES)}, got {mode!r}"
        raise RequestError(message, param="mode")


def asleep_at(level: int) -> frozenset[str]:
    """What sleeps at a level."""
    return TAGS if level else frozenset(("scheduling",))


def after_waking(asleep: frozenset[str], tags: Iterable[str] | None) -> frozenset[str]:
    """What still sleeps when these (None: all) were woken. Raises RequestError."""
    if tags is None:
        return frozenset()
    woken = frozenset(tags)
    unknown = woken - TAGS
    if unknown:
        message = f"tags must be of {', '.join(sorted(TAGS))}"
        raise RequestError(f"{message}, got {', '.join(sorted(unknown))}", param="tags")
    left = asleep - woken
    return frozenset() if left == {"scheduling"} else left  # who woke the memory wants to generate
