"""Media in prompts, on the side of text: what templates write for them, and how that is tokenized.

A placeholder is what a template or the author of a raw prompt writes. The same characters in a
message of a user are text: before a template is rendered they are replaced by marks, and what the
marks stood for is tokenized as text afterwards.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from quire.errors import RequestError
from quire.media.content_parts import ReadTensor, extract_parts
from quire.media.expand import PlacedMedia, ReadyItem, check_number
from quire.media.items import MediaSource
from quire.media.objects import read_media_data
from quire.media.pipeline import MediaPipeline
from quire.media.processor import MediaProcessor, Modality
from quire.text.prompts import ParsedPrompt, PromptMedia
from quire.text.tokenizing.tokenizer import Tokenizer

Span = tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MediaInputs:
    """The media of one prompt that are ready. literals: spans of its text without special tokens.

    is_rendered: a chat template wrote the prompt.
    """

    items: Sequence[ReadyItem] = ()
    literals: Sequence[Span] = ()
    is_rendered: bool = False

    @property
    def marks(self) -> frozenset[int]:
        """Ids of placeholders and of tokens of items, which may be behind the vocabulary: the model
        reads them only."""
        parts = [(*one.expansion.replaces, *one.expansion.token_ids) for one in self.items]
        return frozenset().union(*parts)

    def behind(self, chars: int) -> MediaInputs:
        """Return the media of the same text behind so many characters."""
        moved = [(start + chars, end + chars) for start, end in self.literals]
        return replace(self, literals=moved)


@dataclass(frozen=True, slots=True)
class MediaConversation:
    """A conversation for a chat template: its messages without the contents of media.

    placeholders: what the prompt holds for each item, by modality.
    """

    messages: Sequence[Any]
    parts: Sequence[MediaSource] = ()
    placeholders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    guard: PlaceholderGuard | None = None

    def protect(self, value: T) -> T:
        """Return further values for the template, tools for instance, without placeholders."""
        return value if self.guard is None else self.guard.protect(value)

    def restore(self, text: str) -> tuple[str, list[Span]]:
        """Return the rendered prompt, and the spans that are text of users."""
        return (text, []) if self.guard is None else self.guard.restore(text)


class MediaReader:
    """Reads the media of prompts, and puts their tokens into those."""

    def __init__(
        self, pipeline: MediaPipeline, tokenizer: Tokenizer | None, max_model_len: int
    ) -> None:
        """tokenizer: None only of a model whose items are whole prompts."""
        assert tokenizer is not None or pipeline.processor.is_whole_prompt
        self.pipeline = pipeline
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._reserved = _reserved_strings(pipeline.processor, tokenizer)

    def read_conversation(
        self,
        messages: Sequence[Any],
        *,
        objects: bool = False,
        read_tensor: ReadTensor | None = None,
    ) -> MediaConversation:
        """Take the media out of messages. Raises RequestError.

        objects, read_tensor: of quire.media.content_parts.extract_parts.
        """
        if isinstance(messages, str | bytes | Mapping):
            return MediaConversation(messages)  # refused where it is rendered
        found = extract_parts(messages, objects=objects, read_tensor=read_tensor)
        guard = self.placeholder_guard()
        made = guard.protect(found.messages)
        texts = self.pipeline.placeholders(found.parts)
        return MediaConversation(made, found.parts, texts, guard)

    def placeholder_guard(self) -> PlaceholderGuard:
        """Return a guard for the texts of one request."""
        return PlaceholderGuard(self._reserved)

    def reset_cache(self) -> None:
        """Forget processed media."""
        self.pipeline.cache.clear()

    async def prepare(self, parts: Sequence[MediaSource], **options: Any) -> list[ReadyItem]:
        """Prepare the media of one prompt: quire.media.pipeline.MediaPipeline.prepare."""
        return await self.pipeline.prepare(parts, max_tokens=self._max_model_len, **options)

    def start_parts(
        self, parts: Sequence[MediaSource], salt: str | None = None, **options: Any
    ) -> Future[list[ReadyItem]]:
        """Begin to prepare the media of a prompt, in the background."""
        return self.pipeline.start(parts, **self._scope(salt), **options)

    def start(self, given: PromptMedia, salt: str | None = None) -> Future[list[ReadyItem]]:
        """Begin to read and to prepare the media of a prompt's dict, in the background."""

        def read() -> list[MediaSource]:
            return read_media_data(self.pipeline.processor.read_data(given.data), given.uuids)

        kwargs, io_kwargs = given.processor_kwargs, given.io_kwargs
        options = {**self._scope(salt), "kwargs": kwargs, "io_kwargs": io_kwargs}
        return self.pipeline.start_reading(read, **options)

    def _scope(self, salt: str | None) -> dict[str, Any]:
        root = (salt or "").encode("utf-8", "replace")
        return {"max_tokens": self._max_model_len, "root": root}

    def place(
        self,
        text: str | None,
        ids: Sequence[int] | None,
        inputs: MediaInputs,
        *,
        add_special_tokens: bool,
    ) -> PlacedMedia:
        """Return the ids of a prompt, text or ids, with the tokens of its media.

        Raises RequestError.
        """
        processor = self.pipeline.processor
        if processor.is_whole_prompt:
            if text or (ids or ()) not in ((), processor.stand_in_ids) or len(inputs.items) != 1:
                raise RequestError(
                    f"this model reads a text or one {processor.modalities[0]}, never both: the "
                    f"prompt has {len(inputs.items)} items, and its text must be empty",
                    param="prompt",
                )
            return self.pipeline.place((), inputs.items)
        assert self._tokenizer is not None
        if ids is not None:
            items: Sequence[ReadyItem] = inputs.items
            if processor.text_placeholders:
                items = [as_token_placeholder(self._tokenizer, one, processor) for one in items]
            return self.pipeline.place(ids, items, may_be_expanded=True)
        assert text is not None
        if not inputs.is_rendered:
            text = processor.prompt_text(text, [one.modality for one in inputs.items])
        special = add_special_tokens and not processor.writes_special_tokens
        found, items = tokenize_prompt(
            self._tokenizer, text, inputs, processor, add_special_tokens=special
        )
        return self.pipeline.place(found, items)


