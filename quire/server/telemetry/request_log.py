"""Request log: a line for each request (--enable-log-requests) and answer (--enable-log-outputs).

Lines at INFO hold ids, lengths and parameters. The prompt itself is logged at DEBUG only, and cut
at --max-log-len; headers, and so keys, are never read.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Sequence
from dataclasses import fields

from quire.core.params import SamplingParams
from quire.core.types import Request
from quire.server.generation.events import ChoiceDelta, ChoiceFinish, GenerationEvent
from quire.server.options import ServerOptions
from quire.text.input_processor import PreparedRequest

log = logging.getLogger(__name__)

_INTERNAL_PARAMS = ("max_tokens", "output_kind", "skip_clone", "bad_words_token_ids")
_DEFAULTS = {
    one.name: getattr(SamplingParams(), one.name)
    for one in fields(SamplingParams)
    if one.name not in _INTERNAL_PARAMS
}
"""Fields that a line omits. `_OURS`: logged apart, or not given by the client."""


class RequestLog:
    """Logs requests and answers as the options allow. Has no state."""

    def __init__(self, options: ServerOptions) -> None:
        self.logs_requests = options.enable_log_requests
        self.logs_outputs = options.enable_log_requests and options.enable_log_outputs
        self._logs_deltas = options.enable_log_deltas
        self._max_chars = options.max_log_len

    def log_request(self, public_id: str, prepared: Sequence[PreparedRequest]) -> None:
        """A request is given to the engine."""
        if not self.logs_requests:
            return
        for one in prepared:
            request = one.request
            log.info(
                "request %s: %d prompt tokens, max_tokens %d, %s%s",
                public_id,
                request.num_prompt_tokens,
                request.stop.max_tokens,
                format_given_params(one.params) or "defaults",
                _format_adapter(request),
                extra={"request_id": public_id, "prompt_tokens": request.num_prompt_tokens},
            )
            if log.isEnabledFor(logging.DEBUG):
                text = one.prompt_text
                shown = (
                    self._truncate(text)
                    if text is not None
                    else list(request.prompt[: self._max_chars])
                )
                log.debug("prompt of %s: %r", public_id, shown, extra={"request_id": public_id})

    def log_pooling(self, public_id: str, requests: Sequence[Request]) -> None:
        """The pooling requests of one body are given to the engine."""
        if not (self.logs_requests and requests):
            return
        tokens = sum(len(one.prompt) for one in requests)
        log.info(
            "request %s: %d inputs, %d prompt tokens, %s%s",
            public_id,
            len(requests),
            tokens,
            requests[0].pooling,
            _format_adapter(requests[0]),
            extra={"request_id": public_id, "prompt_tokens": tokens},
        )
        if log.isEnabledFor(logging.DEBUG):
            for one in requests:
                shown = list(one.prompt[: self._max_chars])
                log.debug("prompt of %s: %r", public_id, shown, extra={"request_id": public_id})

    def log_events(
        self, public_id: str, texts: dict[int, str], events: Sequence[GenerationEvent]
    ) -> None:
        """Log new text of a generation. texts: the text before, by choice, to be continued."""
        for event in events:
            if isinstance(event, ChoiceDelta):
                text = event.reasoning + event.text
                texts[event.index] = self._truncate(texts.get(event.index, "") + text)
                if self._logs_deltas and text:
                    log.info(
                        "piece of answer %d of %s: %r", event.index, public_id, self._truncate(text)
                    )
            elif isinstance(event, ChoiceFinish):
                log.info(
                    "answer %d of %s ended (%s): %r",
                    event.index,
                    public_id,
                    event.finish_reason,
                    texts.pop(event.index, ""),
                    extra={"request_id": public_id, "finish_reason": event.finish_reason},
                )

    def _truncate(self, text: str) -> str:
        return text if self._max_chars is None else text[: self._max_chars]


def _format_adapter(request: Request) -> str:
    return "" if request.adapter is None else f", adapter {request.adapter.name!r}"


def format_given_params(params: SamplingParams) -> str:
    """The parameters that are not as they are by default, long ones cut, without a prediction."""
    shown = ((name, getattr(params, name)) for name in _DEFAULTS if name != "prediction")
    return ", ".join(
        f"{name} {reprlib.repr(value)}" for name, value in shown if value != _DEFAULTS[name]
    )
