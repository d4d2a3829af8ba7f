"""Adapter resolver: finds adapters that a request may name as its model before anyone loads them.

Such a name is a path below one folder, or a repository of a list, with a folder in it. An adapter
that could not be loaded is not read again for a while, whatever clients send.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.engine.messages import AdapterLoad
from quire.errors import RequestError

FAILURE_MEMORY_S = 10.0
"""Seconds in which an adapter that could not be loaded is refused without reading it."""
MAX_FAILURES = 1024
MAX_NAME_CHARS = 256


class AdapterResolver:
    """folder: with adapters, also deeper in it. repositories: of the hub, as org/name."""

    def __init__(
        self,
        folder: str | None,
        repositories: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = None if folder is None else Path(folder).expanduser().absolute()
        self._repositories = tuple(repositories)
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, RequestError]] = OrderedDict()

    async def locate(self, name: str) -> AdapterLoad | None:
        """Return where the adapter of a name is; None: there is none.

        Raises RequestError if it could not be loaded a moment ago.
        """
        if not is_adapter_name(name) or not all(
            part.strip(".") and part != "~" for part in name.split("/")
        ):
            return None
        self._raise_if_failed(name)
        if self._folder is not None:
            path = self._folder / name
            if await asyncio.to_thread(_is_adapter, path):
                folder = [str(self._folder)]
                return AdapterLoad(name, str(path), if_loaded="keep", allowed=folder, remote=False)
        for one in self._repositories:
            if f"{name}/".startswith(f"{one}/"):
                subfolder = name[len(one) + 1 :]
                return AdapterLoad(name, one, if_loaded="keep", allowed=[], subfolder=subfolder)
        return None

    def record_failure(self, name: str, error: RequestError) -> None:
        """Refuse this name with this error for a while."""
        self._failures[name] = self._clock() + FAILURE_MEMORY_S, error
        self._failures.move_to_end(name)
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def _raise_if_failed(self, name: str) -> None:
        until, error = self._failures.get(name, (0.0, None))
        if error is None:
            return
        if self._clock() >= until:
            del self._failures[name]
            return
        raise type(error)(str(error), param=error.param)


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


def _is_adapter(path: Path) -> bool:
    try:
        return (path / "adapter_config.json").exists() or (
            path.suffix == ".gguf" and path.is_file()
        )
    except OSError:  # a part is too long, or may not be read
        return False