class PlaceholderGuard:
    """Replaces placeholders in texts of users by marks, and puts them back in the prompt."""

    def __init__(self, reserved: re.Pattern[str]) -> None:
        self._pattern = reserved
        self._nonce = f"q{secrets.token_hex(12)}x"  # letters that no template and no JSON changes
        self._found: list[str] = []

    def protect(self, value: T) -> T:
        """Return a value with marks in all its texts; what has no placeholder is not copied.

        Raises RequestError for a value that is nested too deep.
        """
        try:
            return self._protect(value)  # type: ignore[no-any-return]
        except RecursionError:
            raise RequestError("messages are nested too deep", param="messages") from None

    def _protect(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(self._mark, value) if self._pattern.search(value) else value
        if isinstance(value, Mapping):
            pairs = [(self._protect(key), self._protect(one)) for key, one in value.items()]
            same = all(a is c and b is d for (a, b), (c, d) in zip(pairs, value.items()))
            return value if same else dict(pairs)
        if isinstance(value, list | tuple):
            items = [self._protect(one) for one in value]
            return items if any(a is not b for a, b in zip(items, value)) else value
        return value

    def _mark(self, match: re.Match[str]) -> str:
        self._found.append(match[0])
        return f"{self._nonce}{len(self._found) - 1}q"

    def restore(self, text: str) -> tuple[str, list[Span]]:
        """Return the text without marks, and the spans that they stood for."""
        if not self._found:
            return text, []
        pieces: list[str] = []
        spans: list[Span] = []
        at = length = 0
        for match in re.finditer(rf"{self._nonce}(\d+)q", text):
            before, literal = text[at : match.start()], self._found[int(match[1])]
            pieces += [before, literal]
            length += len(before) + len(literal)
            spans.append((length - len(literal), length))
            at = match.end()
        return "".join([*pieces, text[at:]]), spans


def _reserved_strings(processor: MediaProcessor, tokenizer: Tokenizer | None) -> re.Pattern[str]:
    """All that a prompt may hold for an item, and the special tokens in it."""
    found: set[str] = set()
    tokens = [] if tokenizer is None else tokenizer.backend.added_tokens.values()
    for modality in processor.modalities:
        first = processor.placeholder(modality, 1)
        added = [one for one in tokens if one and one in first]
        found |= {re.escape(one) for one in added}
        if first:
            found.add(_placeholder_pattern(processor, modality))
    longest_first = sorted(found, key=len, reverse=True)
    return re.compile("|".join(longest_first) or r"(?!)")


def _placeholder_pattern(processor: MediaProcessor, modality: Modality) -> str:
    """Return a regular expression of the placeholders of a modality, with any number."""
    first, second = (re.escape(processor.placeholder(modality, number)) for number in (1, 2))
    return first if first == second else first.replace("1", r"\d+")


def tokenize_prompt(
    tokenizer: Tokenizer,
    text: str,
    inputs: MediaInputs,
    processor: MediaProcessor,
    *,
    add_special_tokens: bool,
) -> tuple[list[int], list[ReadyItem]]:
    """Return the ids of a prompt, and its items.

    A placeholder that is no token becomes an id below 0, which its item then replaces.
    """
    items = list(inputs.items)
    cuts = [
        _Cut(start, end, _encode_literal(tokenizer, text[start:end]))
        for start, end in inputs.literals
    ]
    writer = _ItemTexts(() if processor.text_placeholders else inputs.items, processor)
    if processor.text_placeholders:
        found = sorted(_find_placeholders(text, items, processor, inputs.literals))
        cuts += [
            _Cut(start, end, [-1 - place], *_around(items[place], processor))
            for start, end, place in found
        ]
        items = [
            replace(items[i], expansion=replace(items[i].expansion, replaces=(-1 - i,)))
            for i in dict.fromkeys([*(place for _, _, place in found), *range(len(items))])
        ]
    each = processor.special_tokens_in_parts and bool(items)
    if not cuts:
        return tokenizer.encode(writer.write(text), add_special_tokens or each), items
    ids: list[int] = []
    at = 0
    special, carried = each, ""
    for cut in sorted(cuts, key=lambda one: one.start):
        between = carried + writer.write(text[at : cut.start]) + cut.before
        if between or special:
            ids += tokenizer.encode(between, special)
        ids += cut.ids
        at, carried, special = cut.end, cut.after, each and min(cut.ids, default=0) < 0
    if at < len(text) or carried or special:
        ids += tokenizer.encode(carried + writer.write(text[at:]), special)
    if add_special_tokens and not each:
        ids = list(tokenizer.special_token_layout().join(ids))
    return ids, items


@dataclass(frozen=True, slots=True)
class _Cut:
    """A span of a prompt that becomes these ids. before, after: texts that are added beside it."""

    start: int
    end: int
    ids: list[int]
    before: str = ""
    after: str = ""


def _around(item: ReadyItem, processor: MediaProcessor) -> tuple[str, str]:
    """Return what the text of an item has before and after its placeholder."""
    form = processor.placeholder(item.modality, item.index)
    before, _, after = processor.item_text(item.media, item.index).partition(form)
    return before, after


def as_token_placeholder(
    tokenizer: Tokenizer, item: ReadyItem, processor: MediaProcessor
) -> ReadyItem:
    """Return an item that replaces the tokens of a placeholder that is a text, in a prompt of ids.

    Its own tokens then include the texts around it.
    """
    made = item.expansion
    form = tokenizer.encode(processor.placeholder(item.modality, item.index), False)
    before, after = (
        tuple(tokenizer.encode(text, False)) if text else () for text in _around(item, processor)
    )
    runs = tuple((start + len(before), count) for start, count in made.runs)
    ids = (*before, *made.token_ids, *after)
    return replace(item, expansion=replace(made, token_ids=ids, runs=runs, replaces=tuple(form)))


class _ItemTexts:
    """Writes the texts of items in place of their placeholders, in successive parts of a prompt."""

    def __init__(self, items: Sequence[ReadyItem], processor: MediaProcessor) -> None:
        self._processor = processor
        self._items: dict[str, list[ReadyItem]] = {}
        for one in items:
            form = processor.placeholder(one.modality, one.index)
            if form:
                self._items.setdefault(form, []).append(one)

    def write(self, text: str) -> str:
        """Return a part of the prompt with these texts; further placeholders stay."""
        if not self._items:
            return text
        forms = "|".join(re.escape(one) for one in self._items)
        return re.sub(forms, self._next, text)

    def _next(self, match: re.Match[str]) -> str:
        waiting = self._items[match[0]]
        if not waiting:
            return match[0]
        one = waiting.pop(0)
        following = match.string[match.end() : match.end() + 1]
        return self._processor.item_text(one.media, one.index, following)


def _encode_literal(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that must not become special tokens: it is cut within those."""
    added = tokenizer.backend.added_tokens.values()
    if len(text) < 2 or not any(one and one in text for one in added):
        return tokenizer.encode(text, False)
    return tokenizer.encode(text[:1], False) + _encode_literal(tokenizer, text[1:])


def _find_placeholders(
    text: str, items: Sequence[ReadyItem], processor: MediaProcessor, literals: Sequence[Span]
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, index of the item) of each placeholder that is there.

    Raises RequestError where there are more than items.
    """
    for modality in dict.fromkeys(one.modality for one in items):
        total = sum(
            not any(start <= match.start() < end for start, end in literals)
            for match in re.finditer(_placeholder_pattern(processor, modality), text)
        )
        given = sum(one.modality == modality for one in items)
        check_number(total, given, processor.placeholder(modality, given + 1), modality, "prompt")
    ends: dict[str, int] = {}
    for place, item in enumerate(items):
        form = processor.placeholder(item.modality, item.index)
        at = text.find(form, ends.get(form, 0))
        while at >= 0 and any(start <= at < end for start, end in literals):
            at = text.find(form, at + len(form))
        if at >= 0:
            ends[form] = at + len(form)
            yield at, at + len(form), place


def item_alone(
    read: ParsedPrompt, decoder: ParsedPrompt | None, media: MediaInputs | None
) -> tuple[ParsedPrompt, ParsedPrompt, MediaInputs | None]:
    """Return the halves of a prompt whose encoder reads an item alone: the text is the decoder's.

    Raises RequestError for a prompt without an item.
    """
    if read.media is None and media is None:
        raise RequestError(
            "this model continues a text about an image: the prompt has none; send "
            '{"prompt": ..., "multi_modal_data": {"image": ...}}',
            param="prompt",
        )
    text = replace(read, media=None) if decoder is None else decoder
    inputs = None if media is None else replace(media, literals=())
    return replace(read, text="", ids=None), text, inputs


def check_no_truncation(length: int, most: int | None) -> None:
    """Raise RequestError if a prompt with media would have to be cut."""
    if most is not None and length > most:
        raise RequestError(
            f"the prompt has {length} tokens with its media, and truncate_prompt_tokens is {most}: "
            "a prompt with media is not cut",
            param="truncate_prompt_tokens",
        )
