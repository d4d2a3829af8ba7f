"""Playground at `/`: serves the page, and what it reads before its first request.

Its files are in `static/`, are read on the first request and served as they are: no build, nothing
from other hosts. The page needs no key; the data that it shows (/quire/about here,
quire.server.telemetry.dashboard_stream, the API) does. The browser may run no script but these
files, and may not make HTML of text at all (CSP).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import quire
from quire.core.params import HIGHEST_TEMPERATURE
from quire.server.app_state import AppState, get_app_state
from quire.server.formats.sse import build_json_response

router = APIRouter(include_in_schema=False)

STATIC_FOLDER = Path(__file__).parents[1] / "static"
SCRIPTS = (
    *("theme", "app", "api", "dom", "format", "settings", "request", "chat", "message"),
    *("markdown", "split", "tokens", "engine", "blockmap", "colours", "chart", "history", "why"),
    *("weave", "attach"),
)
FILES = (*(f"{name}.js" for name in SCRIPTS), "base.css", "chat.css", "engine.css", "icon.svg")
PUBLIC_PATHS = frozenset({"/", *(f"/quire/page/{name}" for name in FILES)})
"""Paths that need no key."""

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked for anew each time: a 304 if it is the same
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class SamplingControl:
    """A sampling parameter as the page offers it. Bounds are inclusive; None is no bound."""

    name: str
    label: str
    low: float
    high: float | None
    step: float
    whole: bool
    standard: float | None
    """The default; None: nothing is set."""
    about: str


@router.api_route("/", methods=["GET", "HEAD"])
async def show_page(http: Request) -> Response:
    """The page itself."""
    return _serve_static_file(http, "index.html")


@router.api_route("/quire/page/{name}", methods=["GET", "HEAD"])
async def show_file(http: Request, name: str) -> Response:
    """A script, style or picture of the page."""
    if name not in FILES:
        raise HTTPException(404, f"the page has no file {name!r:.100}")
    return _serve_static_file(http, name)


@router.get("/quire/about")
async def show_about(http: Request) -> Response:
    """The model, what it can do, and the ranges that this server allows."""
    return build_json_response(describe_model(get_app_state(http)))


def describe_model(state: AppState) -> dict[str, Any]:
    """The model's properties, which the page loads first."""
    templates, media = _templates(state), state.inputs.media
    return {
        "model": state.served_model_names[0],
        "version": quire.__version__,
        "max_model_len": state.max_model_len,
        "weights": state.describe_weights(),
        "max_logprobs": state.inputs.max_logprobs,
        "text": state.tokenizer is not None,
        "generates": state.generates,
        "tasks": [] if state.pooling is None else state.pooling.section.tasks,
        "chat": bool(templates),
        "reads": () if media is None else media.pipeline.processor.modalities,
        "transcribes": state.inputs.speech is not None,
        "thinking": any("enable_thinking" in one for one in templates),
        "controls": [asdict(one) for one in build_sampling_controls(state)],
    }


def build_sampling_controls(state: AppState) -> list[SamplingControl]:
    """Each sampling parameter that the page lets a person set."""
    longest = state.max_model_len

    def one(
        name: str,
        label: str,
        low: float,
        high: float | None,
        step: float,
        standard: float | None,
        about: str,
    ) -> SamplingControl:
        standard = state.defaults.get(name, standard)
        return SamplingControl(name, label, low, high, step, step == 1, standard, about)

    return [
        one("temperature", "Temperature", 0, HIGHEST_TEMPERATURE, 0.05, 1, "0: the likeliest"),
        one("top_p", "Top p", 0.01, 1, 0.01, 1, "Only the likeliest with this share together"),
        one("top_k", "Top k", 0, None, 1, 0, "Only the k likeliest; 0: all"),
        one("min_p", "Min p", 0, 1, 0.01, 0, "Only those with this share of the likeliest's"),
        one("max_tokens", "Max tokens", 1, longest, 1, None, "An answer ends here at the latest"),
        one("min_tokens", "Min tokens", 0, longest, 1, 0, "An answer does not end before"),
        one("presence_penalty", "Presence", -2, 2, 0.05, 0, "Against tokens that were generated"),
        one("frequency_penalty", "Frequency", -2, 2, 0.05, 0, "As often as they were generated"),
        one("repetition_penalty", "Repetition", 0.01, None, 0.01, 1, "Divides scores; 1: none"),
        one("seed", "Seed", 0, 2**53 - 1, 1, None, "The same seed gives the same answer"),
    ]


def _templates(state: AppState) -> tuple[str, ...]:
    if state.tokenizer is None:
        return ()
    if state.chat_template:
        return (state.chat_template,)
    return tuple(state.tokenizer.templates.named.values())


@dataclass(frozen=True, slots=True)
class _StaticFile:
    content: bytes
    type: str
    etag: str


@cache
def _load_static_file(name: str) -> _StaticFile:
    path = STATIC_FOLDER / name
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _StaticFile(content, CONTENT_TYPES[path.suffix], tag)


def _serve_static_file(http: Request, name: str) -> Response:
    """The file, or 304 to a browser that has it."""
    file = _load_static_file(name)
    headers = {**HEADERS, "ETag": file.etag}
    known = http.headers.get("if-none-match", "")
    if known == "*" or file.etag in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.type)
