"""Plain config: an engine's config and options as data that can be sent to another process."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from quire.config.engine_config import EngineConfig
from quire.config.options import Options
from quire.errors import ConfigError


def plain_config(config: EngineConfig, options: Options) -> tuple[EngineConfig, dict[str, Any]]:
    """Return the config without objects of this process, and the options that are set.

    Raises: ConfigError for an option that works in one process only.
    """
    try:
        flat = msgspec.to_builtins(options.non_default(), enc_hook=to_plain)
        plain = msgspec.to_builtins(config, enc_hook=to_plain)
    except TypeError as error:
        message = f"an option cannot be sent to the engine's other processes: {error}"
        raise ConfigError(message) from None
    return msgspec.convert(plain, EngineConfig), flat


def to_plain(value: Any) -> Any:
    """Return a class or a path as text. Raises: TypeError for other objects."""
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{value!r} cannot be sent to another process")
