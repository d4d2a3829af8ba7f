"""Base of all request bodies: a JSON object from an untrusted client.

A declared field is honoured. One in UNSUPPORTED_FIELDS is refused unless its value is the one
that changes nothing; one in HARMLESS_FIELDS changes no answer. Any other name is unknown: clients
of many servers send fields of all of them, so it is reported and not refused
(quire.server.formats.ignored_fields). Ranges are checked later, for all APIs alike, by
quire.server.generation.validate, SamplingParams and quire.text.input_processor.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from quire.core.params import MAX_BIASED_TOKENS, MAX_STOP_IDS
from quire.core.params import UNIMPLEMENTED_FIELDS as LATER_PARAMS
from quire.errors import RequestError, Unsupported
from quire.server.formats.ignored_fields import IgnoredField, find_ignored

MAX_TOKEN_IDS = 1 << 21
"""Of one list: more than any context has, and few enough to be read in a moment."""
MAX_ALLOWED_TOKEN_IDS = 1 << 19
"""Token ids that are allowed: more than any vocabulary has."""
MAX_STRINGS_PER_LIST = 10_000
"""Of one list: limits of single fields are lower, and are checked where the field is used."""
MAX_UNKNOWN_FIELDS = 1000
MAX_EXACT_FLOAT = 2**53
"""Up to here a float holds every integer exactly."""


def _read_whole_number(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT_FLOAT:
        return int(value)
    return value


Integer = Annotated[int, BeforeValidator(_read_whole_number)]
"""An integer, also written 5.0: JSON has one kind of number, and many languages write it so."""
TokenIdList = Annotated[list[int], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)]
StringList = Annotated[list[str], Field(fail_fast=True, max_length=MAX_STRINGS_PER_LIST)]
AllowedTokenIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_ALLOWED_TOKEN_IDS)]
StopTokenIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_IDS)]
LogitBias = Annotated[dict[str, float], Field(max_length=MAX_BIASED_TOKENS)]

_MEDIA_IN_CHATS = "images, videos and recordings are parts of messages, on the routes of chats"
_NO_KV_TRANSFER = "moving KV between servers is not built yet"

UNSUPPORTED_FIELDS = {
    **LATER_PARAMS,
    "early_stopping": "beams run until max_tokens or until all have ended",
    "functions": "give tools instead",
    "function_call": "give tool_choice instead",
    "audio": "answers are text",
    "web_search_options": "this server does not search the web",
    "multi_modal_data": _MEDIA_IN_CHATS,
    "multi_modal_uuids": _MEDIA_IN_CHATS,
    "mm_processor_kwargs": _MEDIA_IN_CHATS,
    "media_io_kwargs": _MEDIA_IN_CHATS,
    "mm_payload": _MEDIA_IN_CHATS,
    "return_mm_kwargs": "what a processor makes of media is not shown",
    "prompt_embeds": "/v1/completions reads embeddings",
    "kv_transfer_params": _NO_KV_TRANSFER,
    "ec_transfer_params": _NO_KV_TRANSFER,
    "return_token_offsets": "token offsets are not built yet",
    "return_weight_versions": "weight versions are not built yet",
    "logits_processors": "functions cannot be sent over HTTP",
}
"""Fields of features that are not supported (yet), and the reason that the client gets."""

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {"function_call": ("none",)}
"""Values that ask for nothing, besides None, False, 0 and what is empty."""

HARMLESS_FIELDS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("session_id", "output_kind", "skip_clone"),
    }
)
"""Known fields that change nothing in an answer of this server."""


class RequestBody(BaseModel):
    """A JSON object from an untrusted client: types are exact, unknown names are kept aside."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    def refuse_unsupported_features(self) -> None:
        """Raise Unsupported for a field whose feature does not exist here."""
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED_FIELDS and value and value not in NEUTRAL_VALUES.get(name, ()):
                raise Unsupported(f"{name}: {UNSUPPORTED_FIELDS[name]}", param=name)

    def ignored_fields(self) -> list[IgnoredField]:
        """The fields without a meaning here, except those with null."""
        extra = self.model_extra or {}
        if len(extra) > MAX_UNKNOWN_FIELDS:
            raise RequestError(f"the body has {len(extra)} unknown fields")
        given = [
            name
            for name, value in extra.items()
            if name not in UNSUPPORTED_FIELDS and value is not None
        ]
        return (
            find_ignored(given, [*type(self).model_fields, *UNSUPPORTED_FIELDS], HARMLESS_FIELDS)
            if given
            else []
        )
