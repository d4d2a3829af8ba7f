"""Prepares Lark text of callers for llguidance.

Names of special tokens become ids, as `<[3]>`, and %json gets a bound for white space where the
caller sets none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from quire.errors import RequestError
from quire.grammar.vocabulary import SpecialTokenNames

MAX_CHARS = 200_000
_PIECE = re.compile(
    r"""(?P<kept>"(?:[^"\\\n]|\\.)*" | //[^\n]* | \#[^\n]* | /(?![*/])(?:[^/\\\n]|\\.)+/
           | @[\w-]+ | %(?!json)\w+)
      | (?P<json>%json\b\s*)
      | (?P<token><(?:\[[^\]\n]*\]|[^\s<>]+)>)""",
    re.VERBOSE,
)
_IDS = re.compile(r"<\[([^\]\n]*)\]>")


def prepare_user_lark(text: str, names: SpecialTokenNames, whitespace: str) -> str:
    """The text with ids for names, and this white space in its JSON. Raises RequestError."""
    if len(text) > MAX_CHARS:
        raise RequestError(f"the grammar has {len(text)} characters; {MAX_CHARS} are the most")
    return "".join(_rewrite_pieces(text, names, whitespace))


def _rewrite_pieces(text: str, names: SpecialTokenNames, whitespace: str) -> Iterator[str]:
    at = 0
    while found := _PIECE.search(text, at):
        yield text[at : found.start()]
        at = found.end()
        name = found["token"]
        if name and not name.startswith("<["):
            if name not in names.ids:
                raise RequestError(
                    f"the grammar names {name:.60}, which is not a special token of this model"
                )
            yield f"<[{names.ids[name]}]>"
            continue
        yield found[0]
        if found["json"]:
            schema, at = _read_schema(text, at, whitespace)
            yield schema
    yield text[at:]


def _read_schema(text: str, at: int, whitespace: str) -> tuple[str, int]:
    try:
        schema, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        raise RequestError("the grammar has %json without JSON behind it") from None
    if isinstance(schema, dict):
        schema = {"x-guidance": {"whitespace_pattern": whitespace}, **schema}
    return json.dumps(schema), end


def referenced_token_ids(text: str, size: int) -> set[int]:
    """Ids that a grammar of llguidance names: `<[3]>`, `<[3-5,7]>`, `<[^3]>`, `<[*]>`."""
    named: set[int] = set()
    for inner in _IDS.findall(text):
        ids: set[int] = set()
        for part in inner.removeprefix("^").split(","):
            first, dash, last = part.strip().partition("-")
            if first == "*":
                ids |= set(range(size))
            elif first.isdigit() and (last.isdigit() or not dash):
                ids |= set(range(int(first), min(int(last or first), size) + 1))
        named |= set(range(size)) - ids if inner.startswith("^") else ids
    return named
