"""--middleware: adds the operator's own code around the routes.

`module:name` is an ASGI middleware class, or an async function (request, call_next). Such a
function wraps each chunk, which costs more than the chunk itself; a class does not.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware

from quire.errors import ConfigError


def add_user_middleware(app: FastAPI, name: str) -> None:
    """Put it outside of what is there. Raises ConfigError."""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    if not module:
        raise ConfigError(f"middleware must be module:name, got {name!r}")
    try:
        found: Any = vars(importlib.import_module(module))[attribute]
    except (ImportError, KeyError) as error:
        message = f"middleware {name!r} was not found: {type(error).__name__}: {error}"
        raise ConfigError(message) from None
    if inspect.isclass(found):
        app.add_middleware(found)  # type: ignore[arg-type]  # what it takes is seen when it starts
    elif inspect.iscoroutinefunction(found):
        app.add_middleware(BaseHTTPMiddleware, dispatch=found)
    else:
        raise ConfigError(f"middleware {name!r} must be a class or an async function")
