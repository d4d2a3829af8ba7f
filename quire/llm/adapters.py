"""Adapters of LLM: what the LoRARequests of callers mean.

A LoRARequest names an adapter three times: by name, by number and by folder. The three stay
together while the adapter is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quire.core.params import LoRARequest
from quire.core.types import AdapterRef
from quire.engine.client.engine_pool import EnginePool
from quire.engine.messages import AdapterCard, AdapterLoad
from quire.errors import QuireError, RequestError, Unsupported

if TYPE_CHECKING:
    from quire.engine.core.adapter_store import AdapterStore
    from quire.llm.engine_processes import PooledAdapters


class AdapterRequests:
    """The adapters that callers have given. store: None: the engine serves none."""

    def __init__(self, store: AdapterStore | PooledAdapters | None) -> None:
        self._store = store
        self._known: dict[str, LoRARequest] = {}  # by name

    def resolve(self, given: object, count: int) -> list[AdapterRef | None]:
        """Return the adapter of each of `count` prompts, loading what is not loaded.

        given: a LoRARequest or None for all, or one of these for each. Raises RequestError.
        """
        if given is None:
            return [None] * count
        each: list[object] = [given] * count
        if isinstance(given, (list, tuple)):
            if len(given) != count:
                message = f"lora_request has {len(given)} entries for {count} prompts"
                raise RequestError(f"{message}: give one, or one for each", param="lora_request")
            each = list(given)
        found: dict[int, AdapterRef | None] = {}
        for one in each:
            if id(one) not in found:
                found[id(one)] = None if one is None else self._load(_checked(one))
        return [found[id(one)] for one in each]

    def add(self, request: object) -> bool:
        """Load an adapter before it is used. Returns whether it was not loaded."""
        checked = _checked(request)
        new = checked.lora_name not in self._known
        self._load(checked)
        return new or checked.load_inplace

    def remove(self, number: int) -> bool:
        """Unload an adapter. Running requests keep it. Returns whether it was loaded."""
        name = name_of(number, self._known)
        if name is None:
            return False
        del self._known[name]
        return self._require_store().remove(name)

    def pin(self, number: int) -> bool:
        """Keep an adapter in host memory, and in its slot while others can be given away.

        Returns True. Raises RequestError.
        """
        self._require_store().pin(_known_name(number, self._known))
        return True

    def numbers(self) -> set[int]:
        """Return the numbers of loaded adapters."""
        return {one.lora_int_id for one in self._known.values()}

    def _load(self, request: LoRARequest) -> AdapterRef:
        store = self._require_store()
        known = self._known.get(request.lora_name)
        check_conflicts(request, self._known)
        if known is not None and not request.load_inplace:
            found = store.find(request.lora_name)
            assert found is not None, request.lora_name
            return found
        found = store.register(request.lora_name, request.lora_path, request.base_model_name)
        self._known[request.lora_name] = request
        return found

    def _require_store(self) -> AdapterStore | PooledAdapters:
        if self._store is None:
            raise not_served()
        return self._store


def _checked(given: object) -> LoRARequest:
    if not isinstance(given, LoRARequest):
        message = f"lora_request must be a LoRARequest, got {type(given).__name__}"
        raise RequestError(message, param="lora_request")
    return given


class AsyncAdapterRequests:
    """The same over an engine in another process. It runs on one event loop."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._known: dict[str, LoRARequest] = {}
        self._loads: dict[str, asyncio.Task[AdapterCard]] = {}  # of each name the latest
        self._start: dict[str, AdapterRef] | None = None  # None: not read yet

    async def resolve(self, client: EnginePool, given: object) -> AdapterRef | None:
        """Return the adapter that a LoRARequest means, loading it if it is not loaded.

        Raises RequestError.
        """
        if given is None:
            return None
        if not self._enabled:
            raise not_served()
        request = _checked(given)
        check_conflicts(request, self._known)
        name = request.lora_name
        if name not in self._known or request.load_inplace:
            wanted = AdapterLoad(
                name, request.lora_path, request.base_model_name, if_loaded="replace"
            )
            self._known[name] = request
            call = client.call(AdapterCard, "load_adapter", *wanted)
            self._loads[name] = asyncio.create_task(call)
        load = self._loads[name]
        try:
            return (await asyncio.shield(load)).ref
        except QuireError:
            if self._loads.get(name) is load:
                del self._known[name], self._loads[name]
            raise

    async def read_start(self, client: EnginePool) -> None:
        """Read which adapters the engine has loaded at its start."""
        if self._start is None:
            cards = await client.call(list[AdapterCard], "adapters")
            self._start = {one.name: one.ref for one in cards if one.name not in self._known}

    def of_start(self, name: str) -> AdapterRef | None:
        """Return the adapter that the engine has loaded under this name at its start."""
        return (self._start or {}).get(name)

    async def remove(self, client: EnginePool, number: int) -> bool:
        """Unload an adapter. Running requests keep it. Returns whether it was loaded."""
        name = name_of(number, self._known)
        if name is None:
            return False
        del self._known[name], self._loads[name]
        await client.call(bool, "unload_adapter", name)
        return True

    async def pin(self, client: EnginePool, number: int) -> bool:
        """As AdapterRequests.pin()."""
        name = _known_name(number, self._known)
        await asyncio.shield(self._loads[name])
        await client.call(type(None), "pin_adapter", name)
        return True

    def has(self, request: object) -> bool:
        """Whether an adapter of this name is loaded, or being loaded."""
        return _checked(request).lora_name in self._known

    def numbers(self) -> set[int]:
        """Return the numbers of loaded adapters."""
        return {one.lora_int_id for one in self._known.values()}


def check_conflicts(request: LoRARequest, known: Mapping[str, LoRARequest]) -> None:
    """Raise RequestError if name, number and folder were given in another combination.

    known: what was given, by name.
    """
    name, number, path = request.lora_name, request.lora_int_id, request.lora_path
    before, problem = known.get(name), None
    if before is not None and before.lora_int_id != number:
        problem = f"{name!r} is loaded with lora_int_id {before.lora_int_id}, got {number}"
    elif before is not None and before.lora_path != path and not request.load_inplace:
        problem = (
            f"{name!r} is loaded from {before.lora_path}, got {path}; set load_inplace=True to "
            "replace it"
        )
    other = name_of(number, known)
    if other not in (None, name):
        problem = f"lora_int_id {number} is {other!r}, got the name {name!r}"
    if problem is not None:
        raise RequestError(f"lora_request: the adapter {problem}", param="lora_request")


def name_of(number: int, known: Mapping[str, LoRARequest]) -> str | None:
    """Return the name of the adapter with this number."""
    return next((one.lora_name for one in known.values() if one.lora_int_id == number), None)


def _known_name(number: int, known: Mapping[str, LoRARequest]) -> str:
    name = name_of(number, known)
    if name is None:
        message = f"lora_id must be the number of a loaded adapter, got {number!r:.80}"
        raise RequestError(message, param="lora_id")
    return name


def not_served() -> Unsupported:
    """The error of an engine without adapters."""
    message = "this engine serves no adapters: start it with enable_lora=True"
    return Unsupported(f"lora_request: {message}", param="lora_request")
