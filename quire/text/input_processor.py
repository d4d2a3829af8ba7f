"""Builds core Requests from prompts and SamplingParams.

Everything that needs a tokenizer, a vocabulary or the engine's limits is checked here: a request
that passes is not refused later for its content. The forms of prompts are in quire.text.prompts,
the ranges of single fields in SamplingParams. The caller's SamplingParams is never modified: the
request gets a clone.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from quire.core.constraint import Constraint
from quire.core.params import MAX_STOP_IDS, SamplingParams
from quire.core.structured_output_params import StructuredOutputsParams
from quire.core.types import (
    AdapterRef,
    MediaItem,
    Request,
    StopConditions,
    ThinkingBudget,
)
from quire.errors import RequestError, TooLong, Unsupported, context_overflow
from quire.media.expand import PlacedMedia
from quire.text import fill_in_middle, prompt_embeds, prompts
from quire.text.bad_words import BadWordTokens
from quire.text.encoder_format import EncoderFormat
from quire.text.media_adapters import MediaAdapters
from quire.text.media_prompt import MediaInputs, MediaReader, check_no_truncation, item_alone
from quire.text.prediction import predicted_tokens, speculates
from quire.text.prompt_embeds import EmbedsFormat, PackedEmbeds
from quire.text.prompts import ParsedPrompt, Prompt
from quire.text.request_params import (
    check_allowed_tokens_remain,
    engine_params,
    reads_prefix_cache,
)
from quire.text.speech import SpeechFormat, parse_speech_prompt
from quire.text.tokenizing.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TOKENIZATION_KEYS = (
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "truncation",
    "max_length",
)
NO_EMBEDS = PackedEmbeds((), ())
NO_MEDIA = PlacedMedia(())


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request with the data that the text side needs later.

    params: as given (a clone). request.params may differ: best_of adds logprobs. prompt_text: of
    the decoder, where there is an encoder.
    """

    request: Request
    prompt_text: str | None
    params: SamplingParams
    encoder_prompt_text: str | None = None


@dataclass(frozen=True, slots=True)
class TokenizationOptions:
    """Options of tokenizing a prompt. most: tokens of the prompt; None: it is not cut.

    limit: tokens that fit, an output included.
    """

    limit: int
    add_special_tokens: bool = True
    max_tokens: int | None = None
    side: str = "left"
    text_ids: Sequence[int] | None = None  # of the text, where it is tokenized already


