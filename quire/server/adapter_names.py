"""Adapter names: the adapters that requests to this API process may name as their model.

The engine decides; this is a copy of its list. It is read again when this process loads or unloads
an adapter, and every second if other processes may do so. An engine that replaces one that died
has the adapters of its start only: the others are loaded again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from quire.core.types import AdapterRef
from quire.engine.client.engine_client import EngineClient
from quire.engine.messages import AdapterCard
from quire.errors import QuireError

log = logging.getLogger(__name__)

REFRESH_S = 1.0


class AdapterNames:
    """enabled: the engine serves adapters. shared: other API processes use the same engine."""

    def __init__(self, engine: EngineClient, *, enabled: bool, shared: bool) -> None:
        self.enabled = enabled
        self._engine = engine
        self._shared = shared
        self._cards: dict[str, AdapterCard] = {}
        self._restarts = 0

    def cards(self) -> Iterable[AdapterCard]:
        """Return the adapters, in the order in which they were loaded."""
        return self._cards.values()

    def find(self, name: str | None) -> AdapterRef | None:
        """Return the adapter of a model name; None: it names none."""
        card = None if name is None else self._cards.get(name)
        return None if card is None else card.ref

    async def load(self, name: str, path: str, *, replace: bool, allowed: Sequence[str]) -> None:
        """Load an adapter. allowed: folders that it must lie in; (): any. Raises RequestError."""
        card = await self._load(name, path, None, replace, list(allowed))
        self._cards[name] = card
        await self._wait_for_others()

    async def unload(self, name: str) -> bool:
        """Unload an adapter. Returns whether it was loaded."""
        self._cards.pop(name, None)
        found = await self._engine.call(bool, "unload_adapter", name)
        await self._wait_for_others()
        return found

    async def refresh(self) -> None:
        """Read the engine's list."""
        self._cards = {card.name: card for card in await self._read()}

    async def follow(self) -> None:
        """Keep the copy current, forever."""
        self._restarts = self._engine.restarts
        while self.enabled:
            try:
                if self._engine.restarts != self._restarts:
                    await self._load_again()
                elif self._shared or not self._cards:
                    await self.refresh()
            except QuireError as error:
                log.debug("the list of adapters could not be read: %s", error)
            await asyncio.sleep(REFRESH_S)

    async def _load_again(self) -> None:
        """Load what an engine that died had and its successor has not."""
        restarts, before = self._engine.restarts, dict(self._cards)
        known = {card.name for card in await self._read()}
        for name in before.keys() - known:
            card = before[name]
            try:
                await self._load(name, card.folder, card.base_model_name, False, [])
            except QuireError as error:  # another process may have been faster
                log.warning("adapter %r was not loaded again: %s", name, error)
        await self.refresh()
        self._restarts = restarts

    async def _read(self) -> list[AdapterCard]:
        return await self._engine.call(list[AdapterCard], "adapters")

    async def _load(self, *args: object) -> AdapterCard:
        """args: those of quire.engine.core.adapter_calls.AdapterCalls.load behind the client."""
        return await self._engine.call(AdapterCard, "load_adapter", *args)

    async def _wait_for_others(self) -> None:
        """Wait until other processes have read the list, so that a client may ask any of them."""
        if self._shared:
            await asyncio.sleep(1.5 * REFRESH_S)
