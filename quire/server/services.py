"""What routes may use: the engine's door, text work, names and habits. Made once, never changed."""

from __future__ import annotations

import hashlib
import itertools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request

import quire
from quire.engine.client import EngineClient
from quire.errors import RequestError, TooLong, UnknownModel
from quire.grammar.words import House
from quire.server import splitting, templates
from quire.server.asked import Asked
from quire.server.events import Splitter
from quire.server.keys import OPERATOR, Holder
from quire.server.options import ServerOptions
from quire.server.presence import UnderWay
from quire.server.protocol.logprobs import Shown
from quire.server.strict import Teller
from quire.text.inputs import InputProcessor, Prepared
from quire.text.readers import Readers
from quire.text.renderers import Renderers
from quire.text.tokenizer import Tokenizer

MAX_ID_CHARS = 128
MOST_CHARS = 1 << 20
CHARS_A_TOKEN = 64
"""No language has that many on average."""
REQUEST_ID = "quire.request_id"
"""Where the id of a request stands in its scope, if answers are to tell it."""
TENANT = "quire.tenant"
"""Where it stands in the scope whose key a request brought (bytes), if there is more than one."""
HOLDER = "quire.holder"
"""Where the rest stands that is known of who brought it: a Holder."""
VERSION = str(quire.__version__)


@dataclass(frozen=True, slots=True)
class Services:
    """One served model. The first name is shown; all are answered."""

    engine: EngineClient
    inputs: InputProcessor
    tokenizer: Tokenizer | None
    chat_template: str | None
    names: tuple[str, ...]
    max_model_len: int
    options: ServerOptions = field(default_factory=ServerOptions)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams, from the model's generation config."""
    has_priorities: bool = False
    """The scheduler looks at the priority of a request."""
    house: House = field(default_factory=House)
    """How texts with a form are written and compiled, where a request does not say."""
    readers: Readers | None = None
    """Tell reasoning and tool calls from content; None: nothing does."""
    root: str = ""
    """Where the model comes from: a name or a folder's name."""
    dtype: str = ""
    """Of the weights, for the fingerprint."""
    log_stats: bool = True
    """Count what requests do, and log it now and then."""
    shared_folder: Path | None = None
    """Where the API processes of one server leave what others read; None: there is one process."""
    process: int = 0
    """Which of them this is."""
    renderers: Renderers = field(default_factory=templates.renderers)
    """Of chat templates that requests bring."""
    created: int = field(default_factory=lambda: int(time.time()))
    ignored: Teller = field(default_factory=Teller)
    """Knows which fields without a meaning the log has told of."""
    under_way: UnderWay = field(default_factory=UnderWay)
    """Whose requests this process works for."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModel unless this model is meant. None means the one there is."""
        if name in self.names or name is None:
            return
        if not self.options.skip_model_name_validation:
            known = ", ".join(self.names)
            raise UnknownModel(f"no model {name!r:.100} here; there is {known}", param="model")

    def check_chars(self, chars: int, param: str) -> None:
        """Raise TooLong for what is hopeless: tokenizing it would take minutes and gigabytes."""
        most = self.most_chars
        if chars > most:
            message = (
                f"{param} has {chars} characters; this server reads at most {most} "
                f"(its model has a context of {self.max_model_len} tokens)"
            )
            raise TooLong(message, param=param)

    @property
    def most_chars(self) -> int:
        """Of a prompt."""
        return max(MOST_CHARS, CHARS_A_TOKEN * self.max_model_len)

    def text(self) -> Tokenizer:
        """The tokenizer, for what cannot do without."""
        if self.tokenizer is None:
            message = "this server has no tokenizer: send prompts as token ids"
            raise RequestError(message, param="prompt")
        return self.tokenizer

    def shown(self, *, as_ids: bool) -> Shown:
        """How the tokens of a chat are shown. as_ids: the request asks for that."""
        ids = as_ids or self.options.return_tokens_as_token_ids
        return Shown(ids, lambda token_id: self.text().bytes_of(token_id))

    def public_id(self, prefix: str, http: Request, wanted: str | None) -> str:
        """The id that the client sees: of its header X-Request-Id, or of the body, or a new one.

        prefix: with its separator, "chatcmpl-".
        """
        base = http.headers.get("x-request-id") or wanted
        base = base or http.scope.get(REQUEST_ID) or uuid.uuid4().hex
        if len(base) > MAX_ID_CHARS or not base.isprintable():
            message = f"a request id must have at most {MAX_ID_CHARS} printable characters"
            raise RequestError(message, param="request_id")
        return prefix + base

    def splitters(self, asked: Asked, prepared: Sequence[Prepared]) -> list[Splitter] | None:
        """One for each choice; None: the text of the answers is content and nothing else."""
        return splitting.splitters(self, asked, prepared) if splitting.splits(self, asked) else None

    def fingerprint(self) -> str | None:
        """`system_fingerprint` of answers: what they depend on besides the request."""
        mode = self.options.fingerprint_mode
        if mode == "none":
            return None
        if mode == "custom":
            return self.options.fingerprint_value
        words = "-".join(word for word in ("quire", VERSION, self.root, self.dtype) if word)
        if mode == "full":
            return words
        return f"fp_{hashlib.sha256(words.encode()).hexdigest()[:12]}"

    def engine_id(self, public_id: str) -> str:
        """An id of the engine's own: clients may use one twice at a time."""
        return f"{public_id}-{next(self._numbers)}"


def services(http: Request) -> Services:
    """The services of the app that this request came to."""
    found = http.app.state.services
    assert isinstance(found, Services), found
    return found


def holder_of(http: Request) -> Holder:
    """What is known of who asks; of a server without keys everyone is its operator."""
    found = http.scope.get(HOLDER, OPERATOR)
    assert isinstance(found, Holder), found
    return found


def tenant_of(http: Request) -> bytes:
    """Whose request this is; b"" where nobody is told apart."""
    found: bytes = http.scope.get(TENANT, b"")
    return found
