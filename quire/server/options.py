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
    """Options of the HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on. The default accepts connections of this machine only; 0.0.0.0: of
    any."""
    port: int = 8000
    """Port to listen on. 0: any free port."""
    uds: str | None = None
    """Path of a Unix socket to listen on, instead of host and port."""
    api_server_count: int = 1
    """Number of API processes, which serve HTTP, tokenize and format answers. They share one
    port."""
    api_watchdog_seconds: float = 20.0
    """Seconds after which an API process is restarted if its event loop hangs; its stacks are
    logged. 0: never."""
    root_path: str = ""
    """Path prefix under which a proxy serves this server. Requests may have the prefix or not."""
    max_body_bytes: int = 32 << 20
    """Maximum bytes of a request body."""
    max_recording_seconds: float = 7200.0
    """Maximum seconds of a recording that is transcribed (/v1/audio), at most two hours."""
    keep_alive_timeout: int = 75
    """Seconds that an idle connection stays open. Set it longer than the proxy's own limit:
    otherwise the proxy may send a request on a connection that has just been closed."""
    h11_max_incomplete_event_size: int = 4 << 20
    """Maximum bytes of a request's headers."""
    h11_max_header_count: int = 256
    """Maximum number of headers of a request."""
    shutdown_timeout: int = 30
    """Seconds that running requests may take after SIGTERM or Ctrl-C. 0: end them at once."""
    middleware: tuple[str, ...] = ()
    """ASGI middleware as module:name, a class or an async function (request, call_next). May be
    given several times."""
    disable_fastapi_docs: bool = False
    """Do not serve /docs, /redoc and /openapi.json."""
    enable_offline_docs: bool = True
    """Serve /docs and /redoc without external scripts, as a plain page. With
    --no-enable-offline-docs: Swagger UI and ReDoc, which browsers load from a public CDN."""

    api_key: tuple[str, ...] = ()
    """API keys, one of which clients must send as `Authorization: Bearer KEY`. None: no key is
    needed. Prefer QUIRE_API_KEY (several keys with commas): other users can see command lines."""
    api_key_file: str | None = None
    """YAML, TOML or JSON file with digests of further keys, each with a name and limits (`quire
    key` makes them). It is read again when it changes, and on SIGHUP."""
    ssl_keyfile: str | None = None
    """File of the TLS private key."""
    ssl_certfile: str | None = None
    """File of the TLS certificate; enables HTTPS."""
    ssl_ca_certs: str | None = None
    """File of the authorities with which client certificates are verified."""
    ssl_cert_reqs: int = 0
    """Whether clients need a certificate. 0: no; 1: optional; 2: required."""
    ssl_ciphers: str | None = None
    """Ciphers for TLS 1.2, in OpenSSL's format. None: OpenSSL's default."""
    enable_ssl_refresh: bool = False
    """Read the TLS files again when they change."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may send requests (CORS). None: no page may."""
    allowed_methods: tuple[str, ...] = ("*",)
    """HTTP methods allowed for these origins."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers allowed for these origins."""
    allow_credentials: bool = False
    """Allow cookies from these origins."""
    enable_dev_routes: bool = False
    """Enable the routes that operate on the server: /sleep, /wake_up, /reset_prefix_cache,
    /reset_mm_cache, /reset_encoder_cache, /abort_requests, /pause, /resume, /drain_engine,
    /undrain_engine, /server_info."""
    enable_profiler_routes: bool = False
    """Enable /start_profile and /stop_profile."""

    allow_runtime_lora_updating: bool = False
    """Enable /v1/load_lora_adapter and /v1/unload_lora_adapter. They read folders of the server's
    machine."""
    lora_allowed_folders: tuple[str, ...] = ()
    """Folders from which these routes load adapters, links followed. None: any folder, and the
    Hugging Face hub."""
    lora_resolver_folder: str | None = None
    """Folder with adapters that requests may name without loading them: each by its path in it."""
    lora_resolver_repos: tuple[str, ...] = ()
    """Repositories of the Hugging Face hub with such adapters: ORG/NAME, or ORG/NAME/FOLDER for one
    in a folder."""

    strict: bool = False
    """Refuse requests with unknown fields; the error names the nearest field. Otherwise the
    response header X-Quire-Ignored lists them."""
    skip_model_name_validation: bool = False
    """Accept any model name in requests."""
    chat_template_content_format: ContentFormat = "auto"
    """Format of message content in the chat template: string, or openai (a list of parts).
    auto: detected from the template."""
    trust_request_chat_template: bool = False
    """Allow requests with their own chat template. It runs in a sandbox."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON: default variables of the chat template; a request's own override them."""
    reasoning_effort_map: dict[str, str] = field(default_factory=dict)
    """JSON: maps reasoning_effort of a request to the value for the chat template."""
    exclude_tools_when_tool_choice_none: bool = False
    """Leave tools out of the prompt when tool_choice is none."""
    reasoning_parser: str | None = None
    """Format of reasoning in answers: the name of a parser (deepseek_r1, qwen3, openai_gptoss,
    ...), or auto: detected from the chat template. Answers then have `reasoning` apart from
    content.
    None: it stays in the content."""
    reasoning_parser_plugin: str | None = None
    """A Python file with your own reasoning format (`FORMAT`); the file's name is the parser's
    name."""
    reasoning_config: dict[str, Any] = field(default_factory=dict)
    """JSON: reasoning_parser, and reasoning_start_str and reasoning_end_str, which must be the
    parser's own markers."""
    enable_auto_tool_choice: bool = False
    """Parse tool calls in answers where the request has tools and tool_choice auto. Needs
    --tool-call-parser."""
    tool_call_parser: str | None = None
    """Format of tool calls in answers: the name of a parser (hermes, llama3_json, mistral, ...), or
    auto: detected from the chat template."""
    tool_parser_plugin: str | None = None
    """A Python file with your own tool call format (`FORMAT`); the file's name is the parser's
    name."""
    response_role: str = "assistant"
    """Role of generated messages."""
    return_tokens_as_token_ids: bool = False
    """Return tokens in logprobs as token_id:ID."""
    stream_interval: int = 1
    """Tokens per chunk of a stream, except the first and the last chunk."""
    sse_keep_alive_interval: int = 0
    """Seconds without output after which a stream sends a comment line. 0: never."""
    enable_force_include_usage: bool = False
    """End every stream with the usage, even if the request does not set it."""
    enable_prompt_tokens_details: bool = False
    """Report in the usage how many prompt tokens came from the prefix cache."""
    enable_per_request_metrics: bool = False
    """Add the times of the request to every answer, as `metrics`."""
    enable_request_id_headers: bool = False
    """Send X-Request-Id with every response."""
    enable_tokenizer_info_endpoint: bool = False
    """Enable GET /tokenizer_info."""
    fingerprint_mode: FingerprintMode = "full"
    """system_fingerprint of answers. full: version, model and dtype as text; hash: a short digest
    of these; custom: --fingerprint-value; none: no field."""
    fingerprint_value: str | None = None
    """system_fingerprint with --fingerprint-mode custom."""
    enable_responses_store: bool = False
    """Store answers of /v1/responses in memory, for GET /v1/responses/ID, previous_response_id and
    background."""
    responses_store_size: int = 1000
    """Maximum of stored answers; the oldest are dropped first."""

    metrics_prefix: MetricsPrefix = "both"
    """Prefix of metric names at /metrics. both: each metric twice, as quire:... and as vllm:...,
    which existing dashboards query."""
    public_metrics: bool = False
    """Serve /metrics without a key, for scrapers that have none."""
    enable_server_load_tracking: bool = True
    """Count running requests for /load."""
    otlp_traces_endpoint: str | None = None
    """OpenTelemetry collector that receives a trace of each request (needs quire-llm[otel])."""
    log_stats_interval: float = 10.0
    """Seconds between two log lines with statistics. 0: none."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log: text, or a JSON object per line."""
    enable_log_requests: bool = False
    """Log the id and parameters of each request; with --log-level DEBUG also the prompt."""
    enable_log_outputs: bool = False
    """With --enable-log-requests, log each answer too."""
    enable_log_deltas: bool = True
    """With --enable-log-outputs, log each chunk of a stream, not only the whole answer."""
    max_log_len: int | None = None
    """Maximum characters of a prompt or an answer in the log. None: no maximum."""
    log_error_stack: bool = False
    """Log the stack of each error response."""
    uvicorn_log_level: LogLevel = "warning"
    """Log level of the HTTP library."""
    access_log: bool = False
    """Log a line for each HTTP request."""
    disable_access_log_for_endpoints: tuple[str, ...] = ()
    """Paths that --access-log leaves out, with commas: /health,/metrics."""


