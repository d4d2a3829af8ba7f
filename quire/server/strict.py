"""Fields of a body that mean nothing to this server: never ignored in silence.

A field is honoured, or refused (quire.server.protocol.fields.LATER), or it ends up here: then the
answer's header X-Quire-Ignored names it, and its name is logged once. Under --strict a name that
nobody knows is a fault of the request; names that other servers know and that change no answer
(`user`, `metadata`) are told of and let pass even so.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from typing import NamedTuple

from quire.errors import RequestError

log = logging.getLogger(__name__)

HEADER = "X-Quire-Ignored"
MOST_SHOWN = 16
MOST_HINTS = 4
MOST_CHARS = 64
MOST_LOGGED = 256


class Ignored(NamedTuple):
    """A field that changes nothing. near: the known field that was perhaps meant."""

    name: str
    is_known: bool
    near: str | None = None


class Teller:
    """Remembers which names were logged. One a process; strangers choose the names."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, ignored: Iterable[Ignored]) -> None:
        """Log each name once."""
        for one in ignored:
            if not one.is_known and one.name not in self._told and len(self._told) < MOST_LOGGED:
                self._told.add(one.name)
                log.warning("ignored the field %.80r of a request%s", one.name, _hint(one))


def find(given: Iterable[str], known: Iterable[str], harmless: frozenset[str]) -> list[Ignored]:
    """Those of the given names that mean nothing, with what was perhaps meant."""
    names = list(known)
    found = [Ignored(name, name in harmless) for name in given]
    for place, one in enumerate(found[:MOST_HINTS]):  # strangers may send a million names
        if not one.is_known:
            found[place] = one._replace(near=_near(one.name, names))
    return found


def refuse(ignored: Iterable[Ignored]) -> None:
    """Raise RequestError for the first name that nobody knows."""
    for one in ignored:
        if not one.is_known:
            message = f"unknown field {one.name!r:.80}{_hint(one)} (this server is strict)"
            raise RequestError(message, param=one.name[:MOST_CHARS])


def header(ignored: Iterable[Ignored]) -> str | None:
    """The value of X-Quire-Ignored; None if nothing was ignored."""
    shown = [_printable(one.name) for one in ignored][:MOST_SHOWN]
    return ",".join(shown) or None


def headers(ignored: Iterable[Ignored]) -> dict[str, str]:
    """The header, if there is something to tell."""
    value = header(ignored)
    return {} if value is None else {HEADER: value}


def _near(name: str, known: list[str]) -> str | None:
    found = difflib.get_close_matches(name[:MOST_CHARS], known, n=1, cutoff=0.7)
    return found[0] if found else None


def _hint(one: Ignored) -> str:
    return f"; did you mean {one.near!r}?" if one.near else ""


def _printable(name: str) -> str:
    """Strangers' words, safe in a header."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "?" for c in name)[
        :MOST_CHARS
    ]
