"""Bodies of /score and of /rerank: vLLM's, Cohere's, Jina's, Voyage's and TEI's fields in one."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from quire.core.pooling_params import PoolingParams
from quire.errors import RequestError
from quire.server.formats.pooling_fields import ItemDict, PoolingFields, check_count
from quire.server.formats.request_body import Integer, StringList
from quire.server.pooling.pooling_request import MAX_DOCUMENTS, Pairs, PoolingRequest
from quire.text.marked_media import MarkedTexts
from quire.text.score_pairs import read_texts

ScoreItem = str | ItemDict
ScoreItems = Annotated[list[ScoreItem], Field(fail_fast=True)]
ScoreData = ScoreItem | ScoreItems
_QUERY_FIELDS = ("queries", "data_1", "text_1")
_DOCUMENT_FIELDS = ("documents", "items", "data_2", "text_2")


class ScoringFields(PoolingFields):
    """Fields of the prompts of pairs."""

    use_activation: bool | None = None
    activation: bool | None = Field(None, description="Older name of use_activation.")
    max_tokens_per_query: Integer | None = None
    max_tokens_per_doc: Integer | None = None
    instruction: str | None = Field(None, description="What makes a document relevant.")
    chat_template_kwargs: dict[str, Any] | None = None

    def scoring_request(
        self,
        queries: list[str],
        documents: list[str],
        names: tuple[str, str],
        media: MarkedTexts,
        *,
        cuts: bool,
    ) -> PoolingRequest:
        """Translate the body. names: of the fields of queries and documents. media: of both."""
        active = self.activation if self.use_activation is None else self.use_activation
        params = PoolingParams(use_activation=active)
        params.truncate_prompt_tokens = self.truncate_prompt_tokens
        if cuts and params.truncate_prompt_tokens is None:
            params.truncate_prompt_tokens = -1
        params.verify()
        variables = {"instruction": self.instruction, **(self.chat_template_kwargs or {})}
        instruction = variables.pop("instruction")
        if variables or not isinstance(instruction, str | None):
            message = "chat_template_kwargs may hold an instruction (text), and nothing else"
            raise RequestError(message, param="chat_template_kwargs")
        return PoolingRequest(
            source=Pairs(
                queries=queries,
                documents=documents,
                max_tokens_per_query=self.max_tokens_per_query,
                max_tokens_per_doc=self.max_tokens_per_doc,
                instruction=instruction,
                media=media if media.has_media else None,
            ),
            field_names={"query": names[0], "document": names[1], "prompt": names[1]},
            params=params,
            cuts=cuts,
            refuses_empty=False,
            **self.request_fields(),
        )


class ScoreRequest(ScoringFields):
    """Texts to score against each other: 1 to 1, 1 to N or N to N."""

    queries: ScoreData | None = None
    documents: ScoreData | None = None
    items: ScoreData | None = Field(None, description="Another name of documents.")
    data_1: ScoreData | None = Field(None, description="Another name of queries.")
    data_2: ScoreData | None = Field(None, description="Another name of documents.")
    text_1: ScoreData | None = Field(None, description="Older name of queries.")
    text_2: ScoreData | None = Field(None, description="Older name of documents.")

    def pooling_request(self) -> PoolingRequest:
        """Raises RequestError, Unsupported."""
        first = self._only(_QUERY_FIELDS, "queries")
        second = self._only(_DOCUMENT_FIELDS, "documents")
        media = MarkedTexts()
        queries = texts_of(getattr(self, first), first, media)
        documents = texts_of(getattr(self, second), second, media)
        if len(queries) not in (1, len(documents)):
            message = (
                "Input lengths must be either 1:1, 1:N or N:N, got "
                f"{len(queries)} in {first} and {len(documents)} in {second}"
            )
            raise RequestError(message, param=first)
        return self.scoring_request(queries, documents, (first, second), media, cuts=False)

    def _only(self, names: tuple[str, ...], usual: str) -> str:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            problem = f"give one of {', '.join(names)}, got {' and '.join(given) or 'none'}"
            raise RequestError(problem, param=given[1] if given else usual)
        return given[0]


class RerankRequest(ScoringFields):
    """A query, and documents to sort by their relevance to it."""

    query: ScoreItem
    documents: ScoreItems | None = None
    texts: ScoreItems | None = Field(None, description="TEI's name of documents.")
    top_n: Integer | None = Field(None, description="Results in the answer; 0 or None: all.")
    top_k: Integer | None = Field(None, description="Voyage's name of top_n.")
    return_documents: bool | None = Field(None, description="False: only indices and scores.")
    return_text: bool | None = Field(None, description="TEI's name of return_documents.")
    raw_scores: bool | None = Field(None, description="TEI's: scores without activation.")
    rank_fields: StringList | None = Field(None, description="Fields of documents that count.")
    truncate: bool | None = Field(None, description="TEI's: cut what is too long.")
    truncation: bool | None = Field(None, description="False: refuse what is too long.")
    truncation_direction: str | None = Field(None, description="TEI's name of truncation_side.")
    max_chunks_per_doc: Integer | None = Field(None, description="No effect: documents are cut.")

    @property
    def is_tei(self) -> bool:
        """The body is TEI's, and so is the answer."""
        return self.texts is not None

    @property
    def is_voyage(self) -> bool:
        """The body is Voyage's, and so is the answer."""
        return "top_k" in self.model_fields_set

    @property
    def given_documents(self) -> list[ScoreItem]:
        """Raises RequestError."""
        if (self.documents is None) == (self.texts is None):
            raise RequestError("give documents", param="documents")
        return self.documents or self.texts or []

    def count(self) -> int:
        """Number of results. Raises RequestError."""
        top = self.top_k if self.is_voyage else self.top_n
        if top is not None and top < 0:
            name = "top_k" if self.is_voyage else "top_n"
            raise RequestError(f"{name} must be >= 0, got {top}", param=name)
        return min(top or MAX_DOCUMENTS, len(self.given_documents))

    def pooling_request(self) -> PoolingRequest:
        """Raises RequestError, Unsupported."""
        self.count()
        name = "texts" if self.is_tei else "documents"
        media = MarkedTexts()
        documents = texts_of(self.given_documents, name, media, self.rank_fields)
        query = texts_of(self.query, "query", media)
        cuts = self.truncation is not False
        if self.is_tei:
            cuts = bool(self.truncate)
            self.use_activation = not self.raw_scores
        if self.truncation_direction is not None:
            self.truncation_side = side_of(self.truncation_direction)
        return self.scoring_request(query, documents, ("query", name), media, cuts=cuts)


