"""Ray Serve: replicas of `quire serve`, which Ray places, watches and scales.

    serve run deploy.ray.serve_app:build gpus=2 flags="Qwen/Qwen3-8B --tensor-parallel-size 2"

Each replica runs a server of its own, on a Unix socket, and passes requests on to it: all routes,
streams, errors and the recovery of an engine are those of `quire serve`. Ray restarts a replica
whose server ends. Ray's HTTP proxy costs some milliseconds for each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpcore
from starlette.requests import Request
from starlette.responses import StreamingResponse

HOP_BY_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
"""Headers of one connection: not those of the next."""
HEALTH_LIMIT_S = 5.0


class ServerProxy:
    """A `quire serve` process on a Unix socket, and requests to it."""

    def __init__(self, command: Sequence[str]) -> None:
        """command: of a server; `--uds PATH` is added."""
        self._folder = tempfile.TemporaryDirectory(prefix="quire-replica-")
        self._path = f"{self._folder.name}/http.sock"
        self._command = (*command, "--uds", self._path)
        self._process: asyncio.subprocess.Process | None = None
        self._pool = httpcore.AsyncConnectionPool(
            uds=self._path, max_connections=None, keepalive_expiry=60
        )

    async def start(self) -> None:
        """Start the server; return when it can serve. Raises RuntimeError if it ends first."""
        self._process = await asyncio.create_subprocess_exec(*self._command)
        while await self._get("/ready") != 200:
            if self._process.returncode is not None:
                raise RuntimeError(f"quire serve has ended with {self._process.returncode}")
            await asyncio.sleep(0.2)

    async def check_health(self) -> None:
        """Raise RuntimeError if the server is gone or cannot serve any more."""
        assert self._process is not None
        if self._process.returncode is not None:
            raise RuntimeError(f"quire serve has ended with {self._process.returncode}")
        status = await self._get("/health")
        if status != 200:
            raise RuntimeError(f"/health answers {status}")

    async def stop(self) -> None:
        """End the server: running requests have their --shutdown-timeout."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
        await self._pool.aclose()
        self._folder.cleanup()

    async def _get(self, path: str) -> int | None:
        with contextlib.suppress(httpcore.NetworkError, httpcore.ProtocolError, TimeoutError):
            async with asyncio.timeout(HEALTH_LIMIT_S):
                return (await self._pool.request("GET", f"http://quire{path}")).status
        return None

    async def forward(self, http: Request) -> StreamingResponse:
        """Pass a request on. A client that leaves closes the request to the server too."""
        path = http.url.path + (f"?{http.url.query}" if http.url.query else "")
        request = httpcore.Request(
            http.method,
            f"http://quire{path}",
            headers=[(k, v) for k, v in http.headers.raw if k not in HOP_BY_HOP],
            content=http.stream(),
        )
        answer = await self._pool.handle_async_request(request)
        headers = [(k, v) for k, v in answer.headers if k.lower() not in HOP_BY_HOP]
        found = StreamingResponse(_content(answer), answer.status)
        found.raw_headers = headers
        return found


async def _content(answer: httpcore.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_stream():
            yield piece
    finally:
        await answer.aclose()


class Replica:
    """One replica of the deployment."""

    async def __init__(self, flags: str) -> None:
        command = (sys.executable, "-m", "quire", "serve", *shlex.split(flags))
        self._server = ServerProxy(command)
        await self._server.start()

    async def __call__(self, http: Request) -> StreamingResponse:
        return await self._server.forward(http)

    async def check_health(self) -> None:
        """Called by Ray Serve."""
        await self._server.check_health()

    async def __del__(self) -> None:
        """Called by Ray Serve at the end of the replica."""
        await self._server.stop()


def build(arguments: dict[str, Any]) -> Any:
    """Return the application. Arguments: model and flags of `quire serve`; gpus of a replica, as
    many as its flags use; max_replicas."""
    from ray import serve

    deployment = serve.deployment(
        name="quire",
        max_ongoing_requests=512,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=60,
        autoscaling_config={
            "min_replicas": 1,
            "max_replicas": int(arguments.get("max_replicas", 1)),
            "target_ongoing_requests": 64,
        },
        ray_actor_options={"num_cpus": 0, "num_gpus": float(arguments.get("gpus", 1))},
    )(Replica)
    return deployment.bind(str(arguments["flags"]))
