"""Redacts error messages: they show no paths of this server, no memory addresses and no stacks.

Two filters. A fault of the server may quote anything, so everything that looks like a path is
removed. A fault of the client is quoted in its own words, which may look like paths (routes do),
so only paths of this process are removed. quire.server.errors is the only writer of error bodies
and passes every message through one of the two.
"""

from __future__ import annotations

import functools
import os
import re
import site
import sys
import tempfile
from pathlib import Path

REDACTED = "..."

_ADDRESS = r"0x[0-9a-fA-F]{6,}"
_STACK = r'Traceback \(most recent call last\):|File "[^"]*", line \d+(?:, in \S+)?'
_PATH = r"(?<![\w/:.])/(?:[\w.~+-]+/)+[\w.~+-]*"
_SENSITIVE = re.compile(f"{_STACK}|{_ADDRESS}|{_PATH}")


def redact_server_error(message: str) -> str:
    """A message of something that went wrong here, without paths, addresses and stacks."""
    return _SENSITIVE.sub(REDACTED, message)


def redact_client_error(message: str) -> str:
    """A message about what a client sent, without this process's own."""
    return _own_paths_pattern().sub(REDACTED, message)


@functools.cache
def _own_paths_pattern() -> re.Pattern[str]:
    package = Path(__file__).resolve().parents[2]
    found = {sys.prefix, sys.base_prefix, str(package), str(Path.home()), tempfile.gettempdir()}
    found |= {*site.getsitepackages(), os.getcwd()}
    places = sorted((place for place in found if place.count("/") > 1 or len(place) > 3), key=len)
    paths = "|".join(rf"{re.escape(place)}(?:/[\w.~+-]*)*" for place in reversed(places))
    return re.compile(f"{_STACK}|{_ADDRESS}|(?<![\\w/:.])(?:{paths})")
