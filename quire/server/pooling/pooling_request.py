"""Pooling request: the body of any embedding, classification or scoring API, in one form.

The body of each API becomes a `PoolingRequest`, once, so that checks, limits and counts are the
same for all. Lists are those of the body, and they are never modified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.core.pooling_params import PoolingParams
from quire.server.formats.ignored_fields import IgnoredField
from quire.server.generation.generation_request import GenerationRequest
from quire.text.marked_media import MarkedTexts

MAX_INPUTS = 2048
"""Of one body, as at OpenAI."""
MAX_DOCUMENTS = 10_000
"""Of one body that scores."""

TASK_ROUTES = {
    "embed": "/v1/embeddings",
    "classify": "/classify",
    "token_embed": "/pooling (task token_embed)",
    "token_classify": "/pooling (task token_classify)",
}
"""Task -> the route that serves it."""

TruncationSide = Literal["left", "right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Texts, token ids or pairs of texts; each has a result of its own."""

    prompts: Sequence[str | list[int] | tuple[str, str]]
    add_special_tokens: bool = True
    media: MarkedTexts | None = None
    """Of texts with marks."""

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Messages for the chat template; each conversation has a result."""

    request: GenerationRequest
    """Its source has them; nothing else of it is read but what the template gets."""

    def __len__(self) -> int:
        return len(self.request.conversations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Texts that are scored against each other: 1 to 1, 1 to N or N to N."""

    queries: Sequence[str]
    documents: Sequence[str]
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
    media: MarkedTexts | None = None
    """Of texts with marks."""

    def __len__(self) -> int:
        return len(self.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """One body, understood."""

    source: Inputs | Conversations | Pairs
    field_names: Mapping[str, str] = field(default_factory=dict)
    """prompt, query, documents ... -> the API's own names of the fields, for errors."""
    params: PoolingParams = field(default_factory=PoolingParams)
    """Also of truncation; a limit above the model's is lowered if `cuts`."""
    truncation_side: TruncationSide | None = None
    input_type: str | None = None
    """An API's word for the prefix of texts; without effect on a model that has none such."""
    cuts: bool = False
    """Inputs that are too long are cut; otherwise they are refused."""
    refuses_empty: bool = True
    """An empty text is an error."""
    model: str | None = None
    priority: int | None = None
    salt: str | None = None
    request_id: str | None = None
    timing: bool = False
    processor_kwargs: Mapping[str, Any] | None = None
    """`mm_processor_kwargs`."""
    media_io_kwargs: Mapping[str, Any] | None = None
    ignored: Sequence[IgnoredField] = ()
