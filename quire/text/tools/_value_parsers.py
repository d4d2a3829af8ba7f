"""Parses the values that models write and emits JSON: strict JSON, JSON with a weak model's slips,
literals of Python, and the notations of families that have their own quotes.

One walk with an explicit stack, so that depth costs no recursion. Strings are scanned as strings:
markup in them is text. The emitted text is always the beginning of valid JSON, written as
json.dumps would, and a value that was read to its end is valid JSON. Nothing is ever evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from quire.text.tools._text_cursor import (
    MalformedMarkup,
    ParserCoroutine,
    TextCursor,
    TextSink,
    UnexpectedEnd,
)

MAX_DEPTH = 200
"""Nested brackets: json.loads of a client must be able to read the arguments."""
MAX_WORD_CHARS = 1024

_CLOSE = {"{": "}", "[": "]", "(": ")"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LOOSE_NUMBER = re.compile(r"[+-]?[0-9._]*(?:[eE][+-]?[0-9]+)?|[+-]?0[xXoObB][0-9a-fA-F_]+")
_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", '"': '\\"', "\\": "\\\\"}
_HEX = frozenset("0123456789abcdefABCDEF")


@dataclass(frozen=True, slots=True)
class ValueSyntax:
    """Syntax of values."""

    python: bool = False
    """Python's literals: tuples, its escapes and numbers."""
    quotes: tuple[str, ...] = ()
    """Literals that begin and end a string in which nothing is escaped."""
    bare: bool = False
    """Keys without quotes, and words that are strings."""


JSON = ValueSyntax()
PYTHON = ValueSyntax(python=True)


class _Expected(Enum):
    VALUE = auto()
    FIRST = auto()
    """A value or key, or the end of what was just opened."""
    NEXT = auto()
    """A value or key, or the end after a redundant comma."""
    COMMA = auto()


@dataclass(slots=True)
class _Bracket:
    """A bracket that is open."""

    close: str
    emitted: str
    """Its closing bracket in JSON."""


StringEnd = Callable[[], ParserCoroutine[bool]]
"""Whether the quote at the cursor ends its string, by the text after it."""


