"""POST /generative_scoring: the probability of a label as the next token of query and item."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from quire.outputs import Logprob
from quire.server.app_state import AppState, get_app_state
from quire.server.formats.body_reader import read_body
from quire.server.formats.pooling_fields import TextList, TokenIdLists, check_count
from quire.server.formats.request_body import RequestBody, StopTokenIds, TokenIdList
from quire.server.formats.sse import build_full_response
from quire.server.generation.events import FullResponse
from quire.server.generation.generation_request import (
    MAX_PROMPTS,
    GenerationRequest,
    RawPrompts,
)
from quire.server.generation.generation_stream import GenerationStream, start_generation
from quire.server.generation.off_loop import LONG_CHARS, run_off_loop
from quire.server.generation.validate import check_chars, check_generates

router = APIRouter()


class GenerativeScoringRequest(RequestBody):
    """A query, items, and the tokens of labels."""

    model: str | None = None
    query: str | TokenIdList
    items: TextList | TokenIdLists
    label_token_ids: Annotated[StopTokenIds, Field(min_length=1)]
    apply_softmax: bool = Field(True, description="Of the labels alone, not the vocabulary.")
    item_first: bool = False
    add_special_tokens: bool = Field(True, description="To the query.")
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    def to_generation_request(self, state: AppState) -> GenerationRequest:
        """Raises RequestError."""
        self.refuse_unsupported_features()
        check_count(self.items, "items", MAX_PROMPTS)
        query = _encode(state, self.query, special=self.add_special_tokens)
        prompts = []
        for one in self.items:
            item = _encode(state, one, special=False)
            prompts.append([*item, *query] if self.item_first else [*query, *item])
        return GenerationRequest(
            source=RawPrompts(prompts=prompts),
            model=self.model,
            sampling={"max_tokens": 1, "logprob_token_ids": self.label_token_ids},
            field_names={"logprob_token_ids": "label_token_ids", "prompt": "items"},
            priority=self.priority,
            salt=self.cache_salt,
            request_id=self.request_id,
            ignored=self.ignored_fields(),
        )


BODIES = {"/generative_scoring": (GenerativeScoringRequest,)}


@router.post("/generative_scoring", tags=["scores"])
async def create_generative_score(http: Request) -> Response:
    """Score items by the probability of the first label behind query and item."""
    state = get_app_state(http)
    body = await read_body(http, GenerativeScoringRequest, state.options.max_body_bytes)
    check_generates(state)
    size = sum(map(len, body.items)) + len(body.query)
    request = await run_off_loop(lambda: body.to_generation_request(state), size, LONG_CHARS)
    events = await start_generation(state, request, http, "generative-scoring-")
    return await build_full_response(events, GenerativeScoreFormatter(state, body, events))


class GenerativeScoreFormatter:
    """Logprobs of labels -> scores."""

    def __init__(
        self, state: AppState, body: GenerativeScoringRequest, events: GenerationStream
    ) -> None:
        self._body = body
        self._app_state = state
        self._id, self._model_name = events.id, events.model_name

    def format_full(self, whole: FullResponse) -> dict[str, object]:
        """The answer."""
        state = self._app_state
        items = []
        for one in whole.choices:
            found = None if one.logprobs is None else one.logprobs[0]
            assert found is not None, one
            items.append({"index": one.index, "object": "score", "score": self._score(found)})
        return {
            "id": self._id,
            "object": "list",
            "created": int(time.time()),
            "model": self._model_name,
            "data": items,
            "usage": whole.final.usage.as_dict(details=state.options.enable_prompt_tokens_details),
        }

    def _score(self, found: Mapping[int, Logprob]) -> float:
        """The probability of the first label: of the vocabulary, or of the labels."""
        first, *_ = values = [found[one].logprob for one in self._body.label_token_ids]
        if not self._body.apply_softmax:
            return math.exp(first)
        highest = max(values)
        return math.exp(first - highest) / sum(math.exp(one - highest) for one in values)


def _encode(state: AppState, given: str | list[int], *, special: bool) -> list[int]:
    if not isinstance(given, str):
        return given
    check_chars(state, len(given), "query" if special else "items")
    return state.require_tokenizer().encode(given, add_special_tokens=special)