def side_of(direction: str) -> Any:
    """TEI's truncation_direction as a side. Raises RequestError."""
    if direction.lower() not in ("left", "right"):
        message = f"truncation_direction must be 'Left' or 'Right', got {direction!r:.40}"
        raise RequestError(message, param="truncation_direction")
    return direction.lower()


def texts_of(
    given: ScoreData, param: str, media: MarkedTexts, rank_fields: list[str] | None = None
) -> list[str]:
    """The texts of a field. media: gets their media. rank_fields: of objects, those that count.

    Raises: RequestError, Unsupported.
    """
    items = given if isinstance(given, list) else [given]
    check_count(items, param, MAX_DOCUMENTS)
    if rank_fields:
        items = [
            one if isinstance(one, str) else _ranked_text(one, rank_fields, f"{param}[{i}]", param)
            for i, one in enumerate(items)
        ]
    return read_texts(items if isinstance(given, list) else items[0], param, media)


def _ranked_text(item: ItemDict, names: list[str], where: str, param: str) -> str:
    """The named fields of a document; several as lines of `name: value`."""
    for name in names:
        if not isinstance(item.get(name), str | int | float):
            raise RequestError(f"{where} has no text in {name!r:.60} (rank_fields)", param=param)
    if len(names) == 1:
        return str(item[names[0]])
    return "\n".join(f"{name}: {item[name]}" for name in names)
