"""Server options. The engine's own options are in quire.config.options.

`quire serve` makes its flags from these fields; a field's docstring is its help. GROUPS has the
headings of the help.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]
ContentFormat = Literal["auto", "string", "openai"]
MetricsPrefix = Literal["quire", "vllm", "both"]
FingerprintMode = Literal["full", "hash", "custom", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Sockets, keys and habits of the HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on. The default is for this machine only; 0.0.0.0: every address."""
    port: int = 8000
    """Port to listen on. 0: any free one."""
    uds: str | None = None
    """Unix socket to listen on, in place of host and port."""
    api_server_count: int = 1
    """Processes that speak HTTP, tokenize and write answers. They share one port."""
    api_watchdog_seconds: float = 20.0
    """A process with an event loop that does not turn for so long is ended: stacks are logged, and
    another takes its place. 0: never."""
    root_path: str = ""
    """Path under which a proxy shows this server. Requests with it and without it are answered."""
    max_body_bytes: int = 32 << 20
    """Largest body of a request."""
    keep_alive_timeout: int = 75
    """Seconds that a connection may stay open between two requests. Longer than proxies keep
    theirs: the side that closes first makes the other's next request fail."""
    h11_max_incomplete_event_size: int = 4 << 20
    """Most bytes of a request's head."""
    h11_max_header_count: int = 256
    """Most headers of a request."""
    shutdown_timeout: int = 30
    """Seconds that running requests may still take after SIGTERM or Ctrl-C. 0: end them at once."""
    middleware: tuple[str, ...] = ()
    """module:name of an ASGI middleware class, or of an async function (request, call_next). May be
    given several times."""
    disable_fastapi_docs: bool = False
    """No /docs, /redoc and /openapi.json."""
    enable_offline_docs: bool = True
    """/docs and /redoc without outside scripts: a plain page made here. With
    --no-enable-offline-docs: Swagger UI and ReDoc, which browsers load from a public CDN."""

    api_key: tuple[str, ...] = ()
    """Keys that clients must send as `Authorization: Bearer KEY`. None: no key
    is needed. Better set QUIRE_API_KEY (several keys with commas): command lines are visible."""
    api_key_file: str | None = None
    """YAML, TOML or JSON file of digests of further keys, each with a name and limits (`quire key`
    makes them). It is read again when it changes, and on SIGHUP."""
    ssl_keyfile: str | None = None
    """File of the TLS key."""
    ssl_certfile: str | None = None
    """File of the TLS certificate. With it the server speaks HTTPS."""
    ssl_ca_certs: str | None = None
    """File of the authorities that clients' certificates are checked against."""
    ssl_cert_reqs: int = 0
    """Whether clients must show a certificate. 0: no; 1: they may; 2: they must."""
    ssl_ciphers: str | None = None
    """Ciphers for TLS 1.2, in OpenSSL's form. None: OpenSSL's choice."""
    enable_ssl_refresh: bool = False
    """Read the TLS files again when they change."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of these origins may ask (CORS). None: no page may."""
    allowed_methods: tuple[str, ...] = ("*",)
    """HTTP methods that those pages may use."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that those pages may send."""
    allow_credentials: bool = False
    """Those pages may send cookies."""
    enable_dev_routes: bool = False
    """Open the routes that operate on the server: /sleep, /wake_up, /reset_prefix_cache,
    /abort_requests, /pause, /resume, /server_info."""
    enable_profiler_routes: bool = False
    """Open /start_profile and /stop_profile."""

    strict: bool = False
    """Refuse a request with an unknown field, and name the nearest. Otherwise the answer's
    header X-Quire-Ignored names it."""
    skip_model_name_validation: bool = False
    """Answer requests for any model with the one there is."""
    chat_template_content_format: ContentFormat = "auto"
    """Form in which message content reaches the chat template: string or openai (a list of
    parts). auto: what the template looks made for."""
    trust_request_chat_template: bool = False
    """Let requests bring a chat template of their own. It runs in a sandbox."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON: variables of the chat template, under those of a request."""
    reasoning_effort_map: dict[str, str] = field(default_factory=dict)
    """JSON: from the reasoning_effort of a request to the word the chat template gets."""
    exclude_tools_when_tool_choice_none: bool = False
    """Leave tools out of the prompt when tool_choice is none."""
    reasoning_parser: str | None = None
    """How answers mark reasoning: the name of a format (deepseek_r1, qwen3, openai_gptoss, ...),
    or auto: what the chat template shows. Answers then have it as `reasoning`, apart from content.
    None: it stays in the content."""
    reasoning_parser_plugin: str | None = None
    """A Python file with a reasoning format of your own (`FORMAT`); its name is the file's."""
    reasoning_config: dict[str, Any] = field(default_factory=dict)
    """JSON: reasoning_parser, and reasoning_start_str and reasoning_end_str, which must be the
    parser's own marks."""
    enable_auto_tool_choice: bool = False
    """Read tool calls out of answers, where a request has tools and leaves the choice to the
    model. Needs --tool-call-parser."""
    tool_call_parser: str | None = None
    """How answers mark tool calls: the name of a format (hermes, llama3_json, mistral, ...), or
    auto: what the chat template shows."""
    tool_parser_plugin: str | None = None
    """A Python file with a tool call format of your own (`FORMAT`); its name is the file's."""
    response_role: str = "assistant"
    """Role of the messages that the model writes."""
    return_tokens_as_token_ids: bool = False
    """Show tokens in logprobs as token_id:ID."""
    stream_interval: int = 1
    """Tokens that a piece of a stream has, except the first and the last."""
    sse_keep_alive_interval: int = 0
    """Seconds without news after which a stream gets a comment line. 0: none."""
    enable_force_include_usage: bool = False
    """End every stream with the usage, asked for or not."""
    enable_prompt_tokens_details: bool = False
    """Say in the usage how many prompt tokens came from the prefix cache."""
    enable_per_request_metrics: bool = False
    """Put times into every answer, as `metrics`."""
    enable_request_id_headers: bool = False
    """Answer with X-Request-Id."""
    enable_tokenizer_info_endpoint: bool = False
    """Open GET /tokenizer_info."""
    fingerprint_mode: FingerprintMode = "full"
    """system_fingerprint of answers. full: version, model and dtype in words; hash: the same as a
    short digest; custom: --fingerprint-value; none: left out."""
    fingerprint_value: str | None = None
    """system_fingerprint with --fingerprint-mode custom."""
    enable_responses_store: bool = False
    """Keep answers of /v1/responses in memory, for GET /v1/responses/ID, previous_response_id and
    background."""
    responses_store_size: int = 1000
    """Answers kept; the oldest goes first."""

    metrics_prefix: MetricsPrefix = "both"
    """First word of the names at /metrics. both: each metric twice, as quire:... and as vllm:...,
    which existing dashboards query."""
    public_metrics: bool = False
    """Answer /metrics without a key, for scrapers that have none."""
    enable_server_load_tracking: bool = True
    """Count requests at work for /load."""
    otlp_traces_endpoint: str | None = None
    """OpenTelemetry collector that gets a trace of each request (needs quire-llm[otel])."""
    log_stats_interval: float = 10.0
    """Seconds between two lines of statistics. 0: none."""
    log_format: Literal["text", "json"] = "text"
    """Form of the log: lines for people, or a JSON object a line."""
    enable_log_requests: bool = False
    """Log each request: its id and parameters, and with --log-level DEBUG the prompt."""
    enable_log_outputs: bool = False
    """Log what was answered, too."""
    enable_log_deltas: bool = True
    """With the former, log every piece of a stream and not only the whole."""
    max_log_len: int | None = None
    """Most characters of a prompt or an answer in the log. None: all."""
    log_error_stack: bool = False
    """Log where in the code an error reply came from."""
    uvicorn_log_level: LogLevel = "warning"
    """How much the HTTP library logs."""
    access_log: bool = False
    """Write a line for each HTTP request."""
    disable_access_log_for_endpoints: tuple[str, ...] = ()
    """Paths that --access-log leaves out, with commas: /health,/metrics."""