def escape_json(text: str) -> str:
    """Text as written between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def parse_value(
    src: TextCursor,
    emit: TextSink,
    language: ValueSyntax = JSON,
    string_end: StringEnd | None = None,
) -> ParserCoroutine[None]:
    """Parse one value and emit it as JSON. Raises MalformedMarkup at the first impossible
    character. string_end: of a Python string that is the whole value."""
    stack: list[_Bracket] = []
    want = _Expected.VALUE
    while True:
        if want is _Expected.COMMA and not stack:
            return
        yield from src.skip_space()
        char = yield from src.peek()
        if want is _Expected.COMMA:
            want = _after_value(src, emit, stack, char)
        elif want is not _Expected.VALUE and char == stack[-1].close:
            _close_bracket(src, emit, stack)
            want = _Expected.COMMA
        else:
            if want is _Expected.NEXT:
                emit(", ")
            if want is not _Expected.VALUE and stack[-1].emitted == "}":
                yield from _parse_key(src, emit, language)
                yield from src.skip_space()
                char = yield from src.peek()
            want = yield from _parse_item(src, emit, language, stack, char, string_end)


def _after_value(src: TextCursor, emit: TextSink, stack: list[_Bracket], char: str) -> _Expected:
    if char == ",":
        src.pos += 1
        return _Expected.NEXT
    if char != stack[-1].close:
        raise MalformedMarkup(f"{char!r} where a comma or {stack[-1].close!r} belongs")
    _close_bracket(src, emit, stack)
    return _Expected.COMMA


def _close_bracket(src: TextCursor, emit: TextSink, stack: list[_Bracket]) -> None:
    src.pos += 1
    emit(stack.pop().emitted)


def _parse_item(
    src: TextCursor,
    emit: TextSink,
    language: ValueSyntax,
    stack: list[_Bracket],
    char: str,
    string_end: StringEnd | None,
) -> ParserCoroutine[_Expected]:
    """A scalar, or the beginning of an object or array."""
    if char in "{[" or (char == "(" and language.python):
        if len(stack) >= MAX_DEPTH:
            raise MalformedMarkup(f"nested more than {MAX_DEPTH} deep")
        src.pos += 1
        if char == "{" and language.python:
            return (yield from _open_dict_or_set(src, emit, stack))
        stack.append(_Bracket(_CLOSE[char], "}" if char == "{" else "]"))
        emit("{" if char == "{" else "[")
        return _Expected.FIRST
    if stack:
        string_end = _followed_by(src, f",{stack[-1].close}")
    yield from _parse_scalar(src, emit, language, char, string_end)
    return _Expected.COMMA


def _open_dict_or_set(
    src: TextCursor, emit: TextSink, stack: list[_Bracket]
) -> ParserCoroutine[_Expected]:
    """The beginning of a dict, or of a set, which is an array in JSON: the text after the first
    item decides."""
    char = yield from src.peek_nonspace()
    if char in "{[(":
        stack.append(_Bracket("}", "]"))
        emit("[")
        return _Expected.FIRST
    if char == "}":
        stack.append(_Bracket("}", "}"))
        emit("{")
        return _Expected.FIRST
    parts: list[str] = []
    yield from _parse_scalar(src, parts.append, PYTHON, char, _followed_by(src, ":,}"))
    item = "".join(parts)
    if (yield from src.peek_nonspace()) != ":":
        stack.append(_Bracket("}", "]"))
        emit(f"[{item}")
        return _Expected.COMMA
    src.pos += 1
    stack.append(_Bracket("}", "}"))
    emit("{" + (item if item.startswith('"') else f'"{escape_json(item)}"') + ": ")
    char = yield from src.peek_nonspace()
    return (yield from _parse_item(src, emit, PYTHON, stack, char, None))


def _followed_by(src: TextCursor, chars: str) -> StringEnd:
    """A string ends where one of these characters follows, after whitespace."""

    def ends() -> ParserCoroutine[bool]:
        return (yield from src.peek_nonspace_after(1))[0] in chars

    return ends


def _parse_key(src: TextCursor, emit: TextSink, language: ValueSyntax) -> ParserCoroutine[None]:
    char = yield from src.peek()
    quoted = char in "\"'" or (language.quotes and (yield from _quoted_next(src, language)))
    if quoted:
        yield from _parse_scalar(src, emit, language, char, _followed_by(src, ":"))
    elif language.bare or language.python:
        word = yield from _read_word(src, bare=language.bare, stop=":")
        if src.at_end:
            raise UnexpectedEnd
        if not word:
            raise MalformedMarkup(f"{char!r} where a key belongs")
        plain = _plain_scalar(word, language) if language.python else word
        if plain is None:
            raise MalformedMarkup(f"{word!r} where a key belongs")
        emit(f'"{escape_json(plain)}"')
    else:
        raise MalformedMarkup(f"{char!r} where a key belongs")
    yield from src.skip_space()
    char = yield from src.peek()
    if char != ":":
        raise MalformedMarkup(f"{char!r} where a colon belongs")
    src.pos += 1
    emit(": ")


def _quoted_next(src: TextCursor, language: ValueSyntax) -> ParserCoroutine[bool]:
    return bool((yield from src.match_literal(language.quotes, take=False)))


def _parse_scalar(
    src: TextCursor,
    emit: TextSink,
    language: ValueSyntax,
    char: str,
    string_end: StringEnd | None,
) -> ParserCoroutine[None]:
    if language.quotes:
        quote = yield from src.match_literal(language.quotes, or_cut=True)
        if quote:
            yield from _parse_verbatim(src, emit, quote)
            return
    if char in "\"'":
        yield from parse_string(src, emit, language, string_end)
        return
    word = yield from _read_word(src, bare=language.bare, stop="")
    if src.at_end:
        if language is JSON and _NUMBER.fullmatch(word):
            emit(word)  # perhaps not all of it, but a beginning in any case
        raise UnexpectedEnd
    plain = _plain_scalar(word, language)
    if plain is None and language.bare and word:
        plain = f'"{escape_json(word)}"'
    if plain is None:
        raise MalformedMarkup(f"{word or char!r} where a value belongs")
    emit(plain)


def _parse_verbatim(src: TextCursor, emit: TextSink, quote: str) -> ParserCoroutine[None]:
    emit('"')
    yield from src.read_until((quote,), lambda text: emit(escape_json(text)))
    emit('"')


_BARE = re.compile(r"[^,:{}\[\]<>\"'\s]+")
_BARE_VALUE = re.compile(r"[^,{}\[\]<>\"'\n]+")
_TOKEN = re.compile(r"[A-Za-z0-9_+.\-]+")


def _read_word(src: TextCursor, *, bare: bool, stop: str) -> ParserCoroutine[str]:
    """A run of the characters that numbers and names are made of; "" if none comes."""
    pattern = (_BARE if stop else _BARE_VALUE) if bare else _TOKEN
    parts: list[str] = []
    length = 0
    while True:
        src.steps += 1
        found = pattern.match(src.buf, src.pos)
        if found:
            length += len(found[0])
            if length > MAX_WORD_CHARS:
                raise MalformedMarkup(f"a number or word of over {MAX_WORD_CHARS} characters")
            parts.append(found[0])
            src.pos = found.end()
        if src.pos < len(src.buf) or src.last:
            return "".join(parts).strip()
        yield


def _plain_scalar(word: str, language: ValueSyntax) -> str | None:
    """A number or a literal name of a value, as JSON; None if it is neither."""
    if _NUMBER.fullmatch(word):
        return word
    known = _WORDS.get(word) or _PYTHON_WORDS.get(word)
    if known is not None or not language.python:
        return known
    return _python_number(word)


def _python_number(word: str) -> str | None:
    if not word or not _LOOSE_NUMBER.fullmatch(word):
        return None
    for base in (0, 10):  # 10: with leading zeros
        try:
            return str(int(word, base))
        except ValueError:
            pass
    try:
        number = float(word)
    except ValueError:
        return None
    text = repr(number)
    return text if _NUMBER.fullmatch(text) else None


_STRING_RUN = {
    '"': re.compile(r'[^"\\\x00-\x1f]+'),
    "'": re.compile(r"[^'\"\\\x00-\x1f]+"),
}


def parse_string(
    src: TextCursor,
    emit: TextSink,
    language: ValueSyntax = JSON,
    string_end: StringEnd | None = None,
) -> ParserCoroutine[None]:
    """A quoted string, which begins here, emitted with its quotes.

    string_end: of a Python string with single quotes; a quote that ends nothing is text, as models
    leave quotes within shell commands unescaped.
    """
    quote = src.buf[src.pos]
    if language.python:
        quote = yield from src.match_literal((quote * 3, quote * 2, quote))
        if len(quote) == 2:
            if src.at_end:
                raise UnexpectedEnd  # a third may have been meant to follow
            emit('""')
            return
    else:
        src.pos += 1
    if not language.python or len(quote) > 1:
        string_end = None
    emit('"')
    run = _STRING_RUN[quote[0]]
    while True:
        char = yield from src.peek()
        if found := run.match(src.buf, src.pos):
            src.pos = found.end()
            emit(found[0])
        elif char == "\\":
            yield from (_parse_python_escape if language.python else _parse_escape)(src, emit)
        elif char == quote[0] and (yield from _ends_string(src, quote, string_end)):
            src.pos += len(quote)
            emit('"')
            return
        else:
            src.pos += 1
            emit(escape_json(char))


def _ends_string(
    src: TextCursor, quote: str, string_end: StringEnd | None
) -> ParserCoroutine[bool]:
    if string_end is not None:
        return (yield from string_end())
    return bool((yield from src.match_literal((quote,), take=False, or_cut=True)))


def _parse_escape(src: TextCursor, emit: TextSink) -> ParserCoroutine[None]:
    """Parse a JSON escape. Escapes that JSON lacks are kept as written."""
    char = yield from src.peek(1)
    if char == "u" and (yield from _is_hex_ahead(src, 4)):
        text = src.buf[src.pos : src.pos + 6]
        src.pos += 6
        emit(text)
        return
    src.pos += 2
    if char in "/'":
        emit(char)
    else:
        emit(_ESCAPES.get(char) or "\\\\" + escape_json(char))


def _is_hex_ahead(src: TextCursor, digits: int) -> ParserCoroutine[bool]:
    """Whether that many hex digits follow the backslash and the letter."""
    for i in range(digits):
        if (yield from src.peek(2 + i)) not in _HEX:
            return False
    return True


_PYTHON_ESCAPES = {"a": "\\u0007", "v": "\\u000b", "'": "'", "\n": "", **_ESCAPES}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


def _parse_python_escape(src: TextCursor, emit: TextSink) -> ParserCoroutine[None]:
    char = yield from src.peek(1)
    digits = _HEX_ESCAPES.get(char)
    if digits and (yield from _is_hex_ahead(src, digits)):
        code = int(src.buf[src.pos + 2 : src.pos + 2 + digits], 16)
        if code <= 0x10FFFF:
            src.pos += 2 + digits
            # half of a pair: escaped, so that the halves join where the JSON is read
            emit(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else escape_json(chr(code)))
            return
    src.pos += 2
    known = _PYTHON_ESCAPES.get(char)
    emit(known if known is not None else _octal_escape(char) or "\\\\" + escape_json(char))


def _octal_escape(char: str) -> str:
    """Parse the null escape, the only octal escape of Python that models write."""
    return "\\u0000" if char == "0" else ""


def read_string(src: TextCursor, max_chars: int, what: str) -> ParserCoroutine[str]:
    """A JSON string as text; MalformedMarkup if there is none or it is longer than `most`."""
    char = yield from src.peek()
    if char not in "\"'":
        raise MalformedMarkup(f"{char!r} where {what} belongs")
    parts: list[str] = []
    length = 0

    def emit(text: str) -> None:
        nonlocal length
        length += len(text)
        parts.append(text)
        if length > max_chars:
            raise MalformedMarkup(f"{what} is longer than {max_chars} characters")

    yield from parse_string(src, emit)
    text = json.loads("".join(parts))
    assert isinstance(text, str)
    return text


def json_prefix(text: str) -> str:
    """Return the longest JSON prefix of a partial value; "" if there is none."""
    for language in (JSON, PYTHON):
        src = TextCursor()
        src.push(text, last=True)
        parts: list[str] = []
        try:
            for _ in parse_value(src, parts.append, language):
                raise AssertionError("a whole text has nothing to wait for")
        except MalformedMarkup:
            continue
        except UnexpectedEnd:
            pass
        return "".join(parts)
    return ""


def to_json(text: str, language: ValueSyntax = JSON) -> str | None:
    """A whole text that should be one value, as JSON; None if it is not."""
    src = TextCursor()
    src.push(text + " ", last=True)  # the space ends a number
    parts: list[str] = []
    try:
        for _ in parse_value(src, parts.append, language):
            raise AssertionError("a whole text has nothing to wait for")
        for _ in src.skip_space():
            raise AssertionError("a whole text has nothing to wait for")
    except (MalformedMarkup, UnexpectedEnd):
        return None
    return "".join(parts) if src.at_end else None
