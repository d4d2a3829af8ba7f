"""Media adapters: the adapters of prompts that have media of some kind, and name no adapter."""

from __future__ import annotations

from collections.abc import Callable, Collection

from quire.core.types import AdapterRef


class MediaAdapters:
    """kinds: of media whose prompts have an adapter; its name is the kind.

    find: returns the adapter that a name means now; None: it was unloaded. Set by what serves them.
    """

    def __init__(self, kinds: Collection[str] = ()) -> None:
        self.kinds = frozenset(kinds)
        self.find: Callable[[str], AdapterRef | None] = lambda _: None

    def choose(self, media: Collection[str]) -> AdapterRef | None:
        """Return the adapter of a prompt with media of these kinds; None: it has none, or more than
        one would be meant."""
        meant = self.kinds.intersection(media)
        return self.find(next(iter(meant))) if len(meant) == 1 else None