_GROUPS = {
    "server": "host port uds api_server_count api_watchdog_seconds root_path max_body_bytes "
    "max_recording_seconds keep_alive_timeout h11_max_incomplete_event_size "
    "h11_max_header_count shutdown_timeout middleware disable_fastapi_docs enable_offline_docs",
    "access": "api_key api_key_file ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs "
    "ssl_ciphers enable_ssl_refresh allowed_origins allowed_methods allowed_headers "
    "allow_credentials enable_dev_routes enable_profiler_routes allow_runtime_lora_updating "
    "lora_allowed_folders lora_resolver_folder lora_resolver_repos",
    "answers": "strict skip_model_name_validation chat_template_content_format "
    "trust_request_chat_template default_chat_template_kwargs reasoning_effort_map "
    "exclude_tools_when_tool_choice_none reasoning_parser reasoning_parser_plugin "
    "reasoning_config "
    "enable_auto_tool_choice tool_call_parser tool_parser_plugin response_role "
    "return_tokens_as_token_ids stream_interval "
    "sse_keep_alive_interval enable_force_include_usage enable_prompt_tokens_details "
    "enable_per_request_metrics enable_request_id_headers enable_tokenizer_info_endpoint "
    "fingerprint_mode fingerprint_value enable_responses_store responses_store_size",
    "observability": "metrics_prefix public_metrics enable_server_load_tracking "
    "otlp_traces_endpoint log_stats_interval log_format enable_log_requests enable_log_outputs "
    "enable_log_deltas max_log_len log_error_stack uvicorn_log_level access_log "
    "disable_access_log_for_endpoints",
}
GROUPS = {title: tuple(names.split()) for title, names in _GROUPS.items()}
"""Heading of the help -> the fields below it."""
ABOUT = {
    "server": "Sockets and processes.",
    "access": "API keys, TLS and origins: access to the server.",
    "answers": "Fields of requests and answers.",
    "observability": "Logs, metrics and traces.",
}
