"""Builds core Requests of pooling models from texts, pairs of texts and PoolingParams.

As quire.text.input_processor for generation, all that needs a tokenizer, a vocabulary, the model's
pooling section or its length is checked here. An error names the index of its item.
quire.text.pooling_output makes numbers of the engine's results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.config.engine_config import PoolingSection, PoolingTask
from quire.core.params import SamplingParams
from quire.core.pooling_params import PoolingParams
from quire.core.types import Pooling, Request, StopConditions
from quire.errors import RequestError
from quire.text.marked_media import MarkedTexts
from quire.text.media_prompt import MediaInputs, MediaReader
from quire.text.pooling_plan import PoolingInputOptions, PoolingPlan, PoolingPlanner, Role
from quire.text.pooling_tokens import ItemNames, PromptTokenizer, TokenizedPrompt
from quire.text.prompts import Prompt
from quire.text.score_pairs import PairTokenizer, check_side_limits, pair_indices, read_texts
from quire.text.score_prompts import ScoreTemplate, given_template, own_template
from quire.text.tokenizing.tokenizer import Tokenizer

ScoreKind = Literal["cross_encoder", "bi_encoder", "late_interaction"]
DEFAULT_OPTIONS = PoolingInputOptions()
PIECE_PROMPTS = 256
"""Prompts that are tokenized together: so many that tokenizer threads are busy."""

_NO_STOP = StopConditions(max_tokens=1)
_NO_SAMPLING = SamplingParams()
"""Shared by all pooling requests: nothing reads or changes them."""


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One prompt: its request, or those of the chunks of a long text, and what follows them."""

    requests: tuple[Request, ...]
    num_tokens: int  # without those that expand a ColBERT query
    normalize: bool = False  # the average of chunks has an L2 norm of 1
    kept_rows: tuple[int, ...] | None = None  # of a token task; None: all

    @property
    def pooling(self) -> Pooling:
        pooling = self.requests[0].pooling
        assert pooling is not None
        return pooling

    @property
    def token_ids(self) -> list[int]:
        return [token for request in self.requests for token in request.prompt]


@dataclass(frozen=True, slots=True)
class ScoreInputs:
    """Prompts of scores. places: of each score, its prompt, or those of its query and document."""

    kind: ScoreKind
    inputs: list[PoolingInput]
    places: list[tuple[int, ...]]
    similarity: str  # of two embeddings