class InputProcessor:
    """Makes requests. Only its random source changes: one draw per unseeded request, in order.

    eos_ids: of the model's configs; the tokenizer's own EOS is added.
    max_logprobs: maximum that a request may set; -1: the whole vocabulary.
    checks: further ones of the params (engine-wide logits processors); they raise ValueError.
    constrain: makes the constraint of a structured output; None: not served.
    embeds: the vectors that prompts may have in place of token ids; None: such are refused.
    encoder: how prompts are divided between encoder and decoder; None: there is no encoder.
    media: reads images, video and audio; None: the model reads text only.
    media_adapters: kinds of media whose prompts have an adapter if they name none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_ids: Iterable[int] = (),
        defaults: SamplingParams | None = None,
        max_logprobs: int = 20,
        seeds: random.Random | None = None,
        checks: Iterable[Callable[[SamplingParams], None]] = (),
        constrain: Callable[[StructuredOutputsParams], Constraint] | None = None,
        embeds: EmbedsFormat | None = None,
        encoder: EncoderFormat | None = None,
        media: MediaReader | None = None,
        media_adapters: Collection[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.defaults = defaults or SamplingParams()
        self.max_logprobs = vocab_size if max_logprobs == -1 else max_logprobs
        own = tokenizer.eos_token_id if tokenizer is not None else None
        self.eos_ids = frozenset(eos_ids) | (frozenset() if own is None else {own})
        self._seeds = seeds or random.Random(0)
        self._checks = tuple(checks)
        self._constrain = constrain
        self._embeds = embeds
        self._encoder = encoder
        self.media = media
        self.media_adapters = MediaAdapters(media_adapters)
        self._bad_words = BadWordTokens(tokenizer)

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str,
        priority: int = 0,
        arrived_at: float = 0.0,
        cache_salt: str | None = None,
        tokenization: Mapping[str, object] | None = None,
        add_special_tokens: bool = True,
        text_ids: Sequence[int] | None = None,
        timed: bool = False,
        constraint: Constraint | None = None,
        thinking: ThinkingBudget | None = None,
        adapter: AdapterRef | None = None,
        media: MediaInputs | None = None,
    ) -> PreparedRequest:
        """Check a prompt and its parameters and make a Request of them.

        media: of the prompt, ready; None: what its dict has is prepared here, which takes long.
        tokenization: `tokenization_kwargs` of the callers' API (TOKENIZATION_KEYS).
        text_ids: of a text that no encoder reads and that is not cut; None: it is tokenized here.
        constraint: overrides what params.structured_outputs means.
        thinking: what params.thinking_token_budget means, given the model's reasoning tags.
        Raises: RequestError, TooLong, Unsupported.
        """
        requested = self._params(params)
        self._check_params(requested)
        if requested.thinking_token_budget is not None and thinking is None:
            message = "thinking_token_budget needs a conversation and a reasoning parser"
            raise RequestError(message, param="thinking_token_budget")
        how = self._tokenization(requested, tokenization, add_special_tokens)
        how = replace(how, text_ids=text_ids)
        embeds, placed, source_text = NO_EMBEDS, NO_MEDIA, None
        source: tuple[int, ...] = ()
        recording: MediaItem | None = None
        if self._encoder is not None and self._encoder.speech is not None:
            spoken = parse_speech_prompt(prompt)
            recording = self._encoder.speech.read_recording(spoken.audio)
            source = (0,) * recording.length
            ids = self._speech_ids(spoken.decoder, self._encoder.start_id)
            text = None if spoken.decoder is None else spoken.decoder.text
            parsed = prompts.ParsedPrompt(text, ids, spoken.salt)
            self._check_length(len(ids))
        elif self._encoder is not None:
            takes_media = self.media is not None
            read, decoder = prompts.parse_encoder_prompt(prompt, takes_media=takes_media)
            if self.media is not None and self.media.pipeline.processor.decoder_has_text:
                read, decoder, media = item_alone(read, decoder, media)
                how = replace(how, add_special_tokens=False)
            source, recording = self._source(read, how, media, cache_salt)
            source_text = read.text
            _check_source_length(len(source), self._encoder.max_len)
            ids = self._decoder_ids(decoder, self._encoder.start_id)
            text = None if decoder is None else decoder.text
            parsed = prompts.ParsedPrompt(text, ids, read.salt)
            self._check_length(len(ids))
        elif (parsed := prompts.parse_prompt(prompt)).media is not None or media is not None:
            placed = self._place_media(parsed, how, media, cache_salt)
            self._check_length(len(ids := placed.ids), max(placed.rope_delta, 0))
        elif parsed.embeds is None:
            self._check_length(len(ids := self._ids(parsed, how)))
        else:
            ids, embeds = self._pack_embeds(parsed, requested, how)
        salt = prompts.check_cache_salt(cache_salt) or parsed.salt
        stop = self._stop(requested, len(ids) + max(placed.rope_delta, 0))
        check_allowed_tokens_remain(requested, stop)
        constraint = constraint or self._constraint(requested.structured_outputs)
        forced = None  # a constraint decides on the end by itself
        if self._encoder is not None and constraint is None:
            forced = self._encoder.forced_tokens(ids, stop)
        content = placed.request_fields()
        if adapter is None and self.media_adapters.kinds:
            items = [*content.get("media", ()), *([] if recording is None else [recording])]
            adapter = self.media_adapters.choose({one.modality for one in items})
        if embeds.spans:
            content["extra_content"] = embeds.extra_content
        made = Request(
            id=request_id,
            prompt=ids,
            stop=stop,
            params=engine_params(requested),
            n=requested.num_sequences,
            seed=self._seed(requested),
            priority=priority,
            arrived_at=arrived_at,
            salt=b"" if salt is None else hashlib.sha256(salt.encode("utf-8", "replace")).digest(),
            read_prefix_cache=reads_prefix_cache(requested),
            timed=timed,
            constraint=constraint,
            thinking=thinking,
            prompt_embeds=embeds.spans,
            encoder_prompt=source,
            forced=forced,
            adapter=adapter,
            encoder_media=recording,
            speculates=speculates(requested),
            prediction=predicted_tokens(
                requested, self.tokenizer, most=stop.max_tokens, vocab=self.vocab_size
            ),
            **content,
        )
        return PreparedRequest(made, parsed.text, requested, source_text)

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt: of the encoder, where there is one."""
        return self.max_model_len if self._encoder is None else self._encoder.max_len

    def room_behind(self, request: Request) -> int:
        """Return how many tokens fit behind a prompt."""
        return self.max_model_len - len(request.prompt) - max(request.rope_delta, 0)

    @property
    def speech(self) -> SpeechFormat | None:
        """How recordings are read; None: the model reads none in this form."""
        return None if self._encoder is None else self._encoder.speech

    @property
    def has_encoder(self) -> bool:
        """Whether prompts are read by an encoder."""
        return self._encoder is not None

    # -- the prompt -------------------------------------------------------------------------

    def _source(
        self, read: ParsedPrompt, how: TokenizationOptions, media: MediaInputs | None, salt: object
    ) -> tuple[tuple[int, ...], MediaItem | None]:
        """Return the ids that an encoder reads, and the image among them."""
        if read.media is not None or media is not None:
            placed = self._place_media(read, how, media, salt)
            return placed.ids, next(iter(placed.items), None)
        if self.media is not None and read.text is not None:
            processor = self.media.pipeline.processor
            read = replace(read, text=processor.prompt_text(read.text, ()))
            special = how.add_special_tokens and not processor.writes_special_tokens
            how = replace(how, add_special_tokens=special)
        return self._ids(read, how, "encoder_prompt"), None

    def _decoder_ids(self, parsed: ParsedPrompt | None, start: int) -> tuple[int, ...]:
        """Return the ids that a decoder begins with: the first is always the model's own."""
        if parsed is None:
            return (start,)
        how = TokenizationOptions(self.max_model_len, add_special_tokens=False)
        given = self._ids(parsed, how, "decoder_prompt") if parsed.text or parsed.ids else ()
        return given if given[:1] == (start,) else (start, *given)

    def _speech_ids(self, parsed: ParsedPrompt | None, start: int) -> tuple[int, ...]:
        """Return the ids that a decoder begins with: context may precede the start token."""
        if parsed is None:
            return (start,)
        how = TokenizationOptions(self.max_model_len, add_special_tokens=False)
        ids = self._ids(parsed, how, "decoder_prompt")
        if start not in ids:
            message = "the decoder prompt of a speech model must have its start token"
            raise RequestError(f"{message} (<|startoftranscript|>)", param="prompt")
        return ids

    def _ids(
        self, parsed: ParsedPrompt, how: TokenizationOptions, param: str = "prompt"
    ) -> tuple[int, ...]:
        if parsed.suffix:
            ids = self._fill_in_middle(parsed, parsed.suffix, how)
        elif parsed.ids is None:
            assert parsed.text is not None
            ids = self._encode_text(parsed.text, how)
        else:
            ids = parsed.ids[_kept_tokens(len(parsed.ids), how)]
            self._check_ids("prompt_token_ids" if param == "prompt" else param, ids)
        if not ids:
            what = param.replace("_", " ")
            raise RequestError(
                f"the {what} is empty: it has no tokens; send at least one", param=param
            )
        return ids

    def require_embeds(self) -> EmbedsFormat:
        """Return the vectors that prompts may have. Raises RequestError where they have none."""
        if self._embeds is None:
            message = "prompt_embeds are off: start with --enable-prompt-embeds"
            raise RequestError(f"{message} (enable_prompt_embeds=True)", param="prompt_embeds")
        return self._embeds

    def _pack_embeds(
        self, parsed: ParsedPrompt, params: SamplingParams, how: TokenizationOptions
    ) -> tuple[tuple[int, ...], PackedEmbeds]:
        """Return the ids of a prompt of vectors, and the vectors."""
        model = self.require_embeds()
        if params.prompt_logprobs is not None:
            message = "prompt_logprobs need token ids, which prompt_embeds do not have"
            raise RequestError(message, param="prompt_logprobs")
        vectors = prompt_embeds.check_vectors(parsed.embeds, model.width)
        count, ids, ids_at = len(vectors), parsed.ids, parsed.ids_at
        if ids is not None and {len(ids), len(ids_at or ids)} != {count}:
            raise RequestError(
                f"prompt_token_ids and prompt_is_token_ids must have one entry for each of the "
                f"{count} rows of prompt_embeds, got {len(ids)} and {len(ids_at)}",
                param="prompt_token_ids",
            )
        kept = _kept_tokens(count, how)
        self._check_length(len(range(count)[kept]))
        ids = (prompt_embeds.PLACEHOLDER,) * len(range(count)[kept]) if ids is None else ids[kept]
        self._check_ids("prompt_token_ids", ids)
        return ids, prompt_embeds.pack_embeds(vectors[kept], ids_at[kept], model)

    def _place_media(
        self,
        parsed: ParsedPrompt,
        how: TokenizationOptions,
        inputs: MediaInputs | None,
        salt: object,
    ) -> PlacedMedia:
        """Return the ids of a prompt with the tokens of its media. Raises RequestError."""
        if self.media is None:
            message = "this model reads text only"
            raise Unsupported(f"prompt has 'multi_modal_data': {message}", param="multi_modal_data")
        if inputs is None:
            assert parsed.media is not None
            salt = prompts.check_cache_salt(salt) or parsed.salt
            inputs = MediaInputs(self.media.start(parsed.media, salt).result())
        self._check_chars(parsed.text or "", how)
        self._check_ids("prompt_token_ids", {*(parsed.ids or ())} - inputs.marks)
        special = how.add_special_tokens
        placed = self.media.place(parsed.text, parsed.ids, inputs, add_special_tokens=special)
        check_no_truncation(len(placed.ids), how.max_tokens)
        self._check_ids("prompt", {*placed.ids} - inputs.marks)
        return placed

    def _fill_in_middle(
        self, parsed: ParsedPrompt, suffix: str, how: TokenizationOptions
    ) -> tuple[int, ...]:
        if how.max_tokens is not None:
            raise RequestError(
                "truncate_prompt_tokens cannot be combined with suffix: cut the two texts",
                param="truncate_prompt_tokens",
            )
        prefix = parsed.text if parsed.ids is None else parsed.ids
        assert prefix is not None
        if isinstance(prefix, str):
            self._check_chars(prefix, how)
        else:
            self._check_ids("prompt_token_ids", prefix)
        self._check_chars(suffix, how)
        return fill_in_middle.build_prompt(
            self._require_tokenizer(), prefix, suffix, add_special_tokens=how.add_special_tokens
        )

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "this engine has no tokenizer (skip_tokenizer_init); send prompt_token_ids",
                param="prompt",
            )
        return self.tokenizer

    def _encode_text(self, text: str, how: TokenizationOptions) -> tuple[int, ...]:
        tokenizer = self._require_tokenizer()
        if how.max_tokens is not None:
            text = self._truncate_text(text, how)
            cut = tokenizer.encode(
                text, how.add_special_tokens, True, how.max_tokens, truncation_side=how.side
            )
            return tuple(cut)
        self._check_chars(text, how)
        ids = how.text_ids or tokenizer.encode(text, how.add_special_tokens)
        bos = tokenizer.bos_token_id
        if len(ids) > 1 and ids[0] == bos and ids[1] == bos:
            log.warning(
                "a prompt begins with the BOS token twice: its text has it and the tokenizer adds "
                "it; send token ids or leave %r out of the text",
                tokenizer.bos_token,
            )
        return tuple(ids)

    def char_bound(self, text: str, limit: int) -> int | None:
        """Most characters that fit, None if unknown or if the text is short enough anyway."""
        if self.tokenizer is None or len(text) <= limit:
            return None
        return self.tokenizer.max_chars(limit)

    def _check_chars(self, text: str, how: TokenizationOptions) -> None:
        bound = self.char_bound(text, how.limit)
        if bound is not None and len(text) > bound:
            problem = f"the prompt has {len(text)} characters, of which at most {bound} fit"
            raise context_overflow(how.limit, problem, param="prompt")

    def _truncate_text(self, text: str, how: TokenizationOptions) -> str:
        """Truncate a long text before it is tokenized, well outside of the part that is kept."""
        bound = self.char_bound(text, how.limit)
        if bound is None or len(text) <= bound:
            return text
        return text[-bound:] if how.side == "left" else text[:bound]

    def _check_length(self, length: int, ahead: int = 0) -> None:
        """ahead: by how much rotary positions run ahead of tokens, as those of long videos do."""
        if length + ahead >= self.max_model_len:
            positions = f" with positions up to {length + ahead}" if ahead else ""
            raise context_overflow(
                self.max_model_len,
                f"the prompt has {length} tokens{positions}, and the output needs at least one",
                param="prompt",
                remedy="reduce the length of the prompt, or set truncate_prompt_tokens",
            )

    def _check_ids(self, param: str, ids: Iterable[int]) -> None:
        prompts.check_vocabulary(ids, self.vocab_size, param)

    def _tokenization(
        self,
        params: SamplingParams,
        given: Mapping[str, object] | None,
        add_special_tokens: bool,
    ) -> TokenizationOptions:
        given = given or {}
        for key in given:
            if key not in TOKENIZATION_KEYS:
                raise RequestError(
                    f"tokenization_kwargs must not hold {key!r}; known are "
                    f"{', '.join(TOKENIZATION_KEYS)}",
                    param="tokenization_kwargs",
                )
        most = given.get("truncate_prompt_tokens", params.truncate_prompt_tokens)
        if given.get("truncation"):
            most = given.get("max_length", -1)
        side = given.get("truncation_side", "left")
        side = "left" if side is None else side
        if side not in ("left", "right"):
            raise RequestError(
                f"truncation_side must be 'left' or 'right', got {side!r}", param="truncation_side"
            )
        wanted = bool(given.get("add_special_tokens", add_special_tokens))
        limit = self.max_prompt_len
        kept = self._truncation_limit(most, params, limit)
        return TokenizationOptions(limit, wanted, kept, str(side))

    def _truncation_limit(self, most: object, params: SamplingParams, limit: int) -> int | None:
        """-1: what leaves room for max_tokens; an encoder's prompt shares nothing with those."""
        if most is None:
            return None
        if not isinstance(most, int) or isinstance(most, bool) or (most < 1 and most != -1):
            raise RequestError(
                f"truncate_prompt_tokens must be an integer >= 1, -1 or None, got {most!r}",
                param="truncate_prompt_tokens",
            )
        if most == -1:
            room = 0 if self._encoder is not None else params.max_tokens or 1
            return max(limit - room, 1)
        if most > limit:
            name = "max_model_len" if self._encoder is None else "what the encoder takes"
            raise RequestError(
                f"truncate_prompt_tokens is {most}, more than {name} ({limit}); lower it",
                param="truncate_prompt_tokens",
            )
        return most

    # -- the parameters ---------------------------------------------------------------------

    def _params(self, params: SamplingParams | None) -> SamplingParams:
        if params is None:
            params = self.defaults
        elif not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be a SamplingParams, got a {type(params).__name__}",
                param="sampling_params",
            )
        requested = params
        if not params.skip_clone:
            requested = params.clone()
            requested.verify()  # its fields may have been changed since it was made
        requested.reject_unimplemented_features()
        if self.tokenizer is None:
            if requested.structured_outputs is not None:
                message = "structured_outputs need a tokenizer, this engine has none"
                raise RequestError(f"{message} (skip_tokenizer_init)", param="structured_outputs")
            if requested.stop_strings or requested.bad_words:
                raise RequestError(
                    "stop strings and bad_words need a tokenizer, this engine has none "
                    "(skip_tokenizer_init); use stop_token_ids",
                    param="stop" if requested.stop_strings else "bad_words",
                )
            requested.detokenize = False
        requested.bad_words_token_ids = self._bad_words.token_ids(requested.bad_words or ())
        self._check_ids("bad_words", (i for ids in requested.bad_words_token_ids for i in ids))
        return requested

    def _check_params(self, params: SamplingParams) -> None:
        for param in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            self._check_ids(param, getattr(params, param) or ())
        if len(params.stop_token_ids or ()) > MAX_STOP_IDS:
            raise RequestError(
                f"stop_token_ids holds {len(params.stop_token_ids or ())} ids; at most "
                f"{MAX_STOP_IDS} are allowed",
                param="stop_token_ids",
            )
        if len(params.allowed_token_ids or ()) > self.vocab_size:
            raise RequestError(
                f"allowed_token_ids holds {len(params.allowed_token_ids or ())} ids; this model "
                f"has {self.vocab_size}",
                param="allowed_token_ids",
            )
        self._check_logprobs("logprobs", params.logprobs)
        self._check_logprobs("prompt_logprobs", params.prompt_logprobs)
        for check in self._checks:
            try:
                check(params)
            except RequestError:
                raise
            except ValueError as error:
                raise RequestError(str(error), param="extra_args") from error

    def _check_logprobs(self, param: str, requested: int | None) -> None:
        count = self.vocab_size if requested == -1 else requested
        if count is not None and count > self.max_logprobs:
            raise RequestError(
                f"{param} asks for {count} per token; at most {self.max_logprobs} are allowed "
                "(raise max_logprobs of the engine, -1 for no limit)",
                param=param,
            )

    def _constraint(self, requested: StructuredOutputsParams | None) -> Constraint | None:
        if requested is None:
            return None
        if self._constrain is None:
            message = "structured_outputs: this engine gives texts no form"
            raise Unsupported(message, param="structured_outputs")
        return self._constrain(requested)

    def _stop(self, params: SamplingParams, prompt_len: int) -> StopConditions:
        tokens_left = self.max_model_len - prompt_len
        most = tokens_left if params.max_tokens is None else min(params.max_tokens, tokens_left)
        return StopConditions(
            max_tokens=most,
            min_tokens=min(params.min_tokens, most),
            eos_ids=frozenset() if params.ignore_eos else self.eos_ids,
            token_ids=frozenset(params.stop_token_ids or ()),
        )

    def _seed(self, params: SamplingParams) -> int:
        return self._seeds.getrandbits(63) if params.seed is None else params.seed


def _check_source_length(length: int, limit: int) -> None:
    if length > limit:
        raise TooLong(
            f"the encoder prompt has {length} tokens, and this model's encoder takes {limit}. "
            "Please reduce its length, or set truncate_prompt_tokens",
            param="prompt",
        )


def _kept_tokens(length: int, how: TokenizationOptions) -> slice:
    """Return which of `length` tokens remain after truncation."""
    if how.max_tokens is None or length <= how.max_tokens:
        return slice(0, length)
    first = length - how.max_tokens if how.side == "left" else 0
    return slice(first, first + how.max_tokens)
