"""Methods of LLM for models that pool: embed, encode, classify, score, reward."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.core.pooling_params import PoolingParams
from quire.core.types import AdapterRef, Pooled, Request, Update
from quire.errors import RequestError, Unsupported
from quire.llm.engine import LLMEngine
from quire.llm.media import MediaFeed
from quire.llm.progress import ProcessedBar, UseTqdm
from quire.llm.prompts import normalize_prompts
from quire.llm.serialize import one_at_a_time
from quire.outputs import (
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.text import pooling_output
from quire.text.input_processor import TOKENIZATION_KEYS
from quire.text.pooling_input import PoolingInput, PoolingInputProcessor
from quire.text.pooling_output import Array
from quire.text.pooling_plan import PoolingInputOptions
from quire.text.prompts import Prompt
from quire.text.templates.chat_template import load_chat_template

PoolingParamsArg = PoolingParams | Sequence[PoolingParams] | None
TokenizationKwargs = Mapping[str, Any] | None

MAX_UNCHECKED_PROMPTS = 16384
"""Prompts of a call that runs its first ones before its last ones are checked. A larger call is
checked whole first: a bad prompt at its end must not cost the hours before it."""


class PoolingMethods:
    """The methods, over the engine of an LLM."""

    llm_engine: LLMEngine
    _ids: itertools.count[int]
    call_lock: threading.RLock

    def _check_awake(self) -> None:
        raise NotImplementedError

    @one_at_a_time
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParamsArg = None,
        lora_request: object | None = None,
        tokenization_kwargs: TokenizationKwargs = None,
    ) -> list[EmbeddingRequestOutput] | list[PoolingRequestOutput[PoolingOutput]]:
        """Return a vector for each prompt, in order; of a ColBERT model, what encode() returns.

        pooling_params: one for all, or one each. Raises RequestError, which names the prompt.
        """
        processor = self._pooling_processor("embed")
        late = processor.section.tasks[0] == "token_embed"
        outputs = self._encode(
            processor, prompts, pooling_params, "token_embed" if late else "embed",
            truncate_prompt_tokens, tokenization_kwargs, lora_request, use_tqdm,
        )  # fmt: skip
        if late:
            return outputs
        return [
            EmbeddingRequestOutput(
                one.request_id,
                EmbeddingOutput(one.outputs),
                one.prompt_token_ids,
                one.num_cached_tokens,
            )
            for one in outputs
        ]

    @one_at_a_time
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParamsArg = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: object | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: TokenizationKwargs = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return a tensor for each prompt, of any task. pooling_task: None is the model's own."""
        if pooling_task is not None:
            pooling_task = PoolingParams(task=pooling_task).task
        return self._encode(
            self._pooling_processor("encode"), prompts, pooling_params, pooling_task,
            truncate_prompt_tokens, tokenization_kwargs, lora_request, use_tqdm,
        )  # fmt: skip

    @one_at_a_time
    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParamsArg = None,
        lora_request: object | None = None,
        tokenization_kwargs: TokenizationKwargs = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the rewards of each prompt: one, or one for each step, as the model has them."""
        return self._encode(
            self._pooling_processor("reward"), prompts, pooling_params, "reward",
            truncate_prompt_tokens, tokenization_kwargs, lora_request, use_tqdm,
        )  # fmt: skip

    @one_at_a_time
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParamsArg = None,
        lora_request: object | None = None,
        tokenization_kwargs: TokenizationKwargs = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probability of each label, for each prompt."""
        outputs = self._encode(
            self._pooling_processor("classify"), prompts, pooling_params, "classify",
            truncate_prompt_tokens, tokenization_kwargs, lora_request, use_tqdm,
        )  # fmt: skip
        return [ClassificationRequestOutput.from_base(one) for one in outputs]

    @one_at_a_time
    def score(
        self,
        data_1: object,
        data_2: object,
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: object | None = None,
        tokenization_kwargs: TokenizationKwargs = None,
        chat_template: str | Path | None = None,
        instruction: str | None = None,
        max_tokens_per_query: int = 0,
        max_tokens_per_doc: int = 0,
    ) -> list[ScoringRequestOutput]:
        """Score one query with each of N documents, or N queries with N documents.

        data_1, data_2: a text, {"content": [parts]} of text and media, or a list of those.
        chat_template: writes messages of the roles query and document, for rerankers that are
        decoders; instruction: for their templates. max_tokens_per_query, max_tokens_per_doc: cut
        texts; 0: no limit.
        """
        processor = self._pooling_processor("score")
        (adapter,) = self.llm_engine.adapters.resolve(lora_request, 1)
        params, options = read_settings(
            pooling_params,
            truncate_prompt_tokens,
            tokenization_kwargs,
            chat_template=load_chat_template(chat_template),
            instruction=instruction,
            max_tokens_per_query=max_tokens_per_query,
            max_tokens_per_doc=max_tokens_per_doc,
        )
        assert params is None or isinstance(params, PoolingParams)
        number = next(self._ids)
        scores = processor.process_pairs(
            data_1, data_2, params, name=f"score-{number}", options=options,
            common={"arrived_at": time.monotonic(), "adapter": adapter},
        )  # fmt: skip
        inputs, arrays, cached = self._run(scores.inputs, len(scores.inputs), use_tqdm)
        self._ids = itertools.count(number + len(scores.places))
        return [
            ScoringRequestOutput(
                str(number + i),
                ScoringOutput(score),
                [token for place in places for token in inputs[place].token_ids],
                sum(cached[place] for place in places),
            )
            for i, (score, places) in enumerate(
                zip(pooling_output.compute_scores(scores, arrays), scores.places)
            )
        ]

    def _encode(
        self,
        processor: PoolingInputProcessor,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParamsArg,
        task: str | None,
        truncate_prompt_tokens: int | None,
        tokenization_kwargs: TokenizationKwargs,
        lora_request: object | None,
        use_tqdm: UseTqdm,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        given = normalize_prompts(prompts)
        adapters = self.llm_engine.adapters.resolve(lora_request, len(given))
        params, options = read_settings(pooling_params, truncate_prompt_tokens, tokenization_kwargs)
        feed = MediaFeed(processor.media, given, None, None, self.llm_engine.step_keeping_outputs)
        number = next(self._ids)
        lazily = processor.iter_prompts(
            given, params, task=task, name=f"pool-{number}", options=options,
            common={"arrived_at": time.monotonic()},
            media=feed.inputs if feed.has_media else None,
        )  # fmt: skip
        if any(adapters):
            lazily = (_adapted(one, adapter) for one, adapter in zip(lazily, adapters))
        is_lazy = feed.has_media or len(given) <= MAX_UNCHECKED_PROMPTS
        checked = lazily if is_lazy else list(lazily)
        inputs, arrays, cached = self._run(checked, len(given), use_tqdm)
        self._ids = itertools.count(number + len(inputs))
        return [
            PoolingRequestOutput(str(number + i), PoolingOutput(array), one.token_ids, hit)
            for i, (one, array, hit) in enumerate(zip(inputs, arrays, cached))
        ]

    def _run(
        self, inputs: Iterable[PoolingInput], count: int, use_tqdm: UseTqdm
    ) -> tuple[list[PoolingInput], list[Array], list[int]]:
        """Return the inputs, the result of each, and how many of its tokens were cached."""
        bar = ProcessedBar(count, use_tqdm)
        taken: list[PoolingInput] = []
        tokens: dict[str, int] = {}  # of prompts whose last request has no result yet, by its id

        def requests() -> Iterator[Request]:
            for one in inputs:
                taken.append(one)
                tokens[one.requests[-1].id] = one.num_tokens
                yield from one.requests

        def count_result(update: Update) -> None:
            if (read := tokens.pop(update.request_id, None)) is not None:
                bar.count_read(read)

        try:
            updates = self.llm_engine.pool(requests(), count_result)
        finally:
            bar.close()
        return taken, *make_outputs(taken, updates)

    def _pooling_processor(self, method: str) -> PoolingInputProcessor:
        self._check_awake()
        return require_processor(self.llm_engine.pooling_inputs, method)


def _adapted(one: PoolingInput, adapter: AdapterRef | None) -> PoolingInput:
    requests = tuple(replace(request, adapter=adapter) for request in one.requests)
    return replace(one, requests=requests)


def require_processor(
    processor: PoolingInputProcessor | None, method: str
) -> PoolingInputProcessor:
    """Raise Unsupported if the model takes no pooling requests."""
    if processor is None:
        convert = "embed" if method in ("embed", "encode") else "classify"
        raise Unsupported(
            f"{method}() needs a pooling model, and this one generates only; another is started "
            f"with --runner pooling --convert {convert} (runner='pooling', convert='{convert}')"
        )
    return processor


def make_outputs(
    inputs: Sequence[PoolingInput], updates: Sequence[Update]
) -> tuple[list[Array], list[int]]:
    """Return the result of each prompt, and how many of its tokens were cached.

    updates: the last one of each request of the inputs, in order.
    """
    left = iter(updates)
    arrays, cached = [], []
    for one in inputs:
        own = list(itertools.islice(left, len(one.requests)))
        arrays.append(pooling_output.combine(one, [_pooled(update) for update in own]))
        cached.append(sum(update.cached_tokens for update in own))
    return arrays, cached


def _pooled(update: Update) -> Pooled:
    assert update.pooled is not None, update
    return update.pooled


def read_settings(
    params: PoolingParamsArg,
    truncate_prompt_tokens: int | None,
    tokenization: TokenizationKwargs,
    **options: Any,
) -> tuple[PoolingParamsArg, PoolingInputOptions]:
    """Return params and options with what `tokenization_kwargs` of the callers' API means."""
    given = dict(tokenization or {})
    for key in given:
        if key not in TOKENIZATION_KEYS:
            known = ", ".join(TOKENIZATION_KEYS)
            message = f"tokenization_kwargs must not hold {key!r}; known are {known}"
            raise RequestError(message, param="tokenization_kwargs")
    most = given.get("truncate_prompt_tokens", truncate_prompt_tokens)
    if given.get("truncation"):
        most = given.get("max_length", -1)
    if most is not None:
        each = [params or PoolingParams()] if not isinstance(params, Sequence) else list(params)
        each = [one.clone() for one in each]
        for one in each:
            one.truncate_prompt_tokens = most
        params = each if isinstance(params, Sequence) else each[0]
    side = given.get("truncation_side")
    if side not in (None, "left", "right"):
        message = f"truncation_side must be 'left' or 'right', got {side!r}"
        raise RequestError(message, param="truncation_side")
    return params, PoolingInputOptions(
        add_special_tokens=bool(given.get("add_special_tokens", True)),
        truncation_side=side,
        **options,
    )