class PoolingInputProcessor:
    """Makes requests of one model. Threads may share it.

    generates: the model generates too. chat_template: the server's, which may write scores.
    media: reads images, video and audio; None: the model reads text only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        section: PoolingSection,
        *,
        max_model_len: int,
        vocab_size: int,
        generates: bool = False,
        chat_template: str | None = None,
        media: MediaReader | None = None,
    ) -> None:
        self.section = section
        self.max_model_len = max_model_len
        self.media = media
        self._generates = generates
        self._planner = PoolingPlanner(section, max_model_len, vocab_size)
        self._prompts = PromptTokenizer(tokenizer, section, max_model_len, vocab_size, media)
        self._pairs = PairTokenizer(self._prompts)
        self._template: ScoreTemplate | None = None
        if tokenizer is not None and not generates and section.tasks[0] == "classify":
            self._template = own_template(section.score_format, tokenizer, chat_template)

    def iter_prompts(
        self,
        prompts: Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        task: str | None = None,
        name: str = "pool",
        param: str = "prompts",
        options: PoolingInputOptions = DEFAULT_OPTIONS,
        common: Mapping[str, Any] | None = None,
        media: Callable[[int], MediaInputs | None] | None = None,
    ) -> Iterator[PoolingInput]:
        """Yield what is to be run for each prompt, some prompts after others.

        So the first run while the next are tokenized; a bad one raises when its turn comes.
        task: of params that have none; None: the model's own. name: start of the requests' ids.
        param: the caller's name of `prompts`, for errors. common: further fields of each Request.
        media: returns the ready media of a prompt, by its index; None: what their dicts have.
        Raises: RequestError, TooLong, Unsupported.
        """
        plans = self._planner.plans(params, len(prompts), task, options)
        size = PIECE_PROMPTS if media is None else 1
        for start in range(0, len(prompts), size):
            places = range(start, min(start + size, len(prompts)))
            piece, own = prompts[start : places.stop], plans[start : places.stop]
            names = ItemNames(param, len(prompts), places)
            ready = () if media is None else [media(i) for i in places]
            tokens = self._prompts.tokenize(piece, own, options, names, ready)
            yield from _build(tokens, own, name, common, start)

    def process_text_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        params: PoolingParams | None = None,
        *,
        name: str = "pool",
        param: str = "prompts",
        options: PoolingInputOptions = DEFAULT_OPTIONS,
        common: Mapping[str, Any] | None = None,
    ) -> list[PoolingInput]:
        """As iter_prompts, for two texts a prompt, which a model classifies together."""
        plan = self._planner.plan(params, "classify", options)
        at = ItemNames(param, len(pairs))
        tokens = (
            self._pairs.join(pairs, plan, options, at)
            if self._template is None
            else self._pairs.write(pairs, self._template, plan, options, at)
        )
        return _build(tokens, [plan] * len(tokens), name, common)

    @property
    def score_kind(self) -> ScoreKind:
        """How this model scores pairs. Raises RequestError if it cannot."""
        section = self.section
        if self._generates:
            raise RequestError(
                "this model generates text: for scores start it with --runner pooling --convert "
                "classify (a reranker), or --runner pooling --convert embed",
                param="model",
            )
        if section.tasks[0] == "embed":
            return "bi_encoder"
        if section.tasks[0] == "token_embed":
            return "late_interaction"
        if section.tasks[0] == "classify" and section.size == 1:
            return "cross_encoder"
        raise RequestError(
            f"Scoring API is only enabled for num_labels == 1. This model has {section.size} "
            f"labels and the task {section.tasks[0]}: use that",
            param="model",
        )

    def process_pairs(
        self,
        queries: object,
        documents: object,
        params: PoolingParams | None = None,
        *,
        name: str = "score",
        names: tuple[str, str] = ("data_1", "data_2"),
        options: PoolingInputOptions = DEFAULT_OPTIONS,
        common: Mapping[str, Any] | None = None,
    ) -> ScoreInputs:
        """Return what is to be run for the scores of one query with N documents, or of N pairs.

        queries, documents: a text, a dict with `content` (parts of text), or a list of those.
        names: the caller's names of the two, for errors. Raises RequestError, TooLong, Unsupported.
        """
        kind = self.score_kind
        marked = options.marked or MarkedTexts()
        sides = read_texts(queries, names[0], marked), read_texts(documents, names[1], marked)
        if marked.has_media:
            options = self._with_media(sides, marked, options)
            sides = (
                [marked.protect(one) for one in sides[0]],
                [marked.protect(one) for one in sides[1]],
            )
        pairs = pair_indices(len(sides[0]), len(sides[1]))
        check_side_limits(options, self.max_model_len)
        template = self._template
        if options.chat_template is not None:
            template = given_template(options.chat_template, self._prompts.require_tokenizer())
        reads_template = kind == "cross_encoder" and template is not None
        if options.chat_template is not None and not reads_template:
            raise RequestError(
                f"chat_template: scores of this model ({kind}) have none", param="chat_template"
            )
        if options.instruction is not None and not (
            reads_template and template is not None and template.takes_instruction
        ):
            message = "instruction: the prompts of this model have none; leave it out"
            raise RequestError(message, param="instruction")
        if kind != "cross_encoder":
            return self._each_side(kind, sides, pairs, params, name, names, options, common)
        plan = self._planner.plan(params, "classify", options)
        # One query after another, so that its prefix is still cached
        first = {text: i for i, text in reversed(list(enumerate(sides[0])))}
        order = sorted(range(len(pairs)), key=lambda i: first[sides[0][pairs[i][0]]])
        texts = [(sides[0][pairs[i][0]], sides[1][pairs[i][1]]) for i in order]
        at = ItemNames(names[1], len(sides[1]), order)
        tokens = (
            self._pairs.join(texts, plan, options, at)
            if template is None
            else self._pairs.write(texts, template, plan, options, at)
        )
        inputs = _build(tokens, [plan] * len(tokens), name, common)
        place = {i: k for k, i in enumerate(order)}
        return ScoreInputs(kind, inputs, [(place[i],) for i in range(len(pairs))], "")

    def _with_media(
        self,
        sides: tuple[list[str], list[str]],
        marked: MarkedTexts,
        options: PoolingInputOptions,
    ) -> PoolingInputOptions:
        """Return the options with the media of the texts, prepared."""
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            if getattr(options, name):
                message = f"{name}: texts are not cut where some have images, video or audio"
                raise RequestError(message, param=name)
        if options.marked is None:
            marked.bind(self.media, objects=True)
            marked.prepare_blocking(itertools.chain(*sides))
        return replace(options, marked=marked)

    def _each_side(
        self,
        kind: ScoreKind,
        sides: tuple[list[str], list[str]],
        pairs: Sequence[tuple[int, int]],
        params: PoolingParams | None,
        name: str,
        names: tuple[str, str],
        options: PoolingInputOptions,
        common: Mapping[str, Any] | None,
    ) -> ScoreInputs:
        """Make each distinct text of a side a prompt of its own."""
        task: PoolingTask = "embed" if kind == "bi_encoder" else "token_embed"
        roles: tuple[Role, Role] = ("query", "document")
        limits = options.max_tokens_per_query, options.max_tokens_per_doc
        inputs: list[PoolingInput] = []
        places: list[dict[str, int]] = []
        for texts, role, most, what in zip(sides, roles, limits, names):
            plan = self._planner.plan(params, task, options, role)
            if most:
                plan = replace(plan, max_tokens=min(most, plan.max_tokens or most))
            first: dict[str, int] = {}
            for i, text in enumerate(texts):
                first.setdefault(text, i)
            at = ItemNames(what, len(texts), list(first.values()))
            plans = [plan] * len(first)
            tokens = self._prompts.tokenize(list(first), plans, options, at)
            places.append({text: len(inputs) + i for i, text in enumerate(first)})
            inputs += _build(tokens, plans, f"{name}.{role}", common)
        found = [(places[0][sides[0][q]], places[1][sides[1][d]]) for q, d in pairs]
        return ScoreInputs(kind, inputs, list(found), self.section.similarity)


def _build(
    tokens: Sequence[TokenizedPrompt],
    plans: Sequence[PoolingPlan],
    name: str,
    common: Mapping[str, Any] | None,
    first: int = 0,
) -> list[PoolingInput]:
    """Make the requests of prompts. first: the number of the first one in its request's id."""
    fields = common or {}
    inputs = []
    for i, (one, plan) in enumerate(zip(tokens, plans), first):
        pooling, normalize = plan.pooling, False
        if one.chunks:
            normalize = pooling.use_activation
            pooling = replace(pooling, use_activation=False)
        if one.unattended:
            pooling = replace(pooling, unattended_tokens=one.unattended)
        placed: dict[str, Any] = {}
        if one.media is not None:
            placed = one.media.request_fields()
        skips = replace(pooling, skip_tokens=one.prefix_tokens) if one.prefix_tokens else pooling
        requests = tuple(
            Request(
                id=f"{name}.{i}.{c}" if one.chunks else f"{name}.{i}",
                prompt=ids,
                stop=_NO_STOP,
                params=_NO_SAMPLING,
                salt=one.salt,
                read_prefix_cache=plan.read_cache,
                pooling=pooling if c else skips,
                token_types=one.types,
                **fields,
                **placed,
            )
            for c, ids in enumerate(one.chunks or (one.ids,))
        )
        count = sum(len(request.prompt) for request in requests) - one.expansion
        inputs.append(PoolingInput(requests, count, normalize, one.kept_rows))
    return inputs
