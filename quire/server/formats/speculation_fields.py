"""Fields of speculative decoding that bodies of all generating routes have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.server.formats.request_body import MAX_STRINGS_PER_LIST
from quire.server.formats.structured_output import StructuredOutputFields


class PredictionPart(BaseModel):
    """A part of a predicted text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """Text that the answer probably repeats, as a file that is to be edited."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["content"]
    content: str | Annotated[list[PredictionPart], Field(max_length=MAX_STRINGS_PER_LIST)]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class SpeculationFields(StructuredOutputFields):
    """Fields that change how fast an answer comes, and never the answer."""

    prediction: Prediction | None = Field(
        None, description="Text that the answer probably repeats: it comes faster where it does."
    )
    speculative: bool | None = Field(None, description="false: no drafts for this request.")

    def speculation_values(self) -> dict[str, Any]:
        """The fields of SamplingParams that were given, by their names there."""
        text = None if self.prediction is None else self.prediction.text
        given = {"prediction": text, "speculative": self.speculative}
        return {name: value for name, value in given.items() if value is not None}
