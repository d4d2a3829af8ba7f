"""Parses the forms of a prompt into token ids and text.

    "text"   [1, 2, 3]   {"prompt": "text"}   {"prompt_token_ids": [1, 2, 3], "prompt": "text"?}
    {"prompt_embeds": tensor, "prompt": "text"?}
    {"prompt_embeds": tensor, "prompt_token_ids": [1, 2, 3], "prompt_is_token_ids": [True, ...]}
    {"encoder_prompt": ..., "decoder_prompt": ...?}      of these forms, for models with an encoder

and in dicts an optional `cache_salt`, `suffix` (quire.text.fill_in_middle), and media beside a
text or ids: `multi_modal_data`, `multi_modal_uuids`, `mm_processor_kwargs`, `media_io_kwargs`.
Lengths and sampling: quire.text.input_processor; vectors: quire.text.prompt_embeds; media:
quire.text.media_prompt.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from quire.errors import RequestError, Unsupported

Prompt = str | Sequence[int] | Mapping[str, object]

_KNOWN = (
    *("prompt", "prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"),
    *("cache_salt", "suffix"),
)
_MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "media_io_kwargs")
_REFUSED = {
    "encoder_prompt": "this model has no encoder; send 'prompt' or 'prompt_token_ids'",
    "decoder_prompt": "this model has no encoder; send 'prompt' or 'prompt_token_ids'",
    "token_type_ids": "token types are not supported for generation",
    "prompt_token_offsets": "prompt token offsets are not supported",
    "data": "prompts for IO plug-ins are not supported",
    "data_format": "prompts for IO plug-ins are not supported",
}


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """Media of a prompt as they were given. They are not checked."""

    data: Any = None
    uuids: Any = None
    processor_kwargs: Any = None
    io_kwargs: Any = None


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """Text to be tokenized, or ids, or vectors; text beside ids or vectors is only shown."""

    text: str | None
    ids: tuple[int, ...] | None
    salt: str | None = None
    suffix: str | None = None
    embeds: Any = None  # a tensor; not checked
    ids_at: tuple[bool, ...] = ()  # where ids are read beside embeds; (): nowhere
    media: PromptMedia | None = None


def parse_prompt(prompt: Prompt) -> ParsedPrompt:
    """Check the form of a prompt. Raises RequestError, Unsupported."""
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(None, check_token_ids(prompt, "prompt"))
    parsed, media = _from_dict(prompt), read_prompt_media(prompt)
    if media is None:
        return parsed
    for name in ("suffix", "prompt_embeds"):
        if prompt.get(name) is not None:
            raise RequestError(f"{name} cannot be combined with multi_modal_data", param=name)
    return replace(parsed, media=media)


def read_prompt_media(prompt: Prompt) -> PromptMedia | None:
    """Return the media of a prompt. None: it has none."""
    if not isinstance(prompt, Mapping):
        return None
    given = [prompt.get(key) for key in _MEDIA_KEYS]
    given = [None if isinstance(one, Mapping) and not one else one for one in given]
    return None if all(one is None for one in given) else PromptMedia(*given)


def parse_encoder_prompt(
    prompt: Prompt, *, takes_media: bool = False
) -> tuple[ParsedPrompt, ParsedPrompt | None]:
    """Parse a prompt of a model with an encoder: what each half reads.

        {"encoder_prompt": ..., "decoder_prompt": ...?}     each text, ids, or a dict of them
        any other form                                      the encoder's

    None: the decoder begins as the model's config has it. takes_media: the encoder reads media
    too. Raises RequestError, Unsupported.
    """
    if not isinstance(prompt, Mapping) or not {"encoder_prompt", "decoder_prompt"} & prompt.keys():
        return without_extras(parse_prompt(prompt), "prompt", takes_media=takes_media), None
    known = ("encoder_prompt", "decoder_prompt", "cache_salt")
    for key, value in prompt.items():
        if key not in known and value is not None:
            names = ", ".join(known)
            raise RequestError(
                f"prompt has {key!r} beside encoder_prompt or decoder_prompt; known are {names}",
                param="prompt",
            )
    halves = []
    for key in known[:2]:
        given = prompt.get(key)
        if given is None and key == "encoder_prompt":
            raise RequestError("encoder_prompt is missing: it is what is read", param=key)
        half = None if given is None else parse_prompt(given)  # type: ignore[arg-type]  # checked
        media = takes_media and key == "encoder_prompt"
        halves.append(None if half is None else without_extras(half, key, takes_media=media))
    source, decoder = halves
    assert source is not None
    salt = check_cache_salt(prompt.get("cache_salt"))
    return (replace(source, salt=salt) if salt else source), decoder


def without_extras(parsed: ParsedPrompt, param: str, *, takes_media: bool = False) -> ParsedPrompt:
    """Return half of a prompt for an encoder-decoder. Raises Unsupported if it has a suffix or
    vectors, which no such model reads, or media, which few do."""
    extras = (
        ("suffix", parsed.suffix),
        ("prompt_embeds", parsed.embeds),
        ("multi_modal_data", None if takes_media else parsed.media),
    )
    for name, value in extras:
        if value is not None:
            message = f"{name}: a model with an encoder does not read it"
            raise Unsupported(message, param=name if param == "prompt" else param)
    return parsed


def _from_dict(prompt: Mapping[str, object]) -> ParsedPrompt:
    for key, value in prompt.items():
        if key in _KNOWN or key in _MEDIA_KEYS or value is None or value == {}:
            continue
        if key in _REFUSED:
            raise Unsupported(f"prompt has {key!r}: {_REFUSED[key]}", param=str(key))
        matches = difflib.get_close_matches(str(key), [*_KNOWN, *_REFUSED], n=1)
        hint = f"; did you mean {matches[0]!r}?" if matches else f"; known are {', '.join(_KNOWN)}"
        raise RequestError(f"prompt has an unknown key {key!r}{hint}", param="prompt")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        if ids is not None:
            raise _invalid_prompt("prompt must be text", text)
        ids, text = text, None  # some clients send {"prompt": [ids]}
    salt, suffix = check_cache_salt(prompt.get("cache_salt")), prompt.get("suffix")
    if suffix is not None and not isinstance(suffix, str):
        raise RequestError(f"suffix must be text, got a {type(suffix).__name__}", param="suffix")
    embeds, ids_at = prompt.get("prompt_embeds"), prompt.get("prompt_is_token_ids")
    if ids_at is not None and (embeds is None or ids is None):
        message = "prompt_is_token_ids needs prompt_embeds and prompt_token_ids"
        raise RequestError(message, param="prompt_is_token_ids")
    if embeds is not None:
        if suffix is not None:
            message = "suffix needs a prompt of text or token ids, not prompt_embeds"
            raise RequestError(message, param="suffix")
        ids = None if ids is None else check_token_ids(ids, "prompt_token_ids")
        return ParsedPrompt(text, ids, salt, None, embeds, _check_mask(ids_at))
    if ids is not None:
        return ParsedPrompt(text, check_token_ids(ids, "prompt_token_ids"), salt, suffix)
    if text is None:
        raise RequestError(
            "a prompt given as a dict needs 'prompt' (text) or 'prompt_token_ids'; "
            f"it has {', '.join(map(str, prompt)) or 'nothing'}",
            param="prompt",
        )
    return ParsedPrompt(text, None, salt, suffix)


def _check_mask(given: object) -> tuple[bool, ...]:
    try:
        return () if given is None else tuple(map(bool, given))  # type: ignore[call-overload]
    except TypeError:
        message = "prompt_is_token_ids must be a list of booleans"
        raise RequestError(
            f"{message}, got a {type(given).__name__}", param="prompt_is_token_ids"
        ) from None


def _invalid_prompt(what: str, given: object) -> RequestError:
    return RequestError(
        f"{what}, got a {type(given).__name__}; a prompt is text, a list of token ids, or a dict "
        "with 'prompt' or 'prompt_token_ids'",
        param="prompt",
    )


def check_token_ids(given: object, param: str) -> tuple[int, ...]:
    """A list of ids (also a NumPy or torch vector) as a tuple of int."""
    if isinstance(given, bytes | str | Mapping | set | frozenset):
        raise _invalid_prompt(f"{param} must be a list of token ids", given)
    try:
        items: tuple[Any, ...] = tuple(given)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        raise _invalid_prompt(f"{param} must be a list of token ids", given) from None
    try:
        return msgspec.convert(items, tuple[int, ...])  # a third of the time of a look at each type
    except msgspec.ValidationError:
        pass
    for i, item in enumerate(items):
        if isinstance(item, bool) or not _is_index(item):
            raise RequestError(
                f"{param}[{i}] must be a token id (an integer), got {item!r:.80}", param=param
            )
    return tuple(map(operator.index, items))


def check_vocabulary(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise RequestError for an id that a model's vocabulary of this size does not have."""
    given = tuple(ids)
    if not given:  # of most parameters
        return
    try:
        msgspec.convert(given, _ids_below(vocab_size))  # half the time of min() and max()
    except msgspec.ValidationError:
        for one in given:
            if not 0 <= one < vocab_size:
                allowed = f"token ids of this model are in [0, {vocab_size})"
                raise RequestError(f"{param} holds {one}; {allowed}", param=param) from None


@lru_cache
def _ids_below(vocab_size: int) -> Any:
    """The type of such ids. Making it takes as long as checking a hundred of them."""
    return tuple[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)], ...]


def _is_index(item: Any) -> bool:
    try:
        operator.index(item)
    except (TypeError, ValueError):
        return False
    return True


def check_cache_salt(given: object) -> str | None:
    """A salt that separates what the prefix cache may share. None: none."""
    if given is None:
        return None
    if not isinstance(given, str) or not 0 < len(given) <= 128 or set(given) & set("@/\\\0"):
        raise RequestError(
            "cache_salt must be a string of 1 to 128 characters without @, /, \\ and NUL, got "
            f"{given!r:.80}",
            param="cache_salt",
        )
    return given
