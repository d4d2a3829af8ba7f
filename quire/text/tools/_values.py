"""Values that models write, told as JSON: strict JSON, JSON with a weak model's slips, literals of
Python, and the notations of families that have their own quotes.

One walk with an explicit stack, so that depth costs no recursion. Strings are scanned as strings:
markup in them is text. What is told is at every moment the beginning of valid JSON, written as
json.dumps would, and a value that was read to its end is valid JSON. Nothing is ever evaluated.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum, auto

from quire.text.tools._source import Cut, Malformed, Source, Tell, Walk

MOST_DEEP = 200
"""Nested brackets: json.loads of those who receive a call must be able to take it."""
MOST_LONG_WORD = 1024

_CLOSE = {"{": "}", "[": "]", "(": ")"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LOOSE_NUMBER = re.compile(r"[+-]?[0-9._]*(?:[eE][+-]?[0-9]+)?|[+-]?0[xXoObB][0-9a-fA-F_]+")
_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", '"': '\\"', "\\": "\\\\"}
_HEX = frozenset("0123456789abcdefABCDEF")


@dataclass(frozen=True, slots=True)
class Language:
    """How values are written."""

    python: bool = False
    """Python's literals: tuples, its escapes and numbers."""
    quotes: tuple[str, ...] = ()
    """Literals that begin and end a string in which nothing is escaped."""
    bare: bool = False
    """Keys without quotes, and words that are strings."""


JSON = Language()
PYTHON = Language(python=True)


class _Want(Enum):
    VALUE = auto()
    FIRST = auto()
    """A value or key, or the end of what was just opened."""
    NEXT = auto()
    """A value or key, or the end after a comma that says nothing."""
    COMMA = auto()


