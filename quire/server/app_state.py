"""State that the routes of one API process share: engine client, tokenizer, options. Frozen."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request

import quire
from quire.core.types import AdapterRef
from quire.engine.client.engine_pool import EnginePool
from quire.errors import RequestError
from quire.grammar.frontends.from_params import StructuredDefaults
from quire.server.adapter_names import AdapterNames
from quire.server.adapter_resolver import AdapterResolver
from quire.server.auth.api_keys import OPERATOR_OWNER, KeyOwner
from quire.server.formats.ignored_fields import IgnoredFieldLog
from quire.server.formats.logprobs import LogprobFormatter
from quire.server.generation.client_watch import ActiveRequests
from quire.server.options import ServerOptions
from quire.server.process.template_workers import build_template_workers
from quire.text.input_processor import InputProcessor
from quire.text.output.answer_parser import AnswerParserFactory
from quire.text.pooling_input import PoolingInputProcessor
from quire.text.templates.render_pool import TemplateRenderPool
from quire.text.tokenizing.tokenizer import Tokenizer

MAX_ID_CHARS = 128
MIN_PROMPT_CHAR_LIMIT = 1 << 20
CHARS_PER_TOKEN = 64
"""No language has that many on average."""
REQUEST_ID_SCOPE_KEY = "quire.request_id"
"""Scope key of the id of a request, if answers show it."""
TENANT_SCOPE_KEY = "quire.tenant"
"""Scope key of the tenant (bytes) of the API key, if there is more than one."""
KEY_OWNER_SCOPE_KEY = "quire.holder"
"""Scope key of the KeyOwner."""
VERSION = str(quire.__version__)


@dataclass(frozen=True, slots=True)
class AppState:
    """One served model. The first name is shown; all are answered."""

    engine: EnginePool
    inputs: InputProcessor
    tokenizer: Tokenizer | None
    chat_template: str | None
    served_model_names: tuple[str, ...]
    max_model_len: int
    options: ServerOptions = field(default_factory=ServerOptions)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams, from the model's generation config."""
    has_priority_scheduling: bool = False
    """The scheduler uses the priority of a request."""
    structured_defaults: StructuredDefaults = field(default_factory=StructuredDefaults)
    """Defaults of structured output, for what a request does not give."""
    early_error_wait_s: float = 15.0
    """The head of a stream of structured output waits so long for the first token: an error that is
    found while the grammar is compiled is then a status, as without a stream."""
    pooling: PoolingInputProcessor | None = None
    """Of a model that embeds, classifies or scores; None: it only generates."""
    generates: bool = True
    """The model generates text."""
    answer_parsers: AnswerParserFactory | None = None
    """Parsers of reasoning and tool calls; None: all text is content."""
    root: str = ""
    """Where the model comes from: a name or a folder's name."""
    dtype: str = ""
    """Of unquantized weights, and of activations."""
    quantization: str | None = None
    """How the other weights are held; None: there are none."""
    weight_bits: float = 16.0
    """Bits per weight, scales included, of all weights."""
    log_stats: bool = True
    """Count what requests do, and log it now and then."""
    counters_folder: Path | None = None
    """Where the API processes of one server leave what others read; None: there is one process."""
    process_index: int = 0
    """Which of them this is."""
    serves_adapters: bool = False
    """The engine serves LoRA adapters."""
    template_workers: TemplateRenderPool = field(default_factory=build_template_workers)
    """Of chat templates that requests bring."""
    created: int = field(default_factory=lambda: int(time.time()))
    ignored_field_log: IgnoredFieldLog = field(default_factory=IgnoredFieldLog)
    """Logs each field without a meaning once."""
    active_requests: ActiveRequests = field(default_factory=ActiveRequests)
    """Requests that this process serves."""
    adapters: AdapterNames = field(init=False)
    """Adapters that requests may name."""
    _request_numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        shared = self.counters_folder is not None
        options = self.options
        resolver = None
        if options.lora_resolver_folder is not None or options.lora_resolver_repos:
            resolver = AdapterResolver(options.lora_resolver_folder, options.lora_resolver_repos)
        names = AdapterNames(
            self.engine, enabled=self.serves_adapters, shared=shared, resolver=resolver
        )
        object.__setattr__(self, "adapters", names)
        self.inputs.media_adapters.find = partial(names.find, tenant=b"")

    def model_name(self, adapter: AdapterRef | None) -> str:
        """The name of the model in answers: the adapter's, or the first of the model."""
        return self.served_model_names[0] if adapter is None else adapter.name

    @property
    def max_prompt_chars(self) -> int:
        """Most characters of a prompt."""
        return max(MIN_PROMPT_CHAR_LIMIT, CHARS_PER_TOKEN * self.inputs.max_prompt_len)

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, for what cannot do without."""
        if self.tokenizer is None:
            message = "this server has no tokenizer: send prompts as token ids"
            raise RequestError(message, param="prompt")
        return self.tokenizer

    def logprob_formatter(self, *, as_ids: bool) -> LogprobFormatter:
        """Formatter of the tokens of a chat. as_ids: the request wants token ids for texts."""
        ids = as_ids or self.options.return_tokens_as_token_ids
        return LogprobFormatter(
            ids, lambda token_id: self.require_tokenizer().token_bytes(token_id)
        )

    def describe_weights(self) -> dict[str, str | float | None]:
        """How weights are held, for model cards and the page."""
        return {
            "dtype": self.dtype,
            "quantization": self.quantization,
            "bits_per_weight": self.weight_bits,
        }

    def fingerprint(self) -> str | None:
        """`system_fingerprint` of answers: what they depend on besides the request."""
        mode = self.options.fingerprint_mode
        if mode == "none":
            return None
        if mode == "custom":
            return self.options.fingerprint_value
        parts = ("quire", VERSION, self.root, self.dtype, self.quantization)
        words = "-".join(part for part in parts if part)
        if mode == "full":
            return words
        return f"fp_{hashlib.sha256(words.encode()).hexdigest()[:12]}"

    def new_engine_id(self, public_id: str) -> str:
        """An id of the engine's own: clients may use one twice at a time."""
        return f"{public_id}-{next(self._request_numbers)}"


def get_app_state(http: Request) -> AppState:
    """The state of the app that this request came to."""
    found = http.app.state.app_state
    assert isinstance(found, AppState), found
    return found


def get_key_owner(http: Request) -> KeyOwner:
    """The owner of the key of a request; without keys all requests are the operator's."""
    found = http.scope.get(KEY_OWNER_SCOPE_KEY, OPERATOR_OWNER)
    assert isinstance(found, KeyOwner), found
    return found


def get_tenant(http: Request) -> bytes:
    """The tenant of a request; b"" where there is only one."""
    found: bytes = http.scope.get(TENANT_SCOPE_KEY, b"")
    return found
