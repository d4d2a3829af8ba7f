"""Error tree: every error that quire raises on purpose.

QuireError
├── ConfigError              bad options; raised before anything starts
│   ├── NoRoom               too little memory; has the numbers and the options
│   ├── WeightError          the checkpoint does not fit the model; lists the tensors
│   └── UnknownAdapter       no adapter at this path or of this name   → 404
├── RequestError             an invalid request; has `param`           → 400
│   ├── TooLong              prompt + max_tokens can never fit         → 400
│   ├── UnknownModel                                                   → 404
│   ├── MediaUnavailable     the address of an image gave no content   → 422
│   └── Unsupported          valid, but this model or build cannot     → 501
├── Overloaded               try later; has `retry_after_s`            → 429
└── EngineError              a fault of the engine; ends the request   → 500
    ├── HookFailed           a logits processor raised
    ├── StepFailed           steps fail with this request alone        → 500
    ├── NotFinite            its logits are NaN or infinite            → 500
    ├── EngineCrashed        engines died while they ran it            → 500
    ├── Quarantined          the same input did so before              → 422
    ├── EngineAway           it is being restarted; `retry_after_s`    → 503
    ├── ShuttingDown         the server stops                          → 503
    └── EngineDead           ends the process

Raise the narrowest class. quire.server maps them to HTTP status codes (the arrows). A broken
invariant is an `assert`. ConfigError and RequestError are also ValueErrors, because scripts written
for other engines catch those.
"""

from __future__ import annotations


class QuireError(Exception):
    """Base of all errors of quire."""


class ConfigError(QuireError, ValueError):
    """Bad options; raised before anything starts."""


class NoRoom(ConfigError):
    """Too little memory. The message has the need, what is free, and what would fit."""


class WeightError(ConfigError):
    """The checkpoint and the model do not match. The message lists the tensors."""


class UnknownAdapter(ConfigError):
    """No adapter at this path, or of this name on the hub."""


class RequestError(QuireError, ValueError):
    """An invalid request. `param` is the name of the invalid field in the request."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TooLong(RequestError):
    """Prompt and output can never fit."""


def context_overflow(
    max_model_len: int, problem: str, *, param: str, remedy: str | None = None
) -> TooLong:
    """The error for what exceeds the context. Clients recognise the words of the first sentence.

    problem: a clause with the numbers.
    """
    message = f"This model's maximum context length is {max_model_len} tokens. However, {problem}."
    return TooLong(f"{message} Please {remedy or f'reduce the length of {param}'}.", param=param)


class UnknownModel(RequestError):
    """No model of this name is served here."""


class MediaUnavailable(RequestError):
    """An address of a request gave no image, video or recording."""


class Unsupported(RequestError):
    """Valid, but this model or build cannot do it."""


class Overloaded(QuireError):
    """Try again later.

    reason: one word for the limit that was reached; numbers: further figures by name.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float,
        reason: str = "",
        numbers: dict[str, float] | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason
        self.numbers = dict(numbers or {})


class EngineError(QuireError, RuntimeError):
    """A fault of the engine; ends one request."""


class HookFailed(EngineError):
    """A logits processor raised on a whole batch."""


class StepFailed(EngineError):
    """Steps fail with this request alone."""


class NotFinite(EngineError):
    """The model's logits for this request hold NaN or infinity."""


class EngineCrashed(EngineError):
    """Two engines died while they ran the request: it is not tried again."""


class Quarantined(EngineError):
    """The same input broke a step or an engine: it is not tried again for a while."""


class EngineAway(EngineError):
    """The engine died and another is being started; try again later."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(EngineError):
    """The server stops, and this request did not end in time."""


class EngineDead(EngineError):
    """The engine is gone; nothing more will be answered."""
