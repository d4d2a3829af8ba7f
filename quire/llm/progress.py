"""Progress bars and Ctrl-C while a batch runs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any, TypeVar

from quire.outputs import RequestOutput

T = TypeVar("T")
UseTqdm = bool | Callable[..., Any]
"""True, False, or a function that is called as tqdm is."""


def _make_bar(use: UseTqdm, **named: Any) -> Any:
    if use is True:
        from tqdm.auto import tqdm

        return tqdm(dynamic_ncols=True, **named)
    assert callable(use), use
    return use(dynamic_ncols=True, **named)


def track_adding(items: Iterable[T], use: UseTqdm) -> Iterator[T]:
    """Iterate over the items, under the bar `Adding requests`."""
    if not use:
        yield from items
        return
    total = len(items) if isinstance(items, Sized) else None
    bar = _make_bar(use, iterable=items, desc="Adding requests", total=total)
    yield from bar


class ProcessedBar:
    """The bar `Processed prompts`, with token rates. Costs nothing between finished requests."""

    def __init__(self, total: int, use: UseTqdm) -> None:
        self._started_at = time.perf_counter()
        self._prompt_tokens = self._output_tokens = 0
        self._bar = (
            _make_bar(use, total=total, desc="Processed prompts", postfix=self._rates())
            if use
            else None
        )

    def count_finished(self, output: RequestOutput) -> None:
        """Count one finished request."""
        if self._bar is None:
            return
        written = len(output.outputs)
        self._output_tokens += sum(len(one.token_ids) for one in output.outputs)
        self.count_read(len(output.prompt_token_ids or ()) * written)

    def count_read(self, prompt_tokens: int) -> None:
        """Count one finished request that generated nothing."""
        if self._bar is None:
            return
        self._prompt_tokens += prompt_tokens
        self._bar.postfix = self._rates()
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _rates(self) -> str:
        seconds = max(time.perf_counter() - self._started_at, 1e-9)
        read, written = self._prompt_tokens / seconds, self._output_tokens / seconds
        return f"est. speed input: {read:.2f} toks/s, output: {written:.2f} toks/s"


class InterruptHandler(AbstractContextManager["InterruptHandler"]):
    """While it is open, Ctrl-C sets `asked` instead of raising in the middle of a step.

    The third Ctrl-C raises at once, and may leave the engine unusable: for a step that hangs.
    Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._times = 0
        self._previous_handler: Any = None

    def __enter__(self) -> InterruptHandler:
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.getsignal(signal.SIGINT)
            if self._previous_handler is not None:  # None: a handler that Python did not set stays
                signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)

    def check(self) -> None:
        """Between two steps: raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self.is_requested:
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._times += 1
        if self._times > 2:
            raise KeyboardInterrupt
        self.is_requested = True
