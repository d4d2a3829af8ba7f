"""Chat templates that strangers bring are parsed and rendered here: a worker's side, and the words.

    API process (quire.text.renderers)     worker
                                   ◀──     Began
    Render                         ──▶
                                   ◀──     Rendered, Refused, TooBig, Failed, or its end: it took
                                           too much

The worker has the template, the messages and nothing else: no key in its environment, no file, no
socket but this one, no way to others (quire.workers.closed). Values travel as JSON within the
words: numbers of any size and halves of surrogate pairs come through.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import msgspec

from quire.errors import RequestError
from quire.text import sandbox
from quire.text.chat import ChatTemplate
from quire.workers.closed import close_doors
from quire.workers.desk import Desk, Failed, Refused, TooBig
from quire.workers.limits import be_one_of_many
from quire.workers.pipe import Pipe

KEPT = 8
"""Templates that stay parsed."""
GROWTH = 1 << 26
"""Bytes that jobs may leave behind, all together: then the worker ends."""
NICE = 5
"""Behind engines and those who answer, but not behind everybody."""


class Render(msgspec.Struct, frozen=True, tag=True):
    """Render this. call: JSON, what ChatTemplate.render takes by name."""

    source: str
    special: dict[str, Any]
    call: bytes
    most: int
    """Characters of the result."""
    seconds: float
    """Of processor time."""
    memory: int
    """Bytes beyond what the worker has."""


class Began(msgspec.Struct, frozen=True, tag=True):
    """The worker is there, and takes jobs."""


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """text: as JSON."""

    text: bytes


Word = Render | Began | Rendered | Refused | TooBig | Failed
WORDS: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)


def main(fd: int) -> int:
    """Work until the other end is gone; the exit status."""
    be_one_of_many("quire-templates")
    with suppress(OSError):
        os.nice(NICE)
    pipe = Pipe(socket.socket(fileno=fd), WORDS)
    desk = Desk(Render, _Shelf().render, growth=GROWTH)
    _open_what_is_opened_late()
    close_doors()
    return desk.work(pipe, Began())


def _open_what_is_opened_late() -> None:
    """The time zone, modules that Jinja imports when it first needs them, libraries to unwind."""
    source = (
        "{% for m in messages %}{{ m.role }}{{ m | tojson }}{{ strftime_now('%c') }}{% endfor %}"
    )
    ChatTemplate(source).render([{"role": "user", "content": "a"}])
    with suppress(RequestError):
        ChatTemplate("{% if %}")
    with suppress(OSError):
        ctypes.CDLL("libgcc_s.so.1")  # a thread's end would look for it


class _Shelf:
    """Templates that were used lately, parsed."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], ChatTemplate] = OrderedDict()

    def render(self, job: Render) -> Rendered:
        text = self._template(job).render(**json.loads(job.call))
        if len(text) > job.most:
            said = f"makes {len(text)} characters; this server reads at most {job.most}"
            raise RequestError(f"the chat template {said}", param="chat_template")
        return Rendered(json.dumps(text).encode())

    def _template(self, job: Render) -> ChatTemplate:
        key = job.source, json.dumps(job.special, sort_keys=True)
        made = self._kept.get(key)
        if made is None:
            made = self._kept[key] = ChatTemplate(job.source, job.special)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made


def dumped(call: dict[str, Any]) -> bytes:
    """What ChatTemplate.render takes, for a Render. Raises RequestError: nested too deep."""
    return json.dumps(sandbox.plain(call)).encode()
