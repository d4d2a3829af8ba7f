"""Adapter calls: loads and unloads adapters for clients, between steps.

Files are read in a thread; the engine's thread registers what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.engine.messages import AdapterCard
from quire.errors import RequestError

if TYPE_CHECKING:
    from quire.engine.core.adapter_store import AdapterStore


class _Load(NamedTuple):
    """A load under way. client, call_id: to be answered."""

    client: Any
    call_id: int
    given: str
    base_model_name: str | None
    future: Future[Any]


class AdapterCalls:
    """The calls over one store. At most one load of a name is under way."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._loads: dict[str, _Load] = {}

    def cards(self) -> list[AdapterCard]:
        """Return the registered adapters."""
        return self._store.cards()

    def unload(self, name: str) -> bool:
        """Remove a name. Requests that have its adapter keep it. Returns whether it existed."""
        return self._store.remove(name)

    def load(
        self,
        client: Any,
        call_id: int,
        name: str,
        given: str,
        base_model_name: str | None,
        replace: bool,
        allowed: Sequence[str],
    ) -> None:
        """Begin to load an adapter: a folder in one of `allowed`, or any. Raises RequestError."""
        if name in self._loads:
            message = f"the lora adapter {name!r} is being loaded: wait for that"
            raise RequestError(message, param="lora_name")
        if not replace and self._store.find(name) is not None:
            raise RequestError(
                f"The lora adapter {name!r} has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
                param="lora_name",
            )
        future = self._store.start_reading(given, allowed)
        self._loads[name] = _Load(client, call_id, given, base_model_name, future)

    @property
    def has_results(self) -> bool:
        """Whether take_results() would yield anything."""
        return any([one.future.done() for one in self._loads.values()])  # noqa: C419 faster

    def take_results(self) -> Iterator[tuple[Any, int, Callable[[], AdapterCard]]]:
        """Yield (client, call id, what registers the adapter or raises) of each load that ended."""
        for name in [name for name, one in self._loads.items() if one.future.done()]:
            load = self._loads.pop(name)
            yield load.client, load.call_id, lambda name=name, load=load: self._finish(name, load)  # type: ignore[misc]

    def _finish(self, name: str, load: _Load) -> AdapterCard:
        found = load.future.result()
        self._store.register(name, load.given, load.base_model_name, found)
        return next(card for card in self._store.cards() if card.name == name)
