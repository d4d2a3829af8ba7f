"""The worker that a function passed to collective_rpc gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError

METHODS = ("get_model", "check_health", "list_parameters")


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank and its model."""

    rank: int
    model: Any

    def get_model(self) -> Any:
        """The model, an nn.Module."""
        return self.model

    def check_health(self) -> bool:
        """Return True: it answers."""
        return True

    def list_parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the parameters."""
        return [(name, tuple(p.shape)) for name, p in self.model.named_parameters()]

    def call(
        self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a method of this class by name, or any function with this worker as first
        argument."""
        if callable(method):
            return method(self, *args, **kwargs)
        if method not in METHODS:
            message = f"collective_rpc: workers have no method {method!r}"
            raise RequestError(f"{message}; they have {', '.join(METHODS)}, or pass a function")
        return getattr(self, method)(*args, **kwargs)
