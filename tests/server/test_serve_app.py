"""deploy/ray/serve_app.py: what a replica of Ray Serve passes on, over a server of a few lines."""

import asyncio
import importlib.util
import pathlib
import sys

import httpcore
import httpx
import pytest
from fastapi import FastAPI, Request

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVER = """
import asyncio, os, sys
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

app = FastAPI()

@app.get("/ready")
@app.get("/health")
def health():
    return {}

@app.get("/end")
def end():
    os._exit(3)

@app.post("/echo")
async def echo(http: Request):
    body = await http.body()
    headers = {"x-query": http.url.query, "x-key": http.headers["authorization"]}
    return Response(body, 418, headers)

@app.get("/stream")
async def stream():
    async def pieces():
        for i in range(3):
            yield b"data: %d\\n\\n" % i
            await asyncio.sleep(0)
    return StreamingResponse(pieces(), media_type="text/event-stream")

uvicorn.run(app, uds=sys.argv[2], log_level="error")
"""


@pytest.fixture(scope="module")
def serve_app():
    spec = importlib.util.spec_from_file_location("serve_app", ROOT / "deploy/ray/serve_app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_requests_streams_and_ends_pass_through(serve_app):
    async def run():
        server = serve_app.ServerProxy([sys.executable, "-c", SERVER])
        await server.start()
        app = FastAPI()

        @app.api_route("/{path:path}", methods=["GET", "POST"])
        async def forward(http: Request):
            return await server.forward(http)

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://ray") as client:
            answer = await client.post(
                "/echo?a=1&b=2", content=b"body", headers={"authorization": "Bearer k"}
            )
            assert (answer.status_code, answer.content) == (418, b"body")
            assert (answer.headers["x-query"], answer.headers["x-key"]) == ("a=1&b=2", "Bearer k")
            answer = await client.get("/stream")
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
            await server.check_health()
            with pytest.raises((httpcore.NetworkError, httpcore.RemoteProtocolError)):
                await client.get("/end")
        await server._process.wait()
        with pytest.raises(RuntimeError, match="quire serve has ended with 3"):
            await server.check_health()
        await server.stop()
        assert not pathlib.Path(server._folder.name).exists()

    asyncio.run(run())


def test_a_server_that_cannot_start_fails_the_replica(serve_app):
    async def run():
        server = serve_app.ServerProxy([sys.executable, "-c", "raise SystemExit(2)"])
        with pytest.raises(RuntimeError, match="quire serve has ended with 2"):
            await server.start()
        await server.stop()

    asyncio.run(run())
