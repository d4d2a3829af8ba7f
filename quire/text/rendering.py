"""Chat templates that strangers bring are parsed and rendered here: a worker's side, and the words.

    API process (quire.text.renderers)     worker
    Render                         ──▶
                                   ◀──     Rendered, Refused, TooBig, or its end: it took too much

The worker has the template, the messages and nothing else: no key in its environment, no file, no
socket but this one, no way to others (quire.workers.closed). Values travel as JSON within the
words: numbers of any size and halves of surrogate pairs come through.
"""

from __future__ import annotations

import ctypes
import gc
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
from quire.workers.limits import Limits, be_one_of_many
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


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """text: as JSON."""

    text: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The template or what it was given is at fault."""

    message: str
    param: str | None = None


class TooBig(msgspec.Struct, frozen=True, tag=True):
    """It met the limit of memory. The worker ends."""


Word = Render | Rendered | Refused | TooBig
WORDS: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)


def main(fd: int) -> int:
    """Work until the other end is gone; the exit status."""
    be_one_of_many("quire-templates")
    with suppress(OSError):
        os.nice(NICE)
    pipe = Pipe(socket.socket(fileno=fd), WORDS)
    desk = _Desk()
    _open_what_is_opened_late()
    close_doors()
    gc.freeze()
    try:
        while isinstance(job := pipe.receive(), Render):
            pipe.send(desk.carry_out(job))
            if desk.spoilt:
                return 1
    except OSError:
        return 1  # nobody is there to be told
    return 0


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


class _Desk:
    """Where jobs are done, one at a time."""

    def __init__(self) -> None:
        self._limits = Limits()
        self._held = self._limits.held() or 0
        self._kept: OrderedDict[tuple[str, str], ChatTemplate] = OrderedDict()
        self.spoilt = False
        """Nothing more can be done here."""

    def carry_out(self, job: Render) -> Word:
        self._limits.set(job.seconds, job.memory)
        try:
            text = self._template(job).render(**json.loads(job.call))
            if len(text) > job.most:
                said = f"makes {len(text)} characters; this server reads at most {job.most}"
                return Refused(f"the chat template {said}", "chat_template")
            word: Word = Rendered(json.dumps(text).encode())
        except RequestError as error:
            word = Refused(str(error)[:2000], error.param)
        except MemoryError:
            self.spoilt = True
            return TooBig()
        gc.collect()
        if (self._limits.held() or 0) - self._held > GROWTH:
            self.spoilt = True  # another begins with less
        return word

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
