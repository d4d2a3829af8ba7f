"""Bodies of /pooling and /classify."""

from __future__ import annotations

from pydantic import Field

from quire.config.engine_config import PoolingTask
from quire.core.pooling_params import PoolingParams
from quire.errors import RequestError, Unsupported
from quire.server.formats.pooling_fields import EncodingFields, InputFields
from quire.server.formats.request_body import Integer, TokenIdList
from quire.server.pooling.pooling_request import PoolingRequest


class PoolingBody(EncodingFields, InputFields):
    """Texts, token ids or conversations, and what to make of them."""

    task: str | None = Field(None, description="embed, classify, token_embed, token_classify.")
    data: object = Field(None, description="Refused: it is for plug-ins of other servers.")
    dimensions: Integer | None = Field(None, description="Refused: /v1/embeddings has it.")
    normalize: bool | None = Field(None, description="Older name of use_activation.")
    softmax: bool | None = Field(None, description="Older name of use_activation.")
    activation: bool | None = Field(None, description="Older name of use_activation.")
    step_tag_id: Integer | None = None
    returned_token_ids: TokenIdList | None = None
    prompt_name: str | None = None

    def pooling_request(self) -> PoolingRequest:
        """Raises RequestError, Unsupported."""
        if self.data is not None:
            raise Unsupported("data: there are no IO plug-ins here; send input", param="data")
        if self.dimensions is not None:
            message = "dimensions: /pooling returns whole vectors; /v1/embeddings cuts them"
            raise RequestError(message, param="dimensions")
        params = PoolingParams(
            task=self.task,
            use_activation=self.use_activation,
            step_tag_id=self.step_tag_id,
            returned_token_ids=self.returned_token_ids,
            prompt_name=self.prompt_name,
            normalize=self.normalize,
            softmax=self.softmax,
            activation=self.activation,
        )
        return self.to_pooling_request(params)


class ClassifyRequest(InputFields):
    """Texts, token ids or conversations to classify."""

    activation: bool | None = Field(None, description="Older name of use_activation.")
    softmax: bool | None = Field(None, description="Older name of use_activation.")

    def pooling_request(self) -> PoolingRequest:
        """Raises RequestError, Unsupported."""
        task: PoolingTask = "classify"
        params = PoolingParams(
            task=task,
            use_activation=self.use_activation,
            softmax=self.softmax,
            activation=self.activation,
        )
        return self.to_pooling_request(params)
