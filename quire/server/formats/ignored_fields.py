"""Reports fields of a body that have no effect on this server: none is ignored silently.

A field is honoured, or refused (quire.server.formats.request_body.UNSUPPORTED_FIELDS), or ignored:
then the header X-Quire-Ignored of the answer names it, and its name is logged once. Under --strict
an unknown name is refused; names that other servers have and that change no answer (`user`,
`metadata`) are reported and accepted even so.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from typing import NamedTuple

from quire.errors import RequestError

log = logging.getLogger(__name__)

IGNORED_HEADER = "X-Quire-Ignored"
MAX_LISTED = 16
MAX_SUGGESTIONS = 4
MAX_NAME_CHARS = 64
MAX_LOGGED = 256


class IgnoredField(NamedTuple):
    """A field that changes nothing. near: the known field that was perhaps meant."""

    name: str
    is_known: bool
    near: str | None = None


class IgnoredFieldLog:
    """Remembers which names were logged. One a process; clients choose the names."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log_once(self, ignored: Iterable[IgnoredField]) -> None:
        """Log each name once."""
        for one in ignored:
            if not one.is_known and one.name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(one.name)
                log.warning(
                    "ignored the field %.80r of a request%s", one.name, _format_suggestion(one)
                )


def find_ignored(
    given: Iterable[str], known: Iterable[str], harmless: frozenset[str]
) -> list[IgnoredField]:
    """Return the given names without a meaning, each with the name that was perhaps meant."""
    names = list(known)
    found = [IgnoredField(name, name in harmless) for name in given]
    for place, one in enumerate(found[:MAX_SUGGESTIONS]):  # clients may send a million names
        if not one.is_known:
            found[place] = one._replace(near=_closest_name(one.name, names))
    return found


def refuse_unknown(ignored: Iterable[IgnoredField]) -> None:
    """Raise RequestError for the first unknown name."""
    for one in ignored:
        if not one.is_known:
            message = (
                f"unknown field {one.name!r:.80}{_format_suggestion(one)} (this server is strict)"
            )
            raise RequestError(message, param=one.name[:MAX_NAME_CHARS])


def ignored_header_value(ignored: Iterable[IgnoredField]) -> str | None:
    """The value of X-Quire-Ignored; None if nothing was ignored."""
    shown = [_printable(one.name) for one in ignored][:MAX_LISTED]
    return ",".join(shown) or None


def ignored_headers(ignored: Iterable[IgnoredField]) -> dict[str, str]:
    """The header, if a field was ignored."""
    value = ignored_header_value(ignored)
    return {} if value is None else {IGNORED_HEADER: value}


def _closest_name(name: str, known: list[str]) -> str | None:
    found = difflib.get_close_matches(name[:MAX_NAME_CHARS], known, n=1, cutoff=0.7)
    return found[0] if found else None


def _format_suggestion(one: IgnoredField) -> str:
    return f"; did you mean {one.near!r}?" if one.near else ""


def _printable(name: str) -> str:
    """Names from clients, safe in a header."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "?" for c in name)[
        :MAX_NAME_CHARS
    ]
