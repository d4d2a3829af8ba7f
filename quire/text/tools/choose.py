"""Which dialect of tool calls a model speaks: by name, by its chat template, or out of a file.

Names are file names of this folder and entry points of the group quire.tool_parsers; a dash in a
name counts as an underscore. A plug-in, however it comes, is a module with a DIALECT, or with a
Parser that is called as quire.text.tools.machine.Parser is, without the dialect.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from quire.errors import ConfigError
from quire.registry import Registry
from quire.text.plugin_file import load_file
from quire.text.speech import Reader
from quire.text.tools._write import Frame, frame
from quire.text.tools.base import Dialect, Ids
from quire.text.tools.machine import Parser, fresh_hex

AUTO = "auto"
TOOLS = Registry("quire.text.tools", group="quire.tool_parsers")


class Make(Protocol):
    """Makes a reader of one text."""

    def __call__(
        self,
        tools: Sequence[Mapping[str, object]] | None,
        *,
        parallel: bool,
        eager: bool,
        ids: Ids,
    ) -> Reader: ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """A dialect, ready to make readers."""

    name: str
    make: Make
    dialect: Dialect | None
    """None for a plug-in that reads in its own way."""

    def reader(
        self,
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        parallel: bool = True,
        eager: bool = True,
        ids: Ids = fresh_hex,
    ) -> Reader:
        """A reader of one text; what the words mean is said at quire.text.tools.machine.Parser."""
        return self.make(tools, parallel=parallel, eager=eager, ids=ids)

    def frame(self, name: str, place: int = 0) -> Frame | None:
        """What is written around the arguments of a call of a function; None if that is unknown."""
        return None if self.dialect is None else frame(self.dialect, name, place)


def choose(name: str, *, template: str | None = None, plugin: str | None = None) -> Chosen:
    """The dialect of this name, or with "auto" the one that the chat template teaches.

    plugin: path of a Python file; its dialect has the file's name, or its own. Raises ConfigError.
    """
    own = _from_file(plugin) if plugin else None
    if name == AUTO:
        return own or _detected(template)
    wanted = name.replace("-", "_")
    if own is not None and wanted in (own.name, Path(str(plugin)).stem.replace("-", "_")):
        return own
    if own is not None and wanted not in TOOLS.names():
        near = difflib.get_close_matches(wanted, [*TOOLS.names(), own.name], n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"no tool parser {name!r}; {plugin} has {own.name!r}{hint}")
    return _of(wanted, TOOLS.load(wanted))


def _of(name: str, module: ModuleType) -> Chosen:
    found = vars(module)
    dialect, parser = found.get("DIALECT"), found.get("Parser")
    if parser is not None and callable(parser):
        return Chosen(name, parser, dialect if isinstance(dialect, Dialect) else None)
    if not isinstance(dialect, Dialect):
        raise ConfigError(f"the tool parser {name!r} has neither a DIALECT nor a Parser")
    return Chosen(name, _maker(dialect), dialect)


def _maker(dialect: Dialect) -> Make:
    def make(
        tools: Sequence[Mapping[str, object]] | None, *, parallel: bool, eager: bool, ids: Ids
    ) -> Reader:
        return Parser(dialect, tools, parallel=parallel, eager=eager, ids=ids)

    return make


def _from_file(path: str) -> Chosen:
    """The dialect of a plug-in file. The file is run: it is the operator's own code."""
    chosen = _of(Path(path).stem.replace("-", "_"), load_file(path, "tool parser"))
    return Chosen(chosen.dialect.name, chosen.make, chosen.dialect) if chosen.dialect else chosen


def _detected(template: str | None) -> Chosen:
    if not template:
        raise ConfigError("no chat template to tell the tool parser from; name the parser")
    found = detected(template)
    if len(found) == 1:
        return _of(found[0], TOOLS.load(found[0]))
    if found:
        raise ConfigError(
            f"the chat template fits several tool parsers: {', '.join(found)}; name one of them"
        )
    raise ConfigError(
        "the chat template fits no tool parser that is known; name one of: "
        + ", ".join(TOOLS.names())
    )


def detected(template: str) -> list[str]:
    """Names of the dialects that a chat template teaches. Of several names for one, its own."""
    found: dict[int, str] = {}
    for name in TOOLS.names():
        module = TOOLS.load(name)
        detect, dialect = vars(module).get("detect"), vars(module).get("DIALECT")
        if detect is None or not detect(template):
            continue
        own = dialect.name if isinstance(dialect, Dialect) else name
        found.setdefault(id(dialect) if dialect is not None else id(module), own)
    return sorted(found.values())
