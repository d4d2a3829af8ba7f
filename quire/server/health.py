"""Probes: whether this process answers, the engine lives, and a request that comes now would be
worked on.

They ask nobody. The engine's thread beats on a page that this process reads (quire.engine.pulse),
so a probe never waits behind work, and is answered while the engine hangs. They need no key, so
they tell no numbers of what is done here.

    /live      this process answers at all
    /startup   the server was ready once; 200 for ever then
    /health    the engine lives, or another is being started in its place
    /ready     a request that comes now would be worked on

Load is no reason against /ready: who is one too many gets 429 by itself, and a server that left its
balancer for being busy would leave its share to the others, which are as busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.client import EngineClient
from quire.engine.pulse import Beat
from quire.engine.watch import PATIENCE, Trouble, state_of, trouble
from quire.server.errors import scrub
from quire.server.sse import encode

router = APIRouter(tags=["health"])

SILENCE_S = 60.0
"""An engine that works and gets nothing done for so long, beyond what its step may take, is ill."""


class Health:
    """What this process knows of the server. Written by the event loop."""

    def __init__(self, engine: EngineClient, read: Callable[[], Beat] | None = None) -> None:
        """read: the engine's page; None: the engine is in this process, and tells of itself."""
        self.draining = False
        """It is about to end."""
        self.started = False
        """It has been ready once."""
        self._engine = engine
        self._read = read

    def against_ready(self) -> Trouble | None:
        """Why a request that comes now would not be worked on."""
        found = self._against_engine()
        if found is None and self.draining:
            found = Trouble("draining", "the server is shutting down")
        if found is None and self._engine.away is not None:
            found = Trouble("restarting", "the engine is being restarted")
        if found is None and self._engine.asleep:
            message = "the engine is asleep or paused: POST /wake_up or /resume"
            found = Trouble("paused" if self._engine.paused else "asleep", message)
        if found is None and self._read is not None:
            beat = self._read()
            found = trouble(beat, time.monotonic_ns(), state_of(beat.pid))
        self.started |= found is None
        return found

    def against_health(self) -> Trouble | None:
        """Why nothing will come of this engine."""
        found = self._against_engine()
        if found is None and self._engine.away is None and self._read is not None:
            beat = self._read()
            silent = time.monotonic_ns() - beat.progress_at
            if silent > SILENCE_S * 1e9 + PATIENCE * beat.expected_ns and not beat.excused_at:
                found = _silent(silent / 1e9)
        return found

    def against_startup(self) -> Trouble | None:
        """Why the server has not started."""
        return None if self.started else self.against_ready()

    def _against_engine(self) -> Trouble | None:
        engine = self._engine
        if engine.dead is not None:
            return Trouble("dead", scrub(str(engine.dead)))
        silent_s = time.monotonic() - engine.beat
        if self._read is None and engine.away is None and silent_s > SILENCE_S:
            return _silent(silent_s)
        return None


def _silent(seconds: float) -> Trouble:
    return Trouble("silent", f"the engine gave no sign of life for {seconds:.0f} seconds")


def answer(found: Trouble | None, **more: Any) -> Response:
    """Empty if all is well; else 503, and why."""
    if found is None:
        return Response()
    return Response(body(found, **more), HTTPStatus.SERVICE_UNAVAILABLE, None, "application/json")


def body(found: Trouble, **more: Any) -> bytes:
    """What is wrong, for programs and for people. more: fields beside."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    error = {"message": found.message, "type": "ServiceUnavailableError", "param": None}
    return encode({"reason": found.code, **more, "error": {**error, "code": int(status)}})


def _health(http: Request) -> Health:
    found = http.app.state.health
    assert isinstance(found, Health), found
    return found


@router.get("/live")
async def live() -> Response:
    """200 while this process answers at all."""
    return Response()


@router.get("/startup")
async def startup(http: Request) -> Response:
    """200 since the server was ready for the first time, else 503 and what it is at."""
    return answer(_health(http).against_startup())


@router.get("/health")
async def health(http: Request) -> Response:
    """200 while the engine lives, or another is being started in its place; else 503 and why."""
    return answer(_health(http).against_health())


@router.get("/ready")
async def ready(http: Request) -> Response:
    """200 while a request that comes now would be worked on, else 503 and why."""
    return answer(_health(http).against_ready())


@router.get("/ping")
@router.post("/ping")
async def ping(http: Request) -> Response:
    """As /health."""
    return answer(_health(http).against_health())
