"""Adapter names: the adapters that requests to this API process may name as their model.

The engine decides; this is a copy of its list. It is read again when this process loads or unloads
an adapter, and every second if other processes may do so. An engine that replaces one that died
has the adapters of its start only: the others are loaded again.

An adapter is for all tenants, or private to one. A tenant's own comes before one for all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from quire.core.types import AdapterRef
from quire.engine.client.engine_pool import EnginePool
from quire.engine.messages import AdapterCard, AdapterLoad
from quire.errors import Overloaded, QuireError, RequestError
from quire.server.adapter_resolver import AdapterResolver

log = logging.getLogger(__name__)

REFRESH_S = 1.0
MAX_RESOLVING = 64
"""Adapters that are loaded at once because requests name them: clients choose the names, and each
may cost a call of the hub."""
RETRY_S = 1.0


class AdapterNames:
    """enabled: the engine serves adapters. shared: other API processes use the same engine.

    resolver: finds adapters that were not loaded; None: there are none.
    """

    def __init__(
        self,
        engine: EnginePool,
        *,
        enabled: bool,
        shared: bool,
        resolver: AdapterResolver | None = None,
    ) -> None:
        self.enabled = enabled
        self._engine = engine
        self._shared = shared
        self._resolver = resolver if enabled else None
        self._cards: dict[tuple[bytes, str], AdapterCard] = {}  # by tenant and name
        self._resolving: dict[str, asyncio.Task[AdapterCard | None]] = {}
        self._restarts = 0

    def cards(self, tenant: bytes) -> list[AdapterCard]:
        """Return the adapters that a tenant may use, in the order in which they were loaded."""
        own = {name for holder, name in self._cards if holder == tenant}
        return [
            card
            for (holder, name), card in self._cards.items()
            if holder == tenant or (not holder and name not in own)
        ]

    def find(self, name: str | None, tenant: bytes) -> AdapterRef | None:
        """Return the adapter that a model name means for a tenant; None: it names none."""
        if name is None:
            return None
        card = self._cards.get((tenant, name)) or self._cards.get((b"", name))
        return None if card is None else card.ref

    async def resolve(self, name: str, tenant: bytes) -> None:
        """Load the adapter of this name if the resolver finds one. Raises QuireError.

        Requests that need it at once wait for one load.
        """
        if self._resolver is None or self.find(name, tenant) is not None:
            return
        task = self._resolving.get(name)
        if task is None:
            if len(self._resolving) >= MAX_RESOLVING:
                message = f"{MAX_RESOLVING} adapters are being loaded for other requests"
                raise Overloaded(f"{message}: try again", retry_after_s=RETRY_S)
            task = self._resolving[name] = asyncio.create_task(self._resolve(self._resolver, name))
            task.add_done_callback(lambda done: self._end_resolving(name, done))
        await asyncio.shield(task)

    async def load(self, wanted: AdapterLoad) -> None:
        """Load an adapter. Raises RequestError."""
        await self._load(wanted)
        await self._wait_for_others()

    async def unload(self, name: str, tenant: bytes) -> bool:
        """Unload an adapter. Returns whether it was loaded."""
        known = self._cards.pop((tenant, name), None)
        found = await self._engine.call(bool, "unload_adapter", name, tenant)
        self._cards.pop((tenant, name), None)  # a list that was read meanwhile has it
        await self._wait_for_others()
        return found or known is not None

    async def refresh(self) -> None:
        """Read the engine's list."""
        self._cards = {(card.tenant, card.name): card for card in await self._read()}

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

    async def _resolve(self, resolver: AdapterResolver, name: str) -> AdapterCard | None:
        wanted = await resolver.locate(name)
        if wanted is None:
            return None
        try:
            return await self._load(wanted)
        except RequestError as error:
            failure = type(error)(str(error), param="model")
            if error.param != "lora_name":  # the files are wrong, not the moment
                resolver.record_failure(name, failure)
            raise failure from None

    def _end_resolving(self, name: str, done: asyncio.Task[AdapterCard | None]) -> None:
        del self._resolving[name]
        if not done.cancelled():
            done.exception()  # all who wanted it may be gone

    async def _load_again(self) -> None:
        """Load what an engine that died had and its successor has not."""
        restarts, before = self._engine.restarts, dict(self._cards)
        lists = await self._engine.call_each(list[AdapterCard], "adapters")
        known = set.intersection(*({(card.tenant, card.name) for card in one} for one in lists))
        for key, card in before.items():
            if key in known or key not in self._cards:  # it was unloaded meanwhile
                continue
            try:
                await self._load(
                    AdapterLoad(
                        card.name,
                        card.folder,
                        card.base_model_name,
                        if_loaded="keep",  # another process may have been faster
                        tenant=card.tenant,
                    )
                )
            except RequestError as error:
                log.warning("adapter %r was not loaded again: %s", card.name, error)
        await self.refresh()
        self._restarts = restarts

    async def _read(self) -> Iterable[AdapterCard]:
        return await self._engine.call(list[AdapterCard], "adapters")

    async def _load(self, wanted: AdapterLoad) -> AdapterCard:
        card = await self._engine.call(AdapterCard, "load_adapter", *wanted)
        self._cards[card.tenant, card.name] = card
        return card

    async def _wait_for_others(self) -> None:
        """Wait until other processes have read the list, so that a client may ask any of them."""
        if self._shared:
            await asyncio.sleep(1.5 * REFRESH_S)
