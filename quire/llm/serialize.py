"""Runs the calls of one LLM one after another, whichever threads they come from.

Garbage collection runs rarely during a call: one in its middle would visit all token ids of its
prompts, and find nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from quire.engine.core.gc_control import infrequent_gc

P = ParamSpec("P")
R = TypeVar("R")


class HasCallLock(Protocol):
    """An object with a lock for its calls. The lock is reentrant: methods call each other."""

    call_lock: threading.RLock


S = TypeVar("S", bound=HasCallLock)


def one_at_a_time(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Return the method, which waits for calls of other threads to end."""

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.call_lock, infrequent_gc():
            return method(self, *args, **kwargs)

    return call
