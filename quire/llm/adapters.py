"""Adapters of LLM: what the LoRARequests of callers mean.

A LoRARequest names an adapter three times: by name, by number and by folder. The three stay
together while the adapter is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.core.params import LoRARequest
from quire.core.types import AdapterRef
from quire.errors import RequestError, Unsupported

if TYPE_CHECKING:
    from quire.engine.core.adapter_store import AdapterStore


class AdapterRequests:
    """The adapters that callers have given. store: None: the engine serves none."""

    def __init__(self, store: AdapterStore | None) -> None:
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
        name = next(
            (one.lora_name for one in self._known.values() if one.lora_int_id == number), None
        )
        if name is None:
            return False
        del self._known[name]
        return self._require_store().remove(name)

    def numbers(self) -> set[int]:
        """Return the numbers of loaded adapters."""
        return {one.lora_int_id for one in self._known.values()}

    def _load(self, request: LoRARequest) -> AdapterRef:
        store = self._require_store()
        known = self._known.get(request.lora_name)
        self._check_conflicts(request, known)
        if known is not None and not request.load_inplace:
            found = store.find(request.lora_name)
            assert found is not None, request.lora_name
            return found
        found = store.register(request.lora_name, request.lora_path, request.base_model_name)
        self._known[request.lora_name] = request
        return found

    def _check_conflicts(self, request: LoRARequest, known: LoRARequest | None) -> None:
        name, number, path = request.lora_name, request.lora_int_id, request.lora_path
        problem = None
        if known is not None and known.lora_int_id != number:
            problem = f"{name!r} is loaded with lora_int_id {known.lora_int_id}, got {number}"
        elif known is not None and known.lora_path != path and not request.load_inplace:
            problem = (
                f"{name!r} is loaded from {known.lora_path}, got {path}; set load_inplace=True to "
                "replace it"
            )
        for other in self._known.values():
            if other.lora_int_id == number and other.lora_name != name:
                problem = f"lora_int_id {number} is {other.lora_name!r}, got the name {name!r}"
        if problem is not None:
            raise RequestError(f"lora_request: the adapter {problem}", param="lora_request")

    def _require_store(self) -> AdapterStore:
        if self._store is None:
            message = "this engine serves no adapters: start it with enable_lora=True"
            raise Unsupported(f"lora_request: {message}", param="lora_request")
        return self._store


def _checked(given: object) -> LoRARequest:
    if not isinstance(given, LoRARequest):
        message = f"lora_request must be a LoRARequest, got {type(given).__name__}"
        raise RequestError(message, param="lora_request")
    return given
