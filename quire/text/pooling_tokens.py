"""Token ids of pooling prompts: texts are tokenized together, then cut, joined and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from quire.config.engine_config import PoolingSection
from quire.core.param_checks import invalid_param
from quire.errors import RequestError, Unsupported, context_overflow
from quire.media.expand import PlacedMedia
from quire.text import prompts as prompt_forms
from quire.text.media_prompt import MediaInputs, MediaReader, check_no_truncation
from quire.text.pooling_plan import PoolingInputOptions, PoolingPlan, Role
from quire.text.prompts import ParsedPrompt, Prompt
from quire.text.tokenizing.special_token_layout import SpecialTokenLayout
from quire.text.tokenizing.tokenizer import Tokenizer

T = TypeVar("T", bound=Sequence[int])
SHORTER = "reduce its length, or set truncate_prompt_tokens"


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Ids of a prompt, or of the chunks of a long one."""

    ids: tuple[int, ...]
    types: bytes = b""  # of each id; b"": all 0
    chunks: tuple[tuple[int, ...], ...] = ()  # (): there is one, `ids`
    expansion: int = 0  # trailing tokens that expand a ColBERT query, or pad a text
    unattended: int = 0  # of those, how many no token attends to
    kept_rows: tuple[int, ...] | None = None  # tokens whose states count; None: all
    prefix_tokens: int = 0  # leading ones that do not count in means
    salt: bytes = b""
    media: PlacedMedia | None = None  # items of the prompt; its ids are `ids`


@dataclass(slots=True)
class _Parsed:
    """A prompt on its way: a text that is to be tokenized, or ids."""

    text: str | None = None
    text_ids: Sequence[int] = ()  # of the text, without special tokens
    ids: tuple[int, ...] = ()
    types: bytes = b""
    prefix_tokens: int = 0
    salt: str | None = None
    media: PlacedMedia | None = None  # with all ids


@dataclass(frozen=True, slots=True)
class ItemNames:
    """Names items of a caller's list in errors: documents[3]. places: their indices in the list."""

    param: str
    count: int
    places: Sequence[int] | None = None  # None: as they come

    def locate(self, error: RequestError, item: int) -> RequestError:
        """Return the error with the name of its item; unchanged if there is only one."""
        if self.count == 1:
            return error
        place = item if self.places is None else self.places[item]
        return type(error)(f"{self.param}[{place}]: {error}", param=self.param)


