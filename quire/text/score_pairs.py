"""Pairs of texts for scores: their forms, and the token ids of one prompt for both."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from quire.core.param_checks import check_int
from quire.errors import RequestError, TooLong, Unsupported, context_overflow
from quire.media.content_parts import is_media_part
from quire.media.expand import PlacedMedia
from quire.text.marked_media import MarkedTexts
from quire.text.pooling_plan import PoolingInputOptions, PoolingPlan
from quire.text.pooling_tokens import ItemNames, PromptTokenizer, TokenizedPrompt, cut, salt_digest
from quire.text.score_prompts import ScoreTemplate
from quire.text.tokenizing.special_token_layout import SpecialTokenLayout

log = logging.getLogger(__name__)

SHORTER_PAIR = "set max_tokens_per_doc or truncate_prompt_tokens, or reduce the texts"
_FORMS = "a text, or a dict with 'content' (a list of parts)"


def read_texts(given: object, param: str, media: MarkedTexts) -> list[str]:
    """Return the texts of one side of a score, with marks for their media, which get the items.

    Raises RequestError, Unsupported.
    """
    if isinstance(given, (str, Mapping)):
        return [_read_text(given, param, media)]
    if not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
        message = f"{param} must be {_FORMS}, or a list of those"
        raise RequestError(f"{message}; got a {type(given).__name__}", param=param)
    if not given:
        message = f"At least one text element must be given; {param} is empty"
        raise RequestError(message, param=param)
    return [_read_text(one, f"{param}[{i}]", media) for i, one in enumerate(given)]


def _read_text(given: object, param: str, media: MarkedTexts) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping) and "content" not in given and is_media_part(given):
        return media.add(given, param)
    if isinstance(given, Mapping):
        content = given.get("content", given.get("text"))
        if isinstance(content, str):
            return content
        if isinstance(content, Sequence):
            pieces = [
                media.add(part, f"{param}.content[{i}]")
                if is_media_part(part)
                else _part_text(part, param)
                for i, part in enumerate(content)
            ]
            return "".join(pieces)
    raise RequestError(f"{param} must be {_FORMS}; got a {type(given).__name__}", param=param)


def _part_text(part: object, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", None) and isinstance(text, str):
        return text
    if isinstance(kind, str):
        raise Unsupported(
            f"{param} has a part of the type {kind!r:.60}; known are text and those of media",
            param=param,
        )
    raise RequestError(f"{param} must be {_FORMS}", param=param)


def pair_indices(queries: int, documents: int) -> list[tuple[int, int]]:
    """Return which query belongs to which document. Raises RequestError."""
    if queries not in (1, documents):
        raise RequestError(
            "Input lengths must be either 1:1, 1:N or N:N; got "
            f"{queries} queries and {documents} documents",
            param="documents",
        )
    return [(0 if queries == 1 else i, i) for i in range(documents)]


def check_side_limits(options: PoolingInputOptions, max_model_len: int) -> None:
    """Check max_tokens_per_query and max_tokens_per_doc. Raises RequestError."""
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        allowed = f"an integer in [0, {max_model_len}), less than max_model_len; 0: no limit"
        check_int(name, getattr(options, name), 0, max_model_len - 1, allowed)


class PairTokenizer:
    """Makes one prompt of a query and a document, for models that read both at once."""

    def __init__(self, prompts: PromptTokenizer) -> None:
        self._prompts = prompts
        self._warned = False

    def join(
        self,
        pairs: Sequence[tuple[str, str]],
        plan: PoolingPlan,
        options: PoolingInputOptions,
        names: ItemNames,
    ) -> list[TokenizedPrompt]:
        """Join as the tokenizer does: [CLS] query [SEP] document [SEP], with types."""
        prompts = self._prompts
        layout = SpecialTokenLayout()
        if options.add_special_tokens:
            layout = prompts.require_tokenizer().special_token_layout(pair=True)
        if not (layout.between or self._warned):
            self._warned = True
            log.warning(
                "scores: the tokenizer puts nothing between query and document; if this model was "
                "trained with a template, set chat_template to it"
            )
        ids = self._encode(pairs, names)
        salt = salt_digest(options.cache_salt)
        made = []
        for i, (query, document) in enumerate(pairs):
            try:
                if (placed := self._join_media(query, document, layout, plan, options)) is not None:
                    made.append(TokenizedPrompt(placed.ids, salt=salt, media=placed))
                    continue
                one, two = self._fit(ids[query], ids[document], layout.count, plan, options)
                joined = layout.join(one, two)
                prompts.check_vocabulary(joined, "the tokenized text")
            except RequestError as error:
                raise names.locate(error, i) from None
            types = prompts.types_of_pair(layout, len(one), len(two))
            made.append(TokenizedPrompt(joined, types, salt=salt))
        return made

    def _join_media(
        self,
        query: str,
        document: str,
        layout: SpecialTokenLayout,
        plan: PoolingPlan,
        options: PoolingInputOptions,
    ) -> PlacedMedia | None:
        """Return the prompt of a pair with media. None: it has none."""
        if options.marked is None:
            return None
        text, inputs = options.marked.write(query + document)
        if inputs is None:
            return None
        if layout.between:
            message = "images, video and audio need a chat_template that writes query and document"
            raise Unsupported(message, param="chat_template")
        middle = len(options.marked.write(query)[0])  # tokens do not cross it
        inputs = replace(inputs, literals=[*inputs.literals, (middle, middle)])
        special = options.add_special_tokens
        return self._prompts.place(text, None, inputs, plan, special=special)

    def _encode(self, pairs: Sequence[tuple[str, str]], names: ItemNames) -> dict[str, list[int]]:
        """Tokenize each text once."""
        places: dict[str, int] = {}
        for i, pair in enumerate(pairs):
            for text in pair:
                places.setdefault(text, i)
        made = self._prompts.encode_texts(list(places), names, list(places.values()))
        return dict(zip(places, made))

    def _fit(
        self,
        query: list[int],
        document: list[int],
        special: int,
        plan: PoolingPlan,
        options: PoolingInputOptions,
    ) -> tuple[list[int], list[int]]:
        """Cut both to their own limits, then to that of the prompt."""
        side = self._prompts.side(options)
        if options.max_tokens_per_query:
            query = cut(query, options.max_tokens_per_query, side)
        if options.max_tokens_per_doc:
            document = cut(document, options.max_tokens_per_doc, side)
        room = (plan.max_tokens or self._prompts.max_model_len) - special
        if len(query) + len(document) <= room:
            return query, document
        if plan.max_tokens is None and not options.max_tokens_per_doc:
            raise self._too_long(len(query), len(document), special)
        if options.max_tokens_per_doc:  # the query stays whole
            if len(query) >= room:
                raise self._too_long(len(query), len(document), special)
            return query, cut(document, room - len(query), side)
        return _cut_longest(query, document, max(room, 0), side)

    def _too_long(self, query: int, document: int, special: int) -> TooLong:
        problem = f"the query has {query} tokens, the document {document}, and {special} are added"
        limit = self._prompts.max_model_len
        return context_overflow(limit, problem, param="documents", remedy=SHORTER_PAIR)

    def write(
        self,
        pairs: Sequence[tuple[str, str]],
        template: ScoreTemplate,
        plan: PoolingPlan,
        options: PoolingInputOptions,
        names: ItemNames,
    ) -> list[TokenizedPrompt]:
        """Write both into a template. It stays whole: the document is cut if all is too long."""
        prompts = self._prompts
        tokenizer = prompts.require_tokenizer()
        layout = SpecialTokenLayout()
        if template.adds_special_tokens and options.add_special_tokens:
            layout = tokenizer.special_token_layout()
        side = prompts.side(options)
        cuts = options.max_tokens_per_query, options.max_tokens_per_doc
        if any(cuts):
            pairs = [
                (
                    tokenizer.cut_text(query, cuts[0], side) if cuts[0] else query,
                    tokenizer.cut_text(document, cuts[1], side) if cuts[1] else document,
                )
                for query, document in pairs
            ]
        texts = []
        for i, (query, document) in enumerate(pairs):
            try:
                texts.append(template.render(query, document, options.instruction))
            except RequestError as error:
                raise names.locate(error, i) from None
        made = []
        salt = salt_digest(options.cache_salt)
        for i, ids in enumerate(prompts.encode_texts(texts, names)):
            try:
                if options.marked is not None:
                    text, inputs = options.marked.write(texts[i], is_rendered=True)
                    if inputs is not None:
                        special = bool(layout.count)
                        placed = prompts.place(text, None, inputs, plan, special=special)
                        made.append(TokenizedPrompt(placed.ids, salt=salt, media=placed))
                        continue
                if plan.max_tokens is not None and len(ids) + layout.count > plan.max_tokens:
                    ids = self._write_short(pairs[i], template, plan, options, layout.count)
                self._check_length(len(ids) + layout.count)
                joined = layout.join(ids)
                prompts.check_vocabulary(joined, "the tokenized text")
            except RequestError as error:
                raise names.locate(error, i) from None
            made.append(TokenizedPrompt(joined, salt=salt))
        return made

    def _write_short(
        self,
        pair: tuple[str, str],
        template: ScoreTemplate,
        plan: PoolingPlan,
        options: PoolingInputOptions,
        special: int,
    ) -> list[int]:
        """Return ids of the template with as much of the document as fits."""
        tokenizer, (query, document) = self._prompts.require_tokenizer(), pair
        assert plan.max_tokens is not None
        side = self._prompts.side(options)
        while True:
            text = template.render(query, document, options.instruction)
            ids = tokenizer.encode(text, False)
            excess = len(ids) + special - plan.max_tokens
            if excess <= 0:
                return ids
            if not document:
                raise TooLong(
                    f"query and template have {len(ids) + special} tokens without the document, "
                    f"more than truncate_prompt_tokens ({plan.max_tokens}); raise it, or cut the "
                    "query with max_tokens_per_query",
                    param="truncate_prompt_tokens",
                )
            left = len(tokenizer.encode(document, False)) - excess
            shorter = tokenizer.cut_text(document, max(left, 0), side) if left > 0 else ""
            document = shorter if len(shorter) < len(document) else ""

    def _check_length(self, length: int) -> None:
        limit = self._prompts.max_model_len
        if length > limit:
            problem = f"query, document and template have {length} tokens"
            raise context_overflow(limit, problem, param="documents", remedy=SHORTER_PAIR)


def _cut_longest(
    first: list[int], second: list[int], room: int, side: str
) -> tuple[list[int], list[int]]:
    """Cut the longer of two until both fit; equal ones share the room, the second gets the rest."""
    short, long = sorted((len(first), len(second)))
    if 2 * short > room:
        short, long = room // 2, room - room // 2
    else:
        long = room - short
    sizes = (short, long) if len(first) <= len(second) else (long, short)
    return cut(first, sizes[0], side), cut(second, sizes[1], side)
