"""Sleep mode: checks levels, modes and tags of sleep() and wake_up().

Three things can sleep: the weights and the KV cache (from level 1 on), and the scheduling of steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.errors import RequestError, Unsupported

SLEEP_LEVELS = (0, 1)
SLEEP_MODES = ("abort", "wait", "keep")
SLEEP_TAGS = frozenset(("weights", "kv_cache", "scheduling"))


def check_sleep_args(level: int, mode: str) -> None:
    """Raises RequestError for arguments that sleep() does not accept."""
    if level not in SLEEP_LEVELS:
        message = "sleep level must be 0 or 1 (2, discarding weights, is not supported yet)"
        raise Unsupported(f"{message}, got {level!r}", param="level")
    if mode not in SLEEP_MODES:
        message = f"mode must be one of {', '.join(SLEEP_MODES)}, got {mode!r}"
        raise RequestError(message, param="mode")


def tags_at_level(level: int) -> frozenset[str]:
    """The tags that sleep at a level."""
    return SLEEP_TAGS if level else frozenset(("scheduling",))


def tags_after_wake_up(asleep: frozenset[str], tags: Iterable[str] | None) -> frozenset[str]:
    """The tags that still sleep after some (None: all) were woken up. Raises RequestError."""
    if tags is None:
        return frozenset()
    woken = frozenset(tags)
    unknown = woken - SLEEP_TAGS
    if unknown:
        message = f"tags must be of {', '.join(sorted(SLEEP_TAGS))}"
        raise RequestError(f"{message}, got {', '.join(sorted(unknown))}", param="tags")
    left = asleep - woken
    return frozenset() if left == {"scheduling"} else left  # without memory asleep, steps run again
