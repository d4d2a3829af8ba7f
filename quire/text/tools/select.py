"""Selects the tool-call format of a model: by name, by its chat template, or from a plug-in file.

Names are file names of this folder and entry points of the group quire.tool_parsers; a dash in a
name counts as an underscore. A plug-in is a module with a FORMAT, or with a Parser that has
the arguments of quire.text.tools.parser.ToolParser without the format.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from quire.errors import ConfigError
from quire.registry import PluginRegistry
from quire.text.output.parsed_text import StreamingParser
from quire.text.plugin_file import load_plugin_file
from quire.text.tools.base import IdSource, ToolFormat
from quire.text.tools.parser import ToolParser, new_hex_id

AUTO = "auto"
NOT_BUILT = frozenset({"hf", "beam"})
"""Names that read a `response_template` in tokenizer_config.json, in other engines."""
TOOL_FORMATS = PluginRegistry("quire.text.tools", "quire.tool_parsers", "tool parser")


class MakeToolParser(Protocol):
    """Makes a parser of one text."""

    def __call__(
        self,
        tools: Sequence[Mapping[str, object]] | None,
        *,
        parallel: bool,
        eager: bool,
        ids: IdSource,
    ) -> StreamingParser: ...


@dataclass(frozen=True, slots=True)
class ToolParserFactory:
    """A format, ready to make parsers."""

    name: str
    make: MakeToolParser
    format: ToolFormat | None
    """None for a plug-in with a Parser of its own."""

    def create(
        self,
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        parallel: bool = True,
        eager: bool = True,
        ids: IdSource = new_hex_id,
    ) -> StreamingParser:
        """A parser of one text; arguments as in quire.text.tools.parser.ToolParser."""
        return self.make(tools, parallel=parallel, eager=eager, ids=ids)


def select_tool_parser(
    name: str, *, template: str | None = None, plugin: str | None = None
) -> ToolParserFactory:
    """Return the format of this name, or with "auto" the one that the chat template uses.

    plugin: path of a Python file; its format has the file's name, or its own. Raises ConfigError.
    """
    own = _from_file(plugin) if plugin else None
    if name == AUTO:
        return own or _detect_one(template)
    wanted = name.replace("-", "_")
    if own is not None and wanted in (own.name, Path(str(plugin)).stem.replace("-", "_")):
        return own
    if own is not None and wanted not in TOOL_FORMATS.names():
        matches = difflib.get_close_matches(wanted, [*TOOL_FORMATS.names(), own.name], n=3)
        hint = f"; did you mean {' or '.join(matches)}?" if matches else ""
        raise ConfigError(f"no tool parser {name!r}; {plugin} has {own.name!r}{hint}")
    refuse_if_not_built(wanted, "tool parser")
    return _from_module(wanted, TOOL_FORMATS.load(wanted))


def refuse_if_not_built(name: str, what: str) -> None:
    """Raise ConfigError for a name that other engines have and this one has not."""
    if name in NOT_BUILT:
        raise ConfigError(
            f"the {what} {name!r}, which reads the response_template of tokenizer_config.json, is "
            f"not built yet; name the format of the model, or give a plug-in file of your own"
        )


def _from_module(name: str, module: ModuleType) -> ToolParserFactory:
    found = vars(module)
    tool_format, parser = found.get("FORMAT"), found.get("Parser")
    if parser is not None and callable(parser):
        return ToolParserFactory(
            name, parser, tool_format if isinstance(tool_format, ToolFormat) else None
        )
    if not isinstance(tool_format, ToolFormat):
        raise ConfigError(f"the tool parser {name!r} has neither a FORMAT nor a Parser")
    return ToolParserFactory(name, _make_from_format(tool_format), tool_format)


def _make_from_format(tool_format: ToolFormat) -> MakeToolParser:
    def make(
        tools: Sequence[Mapping[str, object]] | None, *, parallel: bool, eager: bool, ids: IdSource
    ) -> StreamingParser:
        return ToolParser(tool_format, tools, parallel=parallel, eager=eager, ids=ids)

    return make


def _from_file(path: str) -> ToolParserFactory:
    """The format of a plug-in file. The file is executed: it is the operator's own code."""
    chosen = _from_module(Path(path).stem.replace("-", "_"), load_plugin_file(path, "tool parser"))
    return (
        ToolParserFactory(chosen.format.name, chosen.make, chosen.format)
        if chosen.format
        else chosen
    )


def _detect_one(template: str | None) -> ToolParserFactory:
    if not template:
        raise ConfigError(
            "there is no chat template to detect the tool parser from; name the parser"
        )
    found = detect_tool_formats(template)
    if len(found) == 1:
        return _from_module(found[0], TOOL_FORMATS.load(found[0]))
    if found:
        raise ConfigError(
            f"the chat template fits several tool parsers: {', '.join(found)}; name one of them"
        )
    raise ConfigError(
        "the chat template fits no tool parser that is known; name one of: "
        + ", ".join(TOOL_FORMATS.names())
    )


def detect_tool_formats(template: str) -> list[str]:
    """Names of the formats that a chat template uses. Of several names for one format, its own."""
    found: dict[int, str] = {}
    for name in TOOL_FORMATS.names():
        module = TOOL_FORMATS.load(name)
        detect, tool_format = vars(module).get("detect"), vars(module).get("FORMAT")
        if detect is None or not detect(template):
            continue
        own = tool_format.name if isinstance(tool_format, ToolFormat) else name
        found.setdefault(id(tool_format) if tool_format is not None else id(module), own)
    return sorted(found.values())
