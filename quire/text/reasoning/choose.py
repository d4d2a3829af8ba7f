"""Which dialect of reasoning: by name, by what the chat template looks like, or out of a file."""

from __future__ import annotations

from types import ModuleType

from quire.errors import ConfigError
from quire.registry import Registry
from quire.text.plugin_file import load_file
from quire.text.reasoning.base import Dialect

REASONING = Registry("quire.text.reasoning", "quire.reasoning_parsers")
GENERAL = "qwen3"
"""Has no marks of its own: it is meant where no other dialect is."""


def names() -> list[str]:
    """All there are."""
    return REASONING.names()


def choose(name: str, template: str | None = None, plugin: str | None = None) -> Dialect | None:
    """The dialect of this name; "auto": of the template, None if it shows no reasoning.

    plugin: a file of Python with `DIALECT`; its name is NAME or that of the file.
    Raises ConfigError with the nearest names.
    """
    if plugin is not None:
        module = load_file(plugin, "reasoning parser")
        if name in (vars(module).get("NAME", module.__name__), "auto"):
            return _dialect(module)
    if name == "auto":
        found = detected(template or "")
        return None if found is None else _dialect(REASONING.load(found))
    return _dialect(REASONING.load(name.replace("-", "_")))


def detected(template: str) -> str | None:
    """The name of the dialect that a chat template is written for."""
    found = [name for name in names() if REASONING.load(name).detect(template)]
    own = [name for name in found if name != GENERAL]
    return own[0] if own else found[0] if found else None


def _dialect(module: ModuleType) -> Dialect:
    dialect = vars(module).get("DIALECT")
    if dialect is None:
        raise ConfigError(f"the reasoning parser {module.__name__!r} has no DIALECT")
    if not isinstance(dialect, Dialect):
        message = f"{module.__name__}: DIALECT must be a quire.text.reasoning.base.Dialect"
        raise ConfigError(message)
    return dialect
