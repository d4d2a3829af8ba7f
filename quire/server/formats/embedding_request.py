"""Bodies of /v1/embeddings (OpenAI, vLLM, Jina, Voyage) and /v2/embed (Cohere)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.core.pooling_params import PoolingParams
from quire.errors import RequestError, Unsupported
from quire.media.content_parts import is_media_part
from quire.server.formats.pooling_fields import (
    EncodingFields,
    InputFields,
    ItemDict,
    ItemList,
    PoolingFields,
    TextList,
    check_count,
)
from quire.server.formats.request_body import Integer
from quire.server.formats.vector_encoding import VectorEncoding
from quire.server.generation.generation_request import Conversation
from quire.server.pooling.pooling_request import Conversations, Inputs, PoolingRequest
from quire.text.marked_media import MarkedTexts
from quire.text.score_pairs import read_texts

JinaType = Literal["float", "base64", "binary", "ubinary"]
CohereType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class EmbeddingRequest(EncodingFields, InputFields):
    """Texts, token ids or conversations to embed."""

    dimensions: Integer | None = None
    output_dimension: Integer | None = Field(None, description="Voyage's name of dimensions.")
    normalize: bool | None = Field(None, description="Older name of use_activation.")
    normalized: bool | None = Field(None, description="Jina's name of use_activation.")
    prompt_name: str | None = Field(
        None, description="Name of a prefix of texts in the model's files."
    )
    input_type: str | None = Field(None, description="Selects a prefix, if the model has one.")
    task: str | None = Field(None, description="Jina's name of input_type.")
    embedding_type: JinaType | list[JinaType] | None = Field(
        None, description="Jina's name of encoding_format."
    )
    output_dtype: Literal["float", "binary", "ubinary"] | None = Field(
        None, description="Voyage's; binary and ubinary have 8 signs in a number."
    )
    truncate: bool | None = Field(None, description="Jina's: cut inputs that are too long.")
    truncation: bool | None = Field(None, description="Voyage's name of truncate.")
    late_chunking: Literal[False] | None = Field(None, description="Not served.")

    def encoding(self) -> VectorEncoding:
        form = self.encoding_format or self._other_type() or "float"
        return VectorEncoding(form, self.embed_dtype or "float32", self.endianness or "native")

    def _other_type(self) -> Any:
        found = self.embedding_type
        if isinstance(found, list):
            if len(found) != 1:
                message = f"embedding_type must name one type, got {len(found)}"
                raise RequestError(message, param="embedding_type")
            found = found[0]
        return found or self.output_dtype

    def pooling_request(self) -> PoolingRequest:
        """Raises RequestError, Unsupported."""
        params = PoolingParams(
            task="embed",
            dimensions=self.output_dimension if self.dimensions is None else self.dimensions,
            use_activation=_first(self.use_activation, self.normalize, self.normalized),
            prompt_name=self.prompt_name,
        )
        return self.to_pooling_request(
            params,
            input_type=_first(self.input_type, self.task),
            cuts=bool(self.truncate or self.truncation),
            names={
                "dimensions": "output_dimension" if self.dimensions is None else "dimensions",
                "input_type": "task" if self.input_type is None else "input_type",
            },
        )


def _first(*values: Any) -> Any:
    return next((one for one in values if one is not None), None)


def _has_media(given: ItemDict) -> bool:
    content = given.get("content")
    return isinstance(content, list) and any(map(is_media_part, content))


class CohereEmbedRequest(PoolingFields):
    """Texts or images to embed, as Cohere's API takes them."""

    texts: TextList | None = None
    images: TextList | None = Field(None, description="URLs, data: or others.")
    inputs: ItemList | None = None
    input_type: str | None = None
    embedding_types: Annotated[list[CohereType], Field(max_length=8)] | None = None
    output_dimension: Integer | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: Integer | None = None

    def encodings(self) -> list[VectorEncoding]:
        """The forms of vectors in the answer. Raises Unsupported."""
        found = []
        for one in dict.fromkeys(self.embedding_types or ("float",)):
            if one == "int8" or one == "uint8":
                message = f"embedding_types {one}: there are no ranges to scale whole numbers by; "
                message += "float, base64, binary and ubinary are served"
                raise Unsupported(message, param="embedding_types")
            found.append(VectorEncoding(one, endianness="little" if one == "base64" else "native"))
        return found

    def given_texts(self) -> list[str]:
        """Return the texts; [] where there are images. Raises RequestError, Unsupported."""
        name = self._given_field()
        check_count(getattr(self, name), name)
        if self.texts:
            return self.texts
        if self.inputs is None or any(map(_has_media, self.inputs)):
            return []
        return read_texts(self.inputs, "inputs", MarkedTexts())

    def _given_field(self) -> str:
        given = [name for name in ("texts", "images", "inputs") if getattr(self, name)]
        if len(given) != 1:
            message = "give one of texts, images and inputs, and not empty"
            raise RequestError(message, param=given[0] if given else "texts")
        return given[0]

    def _source(self) -> Inputs | Conversations:
        """Return texts as they are; images, and texts with images, for the chat template."""
        texts = self.given_texts()
        if texts:
            return Inputs(prompts=texts)
        contents: list[Any] = [one.get("content") for one in self.inputs or ()]
        for url in self.images or ():
            contents.append([{"type": "image_url", "image_url": {"url": url}}])
        return self.conversations_source(
            [
                Conversation(
                    messages=[{"role": "user", "content": one}], add_generation_prompt=False
                )
                for one in contents
            ]
        )

    def pooling_request(self) -> PoolingRequest:
        """Raises RequestError, Unsupported."""
        source, name = self._source(), self._given_field()
        params = PoolingParams(task="embed", dimensions=self.output_dimension)
        if self.max_tokens is not None:
            params.truncate_prompt_tokens = self.max_tokens
        elif self.truncate != "NONE":
            params.truncate_prompt_tokens = -1
        if self.truncate_prompt_tokens is not None:
            params.truncate_prompt_tokens = self.truncate_prompt_tokens
        params.verify()
        fields = self.request_fields()
        fields["truncation_side"] = self.truncation_side or (
            "left" if self.truncate == "START" else "right"
        )
        return PoolingRequest(
            source=source,
            field_names={
                "prompt": name,
                "messages": name,
                "dimensions": "output_dimension",
                "truncate_prompt_tokens": "max_tokens",
            },
            params=params,
            input_type=self.input_type,
            cuts=True,
            **fields,
        )
