"""Worker process that parses and renders chat templates from requests, and its messages.

    API process (quire.text.templates.render_pool)     worker
                                   ◀──     RenderWorkerReady
    RenderJob                      ──▶
                                   ◀──     RenderResult, JobRefused, JobOutOfMemory or JobFailed, or
                                           its end: it took too much

The worker has the template, the messages and nothing else: no key in its environment, no file, no
socket but this one, no way to others (quire.sandbox.landlock). Values travel as JSON within the
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
from quire.sandbox.landlock import restrict_process
from quire.sandbox.limits import setup_worker_process
from quire.sandbox.pipe import WorkerPipe
from quire.sandbox.worker_loop import JobFailed, JobOutOfMemory, JobRefused, WorkerLoop
from quire.text.templates import jinja_sandbox
from quire.text.templates.chat_template import ChatTemplate

CACHE_SIZE = 8
"""Templates that stay parsed."""
MAX_MEMORY_GROWTH = 1 << 26
"""Bytes that jobs may leave behind, all together: then the worker ends."""
NICENESS = 5
"""Lower priority than engines and API processes."""


class RenderJob(msgspec.Struct, frozen=True, tag=True):
    """Render this. call: JSON, what ChatTemplate.render takes by name."""

    source: str
    special: dict[str, Any]
    arguments: bytes
    max_chars: int
    """Characters of the result."""
    seconds: float
    """Of processor time."""
    memory: int
    """Bytes beyond what the worker has."""


class RenderWorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The worker is there, and takes jobs."""


class RenderResult(msgspec.Struct, frozen=True, tag=True):
    """text: as JSON."""

    text: bytes


RenderMessage = (
    RenderJob | RenderWorkerReady | RenderResult | JobRefused | JobOutOfMemory | JobFailed
)
RENDER_DECODER: msgspec.msgpack.Decoder[RenderMessage] = msgspec.msgpack.Decoder(RenderMessage)


def main(fd: int) -> int:
    """Run jobs until the other end closes. Returns the exit status."""
    setup_worker_process("quire-templates")
    with suppress(OSError):
        os.nice(NICENESS)
    pipe = WorkerPipe(socket.socket(fileno=fd), RENDER_DECODER)
    loop = WorkerLoop(RenderJob, _RecentTemplates().render, growth=MAX_MEMORY_GROWTH)
    _preload()
    restrict_process()
    return loop.serve(pipe, RenderWorkerReady())


def _preload() -> None:
    """The time zone, modules that Jinja imports when it first needs them, libraries to unwind."""
    source = (
        "{% for m in messages %}{{ m.role }}{{ m | tojson }}{{ strftime_now('%c') }}{% endfor %}"
    )
    ChatTemplate(source).render([{"role": "user", "content": "a"}])
    with suppress(RequestError):
        ChatTemplate("{% if %}")
    with suppress(OSError):
        ctypes.CDLL("libgcc_s.so.1")  # a thread's end would look for it


class _RecentTemplates:
    """Templates that were used lately, parsed."""

    def __init__(self) -> None:
        self._templates: OrderedDict[tuple[str, str], ChatTemplate] = OrderedDict()

    def render(self, job: RenderJob) -> RenderResult:
        text = self._template(job).render(**json.loads(job.arguments))
        if len(text) > job.max_chars:
            said = f"makes {len(text)} characters; this server reads at most {job.max_chars}"
            raise RequestError(f"the chat template {said}", param="chat_template")
        return RenderResult(json.dumps(text).encode())

    def _template(self, job: RenderJob) -> ChatTemplate:
        key = job.source, json.dumps(job.special, sort_keys=True)
        made = self._templates.get(key)
        if made is None:
            made = self._templates[key] = ChatTemplate(job.source, job.special)
            if len(self._templates) > CACHE_SIZE:
                self._templates.popitem(last=False)
        return made


def encode_arguments(call: dict[str, Any]) -> bytes:
    """What ChatTemplate.render takes, for a Render. Raises RequestError: nested too deep."""
    return json.dumps(jinja_sandbox.to_plain_data(call)).encode()