class PromptTokenizer:
    """Tokenizes prompts of one model. Threads may share it."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        section: PoolingSection,
        max_model_len: int,
        vocab_size: int,
        media: MediaReader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.media = media
        self.max_model_len = max_model_len
        self._section = section
        self._vocab_size = vocab_size
        self._prefix_tokens: dict[tuple[str, bool], int] = {}
        late = section.late_interaction
        skiplist = () if late is None or tokenizer is None else late.skiplist
        found = (self._token_id(word) for word in skiplist)
        self._skipped = frozenset(one for one in found if one is not None)

    def tokenize(
        self,
        prompts: Sequence[Prompt],
        plans: Sequence[PoolingPlan],
        options: PoolingInputOptions,
        names: ItemNames,
        media: Sequence[MediaInputs | None] = (),
    ) -> list[TokenizedPrompt]:
        """Return the ids of each prompt. media: of each, ready; (): what their dicts have.

        Raises RequestError, TooLong, Unsupported.
        """
        parsed: list[_Parsed] = []
        for i, (prompt, plan) in enumerate(zip(prompts, plans)):
            try:
                parsed.append(self._parse(prompt, plan, options, media[i] if media else None))
            except RequestError as error:
                raise names.locate(error, i) from None
        at = [i for i, one in enumerate(parsed) if one.text is not None]
        made = self.encode_texts([parsed[i].text or "" for i in at], names, at)
        for i, ids in zip(at, made):
            parsed[i].text_ids = ids
        layout = SpecialTokenLayout()
        if at and options.add_special_tokens:
            layout = self.require_tokenizer().special_token_layout()
        tokens: list[TokenizedPrompt] = []
        for i, (one, plan) in enumerate(zip(parsed, plans)):
            try:
                tokens.append(self._assemble(one, plan, layout, options))
            except RequestError as error:
                raise names.locate(error, i) from None
        return tokens

    def encode_texts(
        self, texts: Sequence[str], names: ItemNames, places: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Return the ids of texts, without special tokens. places: the item of each text."""
        if not texts:
            return []
        tokenizer = self.require_tokenizer()
        try:
            return tokenizer.encode_batch(texts)
        except RequestError:
            for i, text in enumerate(texts):
                try:
                    tokenizer.encode(text, False)
                except RequestError as error:
                    raise names.locate(error, i if places is None else places[i]) from None
            raise

    def check_vocabulary(self, ids: Sequence[int], param: str) -> None:
        """Raise RequestError for an id that the model does not have."""
        prompt_forms.check_vocabulary(ids, self._vocab_size, param)

    def types_of_pair(self, layout: SpecialTokenLayout, first: int, second: int) -> bytes:
        """Return the types that the model reads of a pair of texts of these lengths."""
        return layout.join_types(first, second) if self._section.token_types > 1 else b""

    def side(self, options: PoolingInputOptions) -> str:
        """From which side texts are cut."""
        own = "right" if self.tokenizer is None else self.tokenizer.truncation_side
        return options.truncation_side or own

    def require_tokenizer(self) -> Tokenizer:
        """Raises RequestError if there is none."""
        if self.tokenizer is None:
            raise RequestError(
                "this engine has no tokenizer (skip_tokenizer_init); send prompt_token_ids",
                param="prompt",
            )
        return self.tokenizer

    # -- forms of a prompt --------------------------------------------------------------------

    def _parse(
        self,
        prompt: Prompt,
        plan: PoolingPlan,
        options: PoolingInputOptions,
        inputs: MediaInputs | None,
    ) -> _Parsed:
        if isinstance(prompt, str) and options.marked is not None:
            prompt, inputs = options.marked.write(prompt)
        if isinstance(prompt, str) and inputs is None:
            return self._parse_text(prompt, plan, options, None)
        types = None
        if isinstance(prompt, Mapping) and prompt.get("token_type_ids") is not None:
            types = prompt_forms.check_token_ids(prompt["token_type_ids"], "token_type_ids")
            prompt = {key: value for key, value in prompt.items() if key != "token_type_ids"}
        parsed = prompt_forms.parse_prompt(prompt)
        more = {"suffix": parsed.suffix, "prompt_embeds": parsed.embeds}
        for name, value in more.items():
            if value is not None:
                raise Unsupported(f"{name}: pooling prompts are text or token ids", param=name)
        if parsed.media is not None or inputs is not None:
            return self._parse_media(parsed, inputs, plan, options)
        if self.media is not None and self.media.pipeline.processor.stand_in_ids:
            message = "this model reads no tokens alone: the prompt needs multi_modal_data"
            raise RequestError(message, param="multi_modal_data")
        if parsed.ids is not None:
            self.check_vocabulary(parsed.ids, "prompt_token_ids")
            return _Parsed(ids=parsed.ids, types=self._types(types, parsed.ids), salt=parsed.salt)
        if types is not None:
            message = "token_type_ids needs prompt_token_ids: a text has types of its own"
            raise RequestError(message, param="token_type_ids")
        assert parsed.text is not None
        return self._parse_text(parsed.text, plan, options, parsed.salt)

    def _parse_text(
        self, text: str, plan: PoolingPlan, options: PoolingInputOptions, salt: str | None
    ) -> _Parsed:
        count = 0
        if plan.prefix and not self._section.include_prompt:
            count = self._count_prefix(plan.prefix, options.add_special_tokens)
        text = plan.prefix + text
        is_cut = plan.max_tokens is not None or plan.role is not None
        limit = self.max_model_len if is_cut else self._longest(plan)
        bound = self.require_tokenizer().max_chars(limit) if len(text) > limit else None
        if bound is not None and len(text) > bound:
            if not is_cut:
                problem = f"the input has {len(text)} characters, of which at most {bound} fit"
                raise context_overflow(limit, problem, param="prompt", remedy=SHORTER)
            text = text[-bound:] if self.side(options) == "left" else text[:bound]
        return _Parsed(text=text, prefix_tokens=count, salt=salt)

    def _parse_media(
        self,
        parsed: ParsedPrompt,
        inputs: MediaInputs | None,
        plan: PoolingPlan,
        options: PoolingInputOptions,
    ) -> _Parsed:
        if self.media is None:
            message = "multi_modal_data: this model reads text only"
            raise Unsupported(message, param="multi_modal_data")
        if plan.role is not None:
            message = "multi_modal_data: queries and documents of this model are texts"
            raise Unsupported(message, param="multi_modal_data")
        salt = options.cache_salt if parsed.salt is None else parsed.salt
        if inputs is None:
            assert parsed.media is not None
            inputs = MediaInputs(self.media.start(parsed.media, salt).result())
        count = 0
        if parsed.ids is None:
            assert parsed.text is not None
            if plan.prefix and not self._section.include_prompt:
                count = self._count_prefix(plan.prefix, options.add_special_tokens)
            parsed = replace(parsed, text=plan.prefix + parsed.text)
            inputs = inputs.behind(len(plan.prefix))
        placed = self.place(
            parsed.text, parsed.ids, inputs, plan, special=options.add_special_tokens
        )
        return _Parsed(prefix_tokens=count, salt=parsed.salt, media=placed)

    def place(
        self,
        text: str | None,
        ids: tuple[int, ...] | None,
        inputs: MediaInputs,
        plan: PoolingPlan,
        *,
        special: bool,
    ) -> PlacedMedia:
        """Return the ids of a prompt with its media. special: the tokenizer adds special tokens.

        Raises RequestError, TooLong.
        """
        assert self.media is not None
        bound = self.require_tokenizer().max_chars(self.max_model_len) if text else None
        if bound is not None and len(text or "") > bound:
            problem = f"the input has {len(text or '')} characters, of which at most {bound} fit"
            raise context_overflow(self.max_model_len, problem, param="prompt")
        self.check_vocabulary([*{*(ids or ())} - inputs.marks], "prompt_token_ids")
        placed = self.media.place(text, ids, inputs, add_special_tokens=special)
        length = len(placed.ids) + max(placed.rope_delta, 0)
        if length > self.max_model_len:
            problem = f"the input has {length} tokens with its media"
            raise context_overflow(self.max_model_len, problem, param="prompt")
        if not placed.ids:
            raise RequestError("the text is empty: it has no tokens", param="prompt")
        check_no_truncation(length, plan.max_tokens)
        self.check_vocabulary([*{*placed.ids} - inputs.marks], "the tokenized text")
        return placed

    def _types(self, given: tuple[int, ...] | None, ids: Sequence[int]) -> bytes:
        if given is None:
            return b""
        if len(given) != len(ids):
            message = f"token_type_ids must be as many as prompt_token_ids ({len(ids)})"
            raise RequestError(f"{message}, got {len(given)}", param="token_type_ids")
        known = max(self._section.token_types, 1)
        if given and not (min(given) >= 0 and max(given) < known):
            allowed = f"integers in [0, {known}), the types of this model"
            raise invalid_param("token_type_ids", given, allowed)
        return bytes(given) if any(given) else b""

    def _count_prefix(self, prefix: str, add_special_tokens: bool) -> int:
        """Return how many leading tokens are the prefix, and the special ones before it."""
        key = prefix, add_special_tokens
        found = self._prefix_tokens.get(key)
        if found is None:
            tokenizer = self.require_tokenizer()
            found = len(tokenizer.encode(prefix, False))
            if add_special_tokens:
                found += len(tokenizer.special_token_layout().before)
            self._prefix_tokens[key] = found
        return found

    # -- lengths ------------------------------------------------------------------------------

    def _longest(self, plan: PoolingPlan) -> int:
        """Tokens of the longest input that is not cut. Longer than the model: it is divided."""
        most = self._section.max_embed_len if plan.pooling.task == "embed" else None
        return max(self.max_model_len, most or 0)

    def _assemble(
        self,
        parsed: _Parsed,
        plan: PoolingPlan,
        layout: SpecialTokenLayout,
        options: PoolingInputOptions,
    ) -> TokenizedPrompt:
        """Add special tokens, and cut, divide or refuse what is too long."""
        salt = salt_digest(options.cache_salt if parsed.salt is None else parsed.salt)
        if parsed.media is not None:
            count = parsed.prefix_tokens
            return TokenizedPrompt(
                parsed.media.ids, prefix_tokens=count, salt=salt, media=parsed.media
            )
        if parsed.text is None:
            return self._assemble_ids(parsed, plan, options, salt)
        ids = parsed.text_ids
        if plan.role is not None:
            return self._assemble_late(ids, plan, layout, salt)
        room = (plan.max_tokens or self.max_model_len) - layout.count
        if plan.max_tokens is not None and len(ids) > room:
            ids = cut(ids, room, self.side(options))
        total = len(ids) + layout.count
        if not total:
            raise RequestError("the text is empty: it has no tokens", param="prompt")
        if total > self.max_model_len:
            self._check_length(total, plan)
            parts = [ids[i : i + room] for i in range(0, len(ids), room)]
            chunks = tuple(layout.join(part) for part in parts)
            return TokenizedPrompt((), b"", chunks, salt=salt, prefix_tokens=parsed.prefix_tokens)
        made = layout.join(ids)
        self.check_vocabulary(made, "the tokenized text")
        types = self.types_of_pair(layout, len(ids), 0)
        prefix = parsed.prefix_tokens
        return self._ended(TokenizedPrompt(made, types, prefix_tokens=prefix, salt=salt))

    def _ended(self, made: TokenizedPrompt) -> TokenizedPrompt:
        """End a prompt where the model reads its embedding: behind an end token, or the padding."""
        section, ids = self._section, made.ids
        if section.end_token is not None:
            end = max(ids) if section.end_token == "highest" else section.end_token
            # A prompt without the token has the state of its first one, as in transformers.
            return replace(made, ids=ids[: ids.index(end) + 1 if end in ids else 1])
        if section.padded_length is None or len(ids) >= section.padded_length:
            return made
        own = None if self.tokenizer is None else self.tokenizer.pad_token_id
        pad = section.pad_token if own is None else own
        count = section.padded_length - len(ids)
        return replace(made, ids=(*ids, *(pad,) * count), expansion=count)

    def _assemble_ids(
        self, parsed: _Parsed, plan: PoolingPlan, options: PoolingInputOptions, salt: bytes
    ) -> TokenizedPrompt:
        ids, types = parsed.ids, parsed.types
        if not ids:
            raise RequestError("the prompt is empty: it has no tokens", param="prompt")
        if plan.max_tokens is not None and len(ids) > plan.max_tokens:
            side = self.side(options)
            ids, types = cut(ids, plan.max_tokens, side), cut(types, plan.max_tokens, side)
        size = self.max_model_len
        if len(ids) <= size:
            kept = self._kept_rows(ids, plan.role)
            return self._ended(TokenizedPrompt(ids, types, kept_rows=kept, salt=salt))
        self._check_length(len(ids), plan)
        chunks = tuple(ids[i : i + size] for i in range(0, len(ids), size))
        return TokenizedPrompt((), b"", chunks, salt=salt)

    def _check_length(self, length: int, plan: PoolingPlan) -> None:
        """Raise TooLong unless an input of this length may be divided."""
        longest = self._longest(plan)
        if length > longest:
            problem = f"the input has {length} tokens"
            raise context_overflow(longest, problem, param="prompt", remedy=SHORTER)

    # -- ColBERT ------------------------------------------------------------------------------

    def _assemble_late(
        self, ids: Sequence[int], plan: PoolingPlan, layout: SpecialTokenLayout, salt: bytes
    ) -> TokenizedPrompt:
        """Add the marker of the role; expand a query, cut to the lengths of the model's files."""
        late = self._section.late_interaction
        assert late is not None
        is_query = plan.role == "query"
        marker = self._marker(late.query_prefix if is_query else late.document_prefix)
        own = late.max_query_length if is_query else late.document_length
        limits = (self.max_model_len, plan.max_tokens, own)
        room = min(one for one in limits if one is not None) - layout.count - len(marker)
        made = layout.join([*marker, *cut(ids, room, "right")])
        expansion = 0
        if is_query and late.query_length is not None:
            expansion = max(min(late.query_length, self.max_model_len) - len(made), 0)
            made += (self._expansion_token(late.expansion_token),) * expansion
        if not made:
            raise RequestError("the text is empty: it has no tokens", param="prompt")
        self.check_vocabulary(made, "the tokenized text")
        kept = self._kept_rows(made, plan.role)
        unattended = 0 if late.attends_to_expansion else expansion
        return TokenizedPrompt(
            made, expansion=expansion, unattended=unattended, kept_rows=kept, salt=salt
        )

    def _marker(self, marker: str) -> list[int]:
        """Return the one token of a marker, "[unused0]" or "[Q] ", or those of its text."""
        for name in (marker, marker.strip()):
            if name and (found := self._token_id(name)) is not None:
                return [found]
        return self.require_tokenizer().encode(marker, False) if marker else []

    def _expansion_token(self, token: str | None) -> int:
        tokenizer = self.require_tokenizer()
        token = token or tokenizer.mask_token or tokenizer.eos_token
        found = None if token is None else self._token_id(token)
        if found is None:
            raise RequestError("this tokenizer has no token that expands queries", param="prompt")
        return found

    def _token_id(self, token: str) -> int | None:
        return self.require_tokenizer().backend.token_to_id(token)

    def _kept_rows(self, ids: Sequence[int], role: Role | None) -> tuple[int, ...] | None:
        if role != "document" or self._skipped.isdisjoint(ids):
            return None
        return tuple(i for i, token in enumerate(ids) if token not in self._skipped)


def cut(ids: T, most: int, side: str) -> T:
    """Drop from `side` so that `most` remain, none if that is negative."""
    most = max(most, 0)
    if len(ids) <= most:
        return ids
    return ids[len(ids) - most :] if side == "left" else ids[:most]  # type: ignore[return-value]


def salt_digest(salt: str | None) -> bytes:
    """Return what separates cached prefixes. Raises RequestError."""
    checked = prompt_forms.check_cache_salt(salt)
    return b"" if checked is None else hashlib.sha256(checked.encode("utf-8", "replace")).digest()
