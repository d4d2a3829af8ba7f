"""Every error quire raises on purpose.

QuireError
├── ConfigError              bad options; raised before anything starts
│   ├── NoRoom               memory does not suffice; has the numbers and the knobs
│   └── WeightError          the checkpoint does not fit the model; has the list
├── RequestError             the caller's fault; has `param`           → 400
│   ├── TooLong              prompt + max_tokens cannot ever fit       → 400
│   ├── UnknownModel                                                   → 404
│   └── Unsupported          valid, but this model or build cannot     → 501
├── Overloaded               try later; has `retry_after_s`            → 429
└── EngineError              our fault; ends this request              → 500
    ├── HookFailed           a function that the engine was given raised
    ├── StepFailed           its step fails, and nobody else's does    → 500
    ├── NotFinite            the model's numbers came to nothing       → 500
    ├── EngineCrashed        the request was aboard two that died      → 500
    ├── Quarantined          the same input did one of those before    → 422
    ├── EngineAway           it is being restarted; `retry_after_s`    → 503
    ├── ShuttingDown         the server ends; ask another              → 503
    └── EngineDead           ends the process

Raise the narrowest. The arrows are quire.server's business; nobody else knows HTTP. A broken
invariant is not here: that is an `assert`. ConfigError and RequestError are also ValueErrors,
because that is what scripts written for this kind of engine catch.
"""

from __future__ import annotations


class QuireError(Exception):
    """Base of all of them."""


class ConfigError(QuireError, ValueError):
    """Bad options; raised before anything starts."""


class NoRoom(ConfigError):
    """Memory does not suffice. The message gives need, room and what would fit."""


class WeightError(ConfigError):
    """The checkpoint and the model do not match. The message lists the tensors."""


class RequestError(QuireError, ValueError):
    """The caller's fault. `param` is the caller's word for the offending field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TooLong(RequestError):
    """Prompt and output can never fit."""


class UnknownModel(RequestError):
    """No model of this name is served here."""


class Unsupported(RequestError):
    """Valid, but this model or build cannot do it."""


class Overloaded(QuireError):
    """Try again later.

    reason: which bound it was, one word; numbers: what is told beside the message, by name.
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
    """Our fault; ends one request."""


class HookFailed(EngineError):
    """A function that the engine was given (a logits processor) raised on a whole batch."""


class StepFailed(EngineError):
    """A step of the engine fails with this request, alone, and with no other."""


class NotFinite(EngineError):
    """The model's logits for this request hold NaN or infinity."""


class EngineCrashed(EngineError):
    """The request was aboard two engines that died: a third is not risked."""


class Quarantined(EngineError):
    """The same input has broken a step, or an engine: it is not tried again for a while."""


class EngineAway(EngineError):
    """The engine died and another is being started; try again later."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(EngineError):
    """The server ends, and this request did not end in time."""


class EngineDead(EngineError):
    """The engine is gone; nothing more will be answered."""
