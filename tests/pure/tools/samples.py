"""The corpus: texts of models, and the calls and content in them. One file per format."""

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
def corpus(tool_format):
    lines = (HERE / f"{tool_format}.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def format_of(name):
    return TOOL_FORMATS.load(name).FORMAT


def reader(tool_format, **options):
    """A parser whose ids are all the same."""
    options.setdefault("ids", lambda: "0123456789abcdef" * 2)
    return ToolParser(format_of(tool_format), options.pop("tools", DECLARED), **options)


def pieces_of(parser, parts):
    """All pieces that a parser emits for a text in these parts."""
    emitted = []
    for part in parts[:-1]:
        emitted += parser.push(part, last=False)
    return emitted + parser.push(parts[-1], last=True)


def read(tool_format, *parts, **options):
    return collect_pieces(pieces_of(reader(tool_format, **options), parts))


def calls_of(parsed):
    """Names and arguments of the whole calls."""
    return [(c.name, json.loads(c.arguments)) for c in parsed.calls if c.outcome == "whole"]