_GROUPS = {
    "server": "host port uds api_server_count api_watchdog_seconds root_path max_body_bytes "
    "keep_alive_timeout h11_max_incomplete_event_size h11_max_header_count shutdown_timeout "
    "middleware disable_fastapi_docs enable_offline_docs",
    "access": "api_key api_key_file ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs "
    "ssl_ciphers enable_ssl_refresh allowed_origins allowed_methods allowed_headers "
    "allow_credentials enable_dev_routes enable_profiler_routes",
    "answers": "strict skip_model_name_validation chat_template_content_format "
    "trust_request_chat_template default_chat_template_kwargs reasoning_effort_map "
    "exclude_tools_when_tool_choice_none reasoning_parser reasoning_parser_plugin "
    "reasoning_config "
    "enable_auto_tool_choice tool_call_parser tool_parser_plugin response_role "
    "return_tokens_as_token_ids stream_interval "
    "sse_keep_alive_interval enable_force_include_usage enable_prompt_tokens_details "
    "enable_per_request_metrics enable_request_id_headers enable_tokenizer_info_endpoint "
    "fingerprint_mode fingerprint_value enable_responses_store responses_store_size",
    "telling": "metrics_prefix public_metrics enable_server_load_tracking otlp_traces_endpoint "
    "log_stats_interval log_format enable_log_requests enable_log_outputs enable_log_deltas "
    "max_log_len log_error_stack uvicorn_log_level access_log disable_access_log_for_endpoints",
}
GROUPS = {title: tuple(names.split()) for title, names in _GROUPS.items()}
"""Heading of the help -> the fields below it."""
ABOUT = {
    "server": "Sockets and processes.",
    "access": "API keys, TLS and origins: access to the server.",
    "answers": "What requests may say, and what answers show.",
    "telling": "Logs, metrics and traces.",
}
