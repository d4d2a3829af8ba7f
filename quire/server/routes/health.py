"""Health probes: liveness of this process, health of the engine, and readiness for requests.

They send no message. The engine's thread writes heartbeats to a page that this process reads
(quire.engine.heartbeat_page), so a probe never waits behind work, and is answered while the engine
hangs. They need no key, so they show no numbers.

    /live      this process answers at all
    /startup   the server was ready once; 200 for ever then
    /health    the engine is alive, or another is being started in its place
    /ready     a new request would be worked on

Load does not affect /ready: requests beyond the limits get 429, and a busy server that left its
balancer would leave its share to the others, which are as busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.client.engine_pool import EnginePool
from quire.engine.heartbeat_page import Heartbeat
from quire.engine.supervise.liveness import (
    ALIVE_STEP_FACTOR,
    Unhealthy,
    check_readiness,
)
from quire.platform.processes import process_state
from quire.server.errors import redact_server_fault
from quire.server.formats.sse import encode

router = APIRouter(tags=["health"])

NO_PROGRESS_TIMEOUT_S = 60.0
"""An engine that works and gets nothing done for so long, beyond what its step may take, is ill."""


class HealthState:
    """State of the server as this process knows it. Written by the event loop."""

    def __init__(self, engine: EnginePool, read: Sequence[Callable[[], Heartbeat]] = ()) -> None:
        """read: read the pages of the first engines, those of this node; others have none.

        (): the engine is in this process.
        """
        self.draining = False
        """It is about to end."""
        self.started = False
        """It has been ready once."""
        self._engine = engine
        self._read_heartbeats = tuple(read)

    def readiness_problem(self) -> Unhealthy | None:
        """Why a request that comes now would not be worked on."""
        found = self._engine_problem()
        if found is None and self.draining:
            found = Unhealthy("draining", "the server is shutting down")
        if found is None and self._engine.restart_reason is not None:
            found = Unhealthy("restarting", "the engine is being restarted")
        if found is None and self._engine.is_sleeping:
            message = "the engine is asleep or paused: POST /wake_up or /resume"
            found = Unhealthy("paused" if self._engine.is_paused else "asleep", message)
        if found is None:
            now = time.monotonic_ns()
            found = self._shared_problem(lambda b: check_readiness(b, now, process_state(b.pid)))
        self.started |= found is None
        return found

    def engine_problem(self, rank: int, *, new_request: bool) -> Unhealthy | None:
        """Why nothing will come of one of several engines, or of a new request to it.

        Raises RequestError if there is no such engine.
        """
        engine = self._engine.engine_of(rank)
        client = self._engine.clients[engine]
        if client.dead_error is not None:
            return Unhealthy("dead", redact_server_fault(str(client.dead_error)))
        if client.restart_reason is not None:
            return Unhealthy("restarting", "the engine is being restarted") if new_request else None
        if new_request and self._engine.is_draining(engine):
            return Unhealthy("draining", "the engine is drained: POST /undrain_engine")
        if engine >= len(self._read_heartbeats):
            return self._silence_problem(client.last_heartbeat_at)
        beat, now = self._read_heartbeats[engine](), time.monotonic_ns()
        if new_request:
            return check_readiness(beat, now, process_state(beat.pid))
        return _progress_problem(beat)

    def health_problem(self) -> Unhealthy | None:
        """Why nothing will come of this engine."""
        found = self._engine_problem()
        if found is None and self._engine.restart_reason is None:
            found = self._shared_problem(_progress_problem)
        return found

    def startup_problem(self) -> Unhealthy | None:
        """Why the server has not started."""
        return None if self.started else self.readiness_problem()

    def _shared_problem(self, check: Callable[[Heartbeat], Unhealthy | None]) -> Unhealthy | None:
        """What is wrong with all engines that answer; None: one of them is well."""
        if not self._read_heartbeats:
            return None
        local, problems = len(self._read_heartbeats), []
        for i in self._engine.usable:
            if i < local:
                problems.append(check(self._read_heartbeats[i]()))
            else:  # its node watches it
                problems.append(self._silence_problem(self._engine.clients[i].last_heartbeat_at))
        return problems[0] if problems and all(problems) else None

    def _engine_problem(self) -> Unhealthy | None:
        engine = self._engine
        if engine.dead_error is not None:
            return Unhealthy("dead", redact_server_fault(str(engine.dead_error)))
        if not self._read_heartbeats and engine.restart_reason is None:
            return self._silence_problem(engine.last_heartbeat_at)
        return None

    def _silence_problem(self, heard_at: float) -> Unhealthy | None:
        silent_s = time.monotonic() - heard_at
        return _no_progress_problem(silent_s) if silent_s > NO_PROGRESS_TIMEOUT_S else None


def _progress_problem(beat: Heartbeat) -> Unhealthy | None:
    silent = time.monotonic_ns() - beat.progress_at
    limit = NO_PROGRESS_TIMEOUT_S * 1e9 + ALIVE_STEP_FACTOR * beat.expected_ns
    if silent > limit and not beat.unbounded_since:
        return _no_progress_problem(silent / 1e9)
    return None


def _no_progress_problem(seconds: float) -> Unhealthy:
    return Unhealthy("silent", f"the engine gave no sign of life for {seconds:.0f} seconds")


def build_probe_response(found: Unhealthy | None, **more: Any) -> Response:
    """Empty if all is well; else 503, and why."""
    if found is None:
        return Response()
    return Response(
        encode_problem(found, **more), HTTPStatus.SERVICE_UNAVAILABLE, None, "application/json"
    )


def encode_problem(found: Unhealthy, **more: Any) -> bytes:
    """Encode a problem with its kind and its message. more: further fields."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    error = {"message": found.message, "type": "ServiceUnavailableError", "param": None}
    return encode({"reason": found.code, **more, "error": {**error, "code": int(status)}})


def _get_health_state(http: Request) -> HealthState:
    found = http.app.state.health
    assert isinstance(found, HealthState), found
    return found


@router.get("/live")
async def live() -> Response:
    """200 while this process answers at all."""
    return Response()


@router.get("/startup")
async def startup(http: Request) -> Response:
    """200 since the server was ready for the first time, else 503 and what it is at."""
    return build_probe_response(_get_health_state(http).startup_problem())


@router.get("/health")
async def health(http: Request, engine: int | None = None) -> Response:
    """200 while the engine lives, or another is being started in its place; else 503 and why.

    engine: the rank of one of several; without it, one that lives is enough.
    """
    state = _get_health_state(http)
    if engine is not None:
        return build_probe_response(state.engine_problem(engine, new_request=False))
    return build_probe_response(state.health_problem())


@router.get("/ready")
async def ready(http: Request, engine: int | None = None) -> Response:
    """200 while a request that comes now would be worked on, else 503 and why.

    engine: the rank of one of several.
    """
    state = _get_health_state(http)
    problem = state.readiness_problem()
    if engine is not None and problem is None:
        problem = state.engine_problem(engine, new_request=True)
    return build_probe_response(problem)


@router.get("/ping")
@router.post("/ping")
async def ping(http: Request) -> Response:
    """As /health."""
    return build_probe_response(_get_health_state(http).health_problem())