def escaped(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value(src: Source, tell: Tell, language: Language = JSON) -> Walk[None]:
    """Read one value and tell it as JSON. Malformed at the first character that cannot be."""
    stack: list[str] = []
    want = _Want.VALUE
    while True:
        if want is _Want.COMMA and not stack:
            return
        yield from src.space()
        char = yield from src.ahead()
        if want is _Want.COMMA:
            want = _after_value(src, tell, stack, char)
        elif want is not _Want.VALUE and char == stack[-1]:
            _close(src, tell, stack)
            want = _Want.COMMA
        else:
            if want is _Want.NEXT:
                tell(", ")
            if want is not _Want.VALUE and stack[-1] == "}":
                yield from _key(src, tell, language)
                yield from src.space()
                char = yield from src.ahead()
            want = yield from _item(src, tell, language, stack, char)


def _after_value(src: Source, tell: Tell, stack: list[str], char: str) -> _Want:
    if char == ",":
        src.pos += 1
        return _Want.NEXT
    if char != stack[-1]:
        raise Malformed(f"{char!r} where a comma or {stack[-1]!r} belongs")
    _close(src, tell, stack)
    return _Want.COMMA


def _close(src: Source, tell: Tell, stack: list[str]) -> None:
    src.pos += 1
    closing = stack.pop()
    tell("]" if closing == ")" else closing)


def _item(src: Source, tell: Tell, language: Language, stack: list[str], char: str) -> Walk[_Want]:
    """A scalar, or the beginning of an object or array."""
    if char in "{[" or (char == "(" and language.python):
        if len(stack) >= MOST_DEEP:
            raise Malformed(f"nested more than {MOST_DEEP} deep")
        src.pos += 1
        stack.append(_CLOSE[char])
        tell("[" if char == "(" else char)
        return _Want.FIRST
    yield from _scalar(src, tell, language, char)
    return _Want.COMMA


def _key(src: Source, tell: Tell, language: Language) -> Walk[None]:
    char = yield from src.ahead()
    quoted = char in "\"'" or (language.quotes and (yield from _quoted_next(src, language)))
    if quoted:
        yield from _scalar(src, tell, language, char)
    elif language.bare or language.python:
        word = yield from _word(src, bare=language.bare, stop=":")
        if src.over:
            raise Cut
        if not word:
            raise Malformed(f"{char!r} where a key belongs")
        plain = _plain_scalar(word, language) if language.python else word
        if plain is None:
            raise Malformed(f"{word!r} where a key belongs")
        tell(f'"{escaped(plain)}"')
    else:
        raise Malformed(f"{char!r} where a key belongs")
    yield from src.space()
    char = yield from src.ahead()
    if char != ":":
        raise Malformed(f"{char!r} where a colon belongs")
    src.pos += 1
    tell(": ")


def _quoted_next(src: Source, language: Language) -> Walk[bool]:
    return bool((yield from src.literal(language.quotes, take=False)))


def _scalar(src: Source, tell: Tell, language: Language, char: str) -> Walk[None]:
    if language.quotes:
        quote = yield from src.literal(language.quotes, or_cut=True)
        if quote:
            yield from _verbatim(src, tell, quote)
            return
    if char in "\"'":
        yield from string(src, tell, language)
        return
    word = yield from _word(src, bare=language.bare, stop="")
    if src.over:
        if language is JSON and _NUMBER.fullmatch(word):
            tell(word)  # perhaps not all of it, but a beginning in any case
        raise Cut
    plain = _plain_scalar(word, language)
    if plain is None and language.bare and word:
        plain = f'"{escaped(word)}"'
    if plain is None:
        raise Malformed(f"{word or char!r} where a value belongs")
    tell(plain)


def _verbatim(src: Source, tell: Tell, quote: str) -> Walk[None]:
    tell('"')
    yield from src.until((quote,), lambda text: tell(escaped(text)))
    tell('"')


_BARE = re.compile(r"[^,:{}\[\]<>\"'\s]+")
_BARE_VALUE = re.compile(r"[^,{}\[\]<>\"'\n]+")
_TOKEN = re.compile(r"[A-Za-z0-9_+.\-]+")


def _word(src: Source, *, bare: bool, stop: str) -> Walk[str]:
    """A run of the characters that numbers and names are made of; "" if none comes."""
    form = (_BARE if stop else _BARE_VALUE) if bare else _TOKEN
    parts: list[str] = []
    length = 0
    while True:
        src.steps += 1
        found = form.match(src.buf, src.pos)
        if found:
            length += len(found[0])
            if length > MOST_LONG_WORD:
                raise Malformed(f"a number or word of over {MOST_LONG_WORD} characters")
            parts.append(found[0])
            src.pos = found.end()
        if src.pos < len(src.buf) or src.last:
            return "".join(parts).strip()
        yield


def _plain_scalar(word: str, language: Language) -> str | None:
    """A number or a word that stands for a value, as JSON; None if it is neither."""
    if _NUMBER.fullmatch(word):
        return word
    known = _WORDS.get(word) or _PYTHON_WORDS.get(word)
    if known is not None or not language.python:
        return known
    return _python_number(word)


def _python_number(word: str) -> str | None:
    if not word or not _LOOSE_NUMBER.fullmatch(word):
        return None
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return None
    text = repr(number)
    return text if _NUMBER.fullmatch(text) else None


_RUN = {
    '"': re.compile(r'[^"\\\x00-\x1f]+'),
    "'": re.compile(r"[^'\"\\\x00-\x1f]+"),
}


def string(src: Source, tell: Tell, language: Language = JSON) -> Walk[None]:
    """A quoted string, which begins here, told with its quotes."""
    quote = src.buf[src.pos]
    if language.python:
        quote = yield from src.literal((quote * 3, quote * 2, quote))
        if len(quote) == 2:
            if src.over:
                raise Cut  # a third may have been meant to follow
            tell('""')
            return
    else:
        src.pos += 1
    tell('"')
    run = _RUN[quote[0]]
    while True:
        char = yield from src.ahead()
        if found := run.match(src.buf, src.pos):
            src.pos = found.end()
            tell(found[0])
        elif char == "\\":
            yield from (_python_escape if language.python else _escape)(src, tell)
        elif char == quote[0] and (yield from src.literal((quote,), or_cut=True)):
            tell('"')
            return
        else:
            src.pos += 1
            tell(escaped(char))


def _escape(src: Source, tell: Tell) -> Walk[None]:
    """A backslash and what it means in JSON. What JSON does not know stays as it is written."""
    char = yield from src.ahead(1)
    if char == "u" and (yield from _hex(src, 4)):
        text = src.buf[src.pos : src.pos + 6]
        src.pos += 6
        tell(text)
        return
    src.pos += 2
    if char in "/'":
        tell(char)
    else:
        tell(_ESCAPES.get(char) or "\\\\" + escaped(char))


def _hex(src: Source, digits: int) -> Walk[bool]:
    """Whether that many hex digits follow the backslash and the letter."""
    for i in range(digits):
        if (yield from src.ahead(2 + i)) not in _HEX:
            return False
    return True


_PYTHON_ESCAPES = {"a": "\\u0007", "v": "\\u000b", "'": "'", "\n": "", **_ESCAPES}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


def _python_escape(src: Source, tell: Tell) -> Walk[None]:
    char = yield from src.ahead(1)
    digits = _HEX_ESCAPES.get(char)
    if digits and (yield from _hex(src, digits)):
        code = int(src.buf[src.pos + 2 : src.pos + 2 + digits], 16)
        if code <= 0x10FFFF:
            src.pos += 2 + digits
            # half of a pair: escaped, so that the halves join where the JSON is read
            tell(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else escaped(chr(code)))
            return
    src.pos += 2
    known = _PYTHON_ESCAPES.get(char)
    tell(known if known is not None else _octal(char) or "\\\\" + escaped(char))


def _octal(char: str) -> str:
    """Of Python's octal escapes only the null, which is the one that is written."""
    return "\\u0000" if char == "0" else ""


def decoded(src: Source, most: int, what: str) -> Walk[str]:
    """A JSON string as text; Malformed if there is none or it is longer than `most`."""
    char = yield from src.ahead()
    if char not in "\"'":
        raise Malformed(f"{char!r} where {what} belongs")
    parts: list[str] = []
    length = 0

    def tell(text: str) -> None:
        nonlocal length
        length += len(text)
        parts.append(text)
        if length > most:
            raise Malformed(f"{what} is longer than {most} characters")

    yield from string(src, tell)
    text = json.loads("".join(parts))
    assert isinstance(text, str)
    return text


def begun(text: str) -> str:
    """The beginning of a value, as JSON as far as it goes; "" if it is the beginning of none."""
    for language in (JSON, PYTHON):
        src = Source()
        src.push(text, last=True)
        parts: list[str] = []
        try:
            for _ in value(src, parts.append, language):
                raise AssertionError("a whole text has nothing to wait for")
        except Malformed:
            continue
        except Cut:
            pass
        return "".join(parts)
    return ""


def whole(text: str, language: Language = JSON) -> str | None:
    """A whole text that should be one value, as JSON; None if it is not."""
    src = Source()
    src.push(text + " ", last=True)  # the space ends a number
    parts: list[str] = []
    try:
        for _ in value(src, parts.append, language):
            raise AssertionError("a whole text has nothing to wait for")
        for _ in src.space():
            raise AssertionError("a whole text has nothing to wait for")
    except (Malformed, Cut):
        return None
    return "".join(parts) if src.over else None
