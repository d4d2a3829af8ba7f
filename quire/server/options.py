"""What can be said about the server. The engine's own options are in quire.config.options.

`quire serve` makes its flags from these fields; a field's docstring is its help.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Sockets, keys and habits of the HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on. The default is reached from this machine only; 0.0.0.0 is everyone."""
    port: int = 8000
    """Port to listen on. 0: any free one."""
    uds: str | None = None
    """Unix socket to listen on, in place of host and port."""
    api_key: tuple[str, ...] = ()
    """Keys that clients must send as `Authorization: Bearer KEY`. None: everyone may ask."""
    root_path: str = ""
    """Path under which a proxy shows this server."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of these origins may ask (CORS). None: no page may."""
    allowed_methods: tuple[str, ...] = ("*",)
    """HTTP methods that those pages may use."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that those pages may send."""
    allow_credentials: bool = False
    """Those pages may send cookies."""
    uvicorn_log_level: LogLevel = "warning"
    """How much the HTTP library tells."""
    access_log: bool = False
    """Write a line for each HTTP request."""
    shutdown_timeout: int = 30
    """Seconds that running requests may still take after SIGTERM or Ctrl-C. 0: end them at once."""
    max_body_bytes: int = 32 << 20
    """Largest body of a request."""
    response_role: str = "assistant"
    """Role of the messages that the model writes."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON: variables of the chat template, under those of a request."""
    return_tokens_as_token_ids: bool = False
    """Show tokens in logprobs as token_id:ID."""
    enable_prompt_tokens_details: bool = False
    """Say in the usage how many prompt tokens came from the prefix cache."""
    enable_request_id_headers: bool = False
    """Answer with X-Request-Id."""
    disable_fastapi_docs: bool = False
    """No /docs, /redoc and /openapi.json."""
