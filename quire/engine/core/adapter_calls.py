"""Adapter calls: loads and unloads adapters for clients, between steps.

Files are read in threads; the engine's thread registers what was read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.engine.messages import AdapterCard, AdapterLoad
from quire.errors import RequestError, UnknownModel

if TYPE_CHECKING:
    from quire.engine.core.adapter_store import AdapterStore


class _Load(NamedTuple):
    """A load under way. callers: (client, call id) to be answered."""

    wanted: AdapterLoad
    future: Future[Any]
    callers: list[tuple[Any, int]]


class AdapterCalls:
    """The calls over one store. At most one load of a name is under way."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._loads: dict[tuple[bytes, str], _Load] = {}
        self._unloaded: list[_Load] = []  # before they ended

    def cards(self) -> list[AdapterCard]:
        """Return the registered adapters."""
        return self._store.cards()

    def unload(self, name: str, tenant: bytes = b"") -> bool:
        """Remove a name, and end a load of it. Requests that have its adapter keep it.

        Returns whether it existed or was being loaded.
        """
        under_way = self._loads.pop((tenant, name), None)
        if under_way is not None:
            self._unloaded.append(under_way)
        return self._store.remove(name, tenant) or under_way is not None

    def pin(self, name: str) -> None:
        """Keep an adapter in host memory while it has this name. Raises RequestError."""
        self._store.pin(name)

    def load(self, client: Any, call_id: int, wanted: AdapterLoad) -> AdapterCard | None:
        """Return the adapter if it is loaded and may stay; None: begin, and yield it later.

        Raises RequestError.
        """
        name, key = wanted.name, (wanted.tenant, wanted.name)
        under_way, loaded = self._loads.get(key), self._store.card(name, wanted.tenant)
        if wanted.if_loaded == "keep":
            if under_way is not None:
                under_way.callers.append((client, call_id))
                return None
            if loaded is not None:
                return loaded
        if under_way is not None:
            message = f"the lora adapter {name!r} is being loaded: wait for that"
            raise RequestError(message, param="lora_name")
        if wanted.if_loaded == "refuse" and loaded is not None:
            raise RequestError(
                f"The lora adapter {name!r} has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
                param="lora_name",
            )
        if loaded is None:
            self._check_count(wanted)
        future = self._store.start_reading(wanted)
        self._loads[key] = _Load(wanted, future, [(client, call_id)])
        return None

    @property
    def has_results(self) -> bool:
        """Whether take_results() would yield anything."""
        return bool(self._unloaded) or any(one.future.done() for one in self._loads.values())

    def take_results(self) -> Iterator[tuple[Any, int, Callable[[], AdapterCard]]]:
        """Yield (client, call id, what registers the adapter or raises) of each load that ended."""
        for load in self._unloaded:
            for client, call_id in load.callers:
                yield client, call_id, functools.partial(_raise_unloaded, load.wanted.name)
        self._unloaded.clear()
        for key in [key for key, one in self._loads.items() if one.future.done()]:
            load = self._loads.pop(key)
            finish = functools.cache(functools.partial(self._finish, load))
            for client, call_id in load.callers:
                yield client, call_id, finish

    def _finish(self, load: _Load) -> AdapterCard:
        wanted, found = load.wanted, load.future.result()
        name, tenant = wanted.name, wanted.tenant
        self._store.register(name, wanted.given, wanted.base_model_name, found, tenant=tenant)
        card = self._store.card(name, tenant)
        assert card is not None
        return card

    def _check_count(self, wanted: AdapterLoad) -> None:
        if wanted.max_names is None:
            return
        under_way = {key for key in self._loads if key[0] == wanted.tenant}
        loaded = {(c.tenant, c.name) for c in self._store.cards() if c.tenant == wanted.tenant}
        if len(under_way | loaded) >= wanted.max_names:
            raise RequestError(
                f"this key has loaded {wanted.max_names} adapters, which is its limit: unload one",
                param="lora_name",
            )


def _raise_unloaded(name: str) -> AdapterCard:
    message = f"the lora adapter {name!r} was unloaded while it was being loaded"
    raise UnknownModel(message, param="lora_name")
