"""Plug-ins of the operator: Python files that run once when the server starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from quire.errors import ConfigError


def load_plugin_file(path: str, what: str) -> ModuleType:
    """Run the file. Its name without .py is the module's. Raises ConfigError.

    what: what it should hold, for the error.
    """
    file = Path(path).expanduser()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"no {what} plug-in at {path}: it is not a file of Python")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the operator's code may raise anything
        why = f"{type(error).__name__}: {error}"
        message = f"the {what} plug-in {path} cannot be loaded, it failed: {why}"
        raise ConfigError(message) from error
    return module
