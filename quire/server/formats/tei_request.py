"""Bodies of the routes of text-embeddings-inference (TEI), except /rerank."""

from __future__ import annotations

from typing import Any

from quire.core.pooling_params import PoolingParams
from quire.errors import RequestError
from quire.server.formats.pooling_fields import (
    PoolingFields,
    TextList,
    TokenIdLists,
    check_count,
    prompts_of,
)
from quire.server.formats.request_body import Integer, RequestBody, TokenIdList
from quire.server.formats.scoring_request import side_of
from quire.server.pooling.pooling_request import Inputs, Pairs, PoolingRequest

_NAMES = {"prompt": "inputs", "query": "inputs.source_sentence", "document": "inputs.sentences"}


class TEIFields(PoolingFields):
    """Fields of all these routes."""

    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None

    def build(self, source: Inputs | Pairs, params: PoolingParams) -> PoolingRequest:
        """Translate the body. params: those of the route."""
        fields = self.request_fields()
        if self.truncation_direction is not None:
            fields["truncation_side"] = side_of(self.truncation_direction)
        params.prompt_name = self.prompt_name
        params.truncate_prompt_tokens = -1 if self.truncate else None
        return PoolingRequest(
            source=source, field_names=_NAMES, params=params, cuts=bool(self.truncate), **fields
        )


class TEIEmbedRequest(TEIFields):
    """Texts or token ids to embed; TEI normalizes unless the request says otherwise."""

    inputs: str | TextList | TokenIdList | TokenIdLists
    normalize: bool | None = None
    dimensions: Integer | None = None

    def pooling_request(self) -> PoolingRequest:
        params = PoolingParams(
            task="embed", dimensions=self.dimensions, use_activation=self.normalize is not False
        )
        return self.build(Inputs(prompts=prompts_of(self.inputs, "inputs")), params)


class TEIEmbedAllRequest(TEIFields):
    """Texts or token ids, of which every token has a vector."""

    inputs: str | TextList | TokenIdList | TokenIdLists

    def pooling_request(self) -> PoolingRequest:
        params = PoolingParams(task="token_embed")
        return self.build(Inputs(prompts=prompts_of(self.inputs, "inputs")), params)


class TEIEmbedSparseRequest(TEIEmbedAllRequest):
    """Texts or token ids, each with a weight per token of the vocabulary."""

    def pooling_request(self) -> PoolingRequest:
        params = PoolingParams(task="embed")
        return self.build(Inputs(prompts=prompts_of(self.inputs, "inputs")), params)


class TEIPredictRequest(TEIFields):
    """A text, a pair of texts [a, b], or several of either: [[a], [a, b]]."""

    inputs: str | TextList | list[TextList]
    raw_scores: bool | None = None

    @property
    def is_batch(self) -> bool:
        """The answer has a list for each input."""
        return isinstance(self.inputs, list) and any(isinstance(one, list) for one in self.inputs)

    def pooling_request(self) -> PoolingRequest:
        """Raises RequestError."""
        given: Any = self.inputs if self.is_batch else [self.inputs]
        check_count(given, "inputs")
        params = PoolingParams(task="classify", use_activation=not self.raw_scores)
        prompts = [_text_or_pair(one, place) for place, one in enumerate(given)]
        return self.build(Inputs(prompts=prompts), params)


def _text_or_pair(given: str | list[str], place: int) -> str | tuple[str, str]:
    if isinstance(given, str):
        return given
    if len(given) not in (1, 2):
        message = f"inputs[{place}] must be a text or a pair of texts, got {len(given)}"
        raise RequestError(f"{message}: send several as [[text], [text, text]]", param="inputs")
    return given[0] if len(given) == 1 else (given[0], given[1])


class TEISimilarityInputs(RequestBody):
    """A sentence, and those to compare it with."""

    source_sentence: str
    sentences: TextList


class TEISimilarityParameters(RequestBody):
    """Options of the embeddings."""

    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None


class TEISimilarityRequest(TEIFields):
    """A sentence, and those to compare it with by the cosine of their embeddings."""

    inputs: TEISimilarityInputs
    parameters: TEISimilarityParameters | None = None

    def pooling_request(self) -> PoolingRequest:
        """Raises RequestError."""
        check_count(self.inputs.sentences, "inputs")
        for name, value in self.parameters or ():
            if value is not None:
                setattr(self, name, value)
        pairs = Pairs(queries=[self.inputs.source_sentence], documents=self.inputs.sentences)
        return self.build(pairs, PoolingParams())
