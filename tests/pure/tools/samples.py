"""The corpus: what models of each dialect write, and what it says. One file a dialect."""

import functools
import json
import pathlib

from quire.text.output.parsed_text import collect_pieces
from quire.text.tools.parser import ToolParser
from quire.text.tools.select import TOOL_FORMATS

HERE = pathlib.Path(__file__).parent
FORMATS = sorted({TOOL_FORMATS.load(name).FORMAT.name for name in TOOL_FORMATS.names()})


def function(name, required=(), **properties):
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
DECLARED = [
    function("get_weather", ["city"], city=TEXT, days=WHOLE),
    function("now"),
    function("search", ["query"], query=TEXT, exact=FLAG, filters={"type": ["object", "null"]}),
    function("write_file", ["path", "text"], path=TEXT, text=TEXT),
]


@functools.lru_cache
def corpus(dialect):
    lines = (HERE / f"{dialect}.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def dialect_of(name):
    return TOOL_FORMATS.load(name).FORMAT


def reader(dialect, **options):
    """A parser whose ids are all the same."""
    options.setdefault("ids", lambda: "0123456789abcdef" * 2)
    return ToolParser(dialect_of(dialect), options.pop("tools", DECLARED), **options)


def pieces_of(parser, parts):
    """All that a parser tells of a text that comes in these parts."""
    told = []
    for part in parts[:-1]:
        told += parser.push(part, last=False)
    return told + parser.push(parts[-1], last=True)


def read(dialect, *parts, **options):
    return collect_pieces(pieces_of(reader(dialect, **options), parts))


def calls_of(speech):
    """Names and arguments of the whole calls."""
    return [(c.name, json.loads(c.arguments)) for c in speech.calls if c.outcome == "whole"]
