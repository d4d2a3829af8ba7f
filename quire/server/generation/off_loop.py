"""Work that may take long leaves the event loop: tokenizing releases the GIL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from quire.text.templates import jinja_sandbox

T = TypeVar("T")

LONG_CHARS = 8_000
"""Prompts beyond this take milliseconds, and are prepared in another thread."""
RENDER_CPU_BUDGET_S = 0.02
"""Processor time for chat templates of shorter ones: twenty messages take a fortieth of it."""
LONG_OUTPUT_TOKENS = 20_000
"""Tokens with their logprobs, beyond which an answer is put together in another thread."""


async def run_off_loop(work: Callable[[], T], size: int, most: int) -> T:
    """Do the work: here if it is short, else in a thread.

    Work whose chat template turns out to take long is stopped here and starts anew in the thread.
    """
    if size <= most:
        with (
            suppress(jinja_sandbox.RenderDeadlineExceeded),
            jinja_sandbox.render_deadline(RENDER_CPU_BUDGET_S),
        ):
            return work()
    return await asyncio.to_thread(work)
