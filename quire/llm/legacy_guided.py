"""Constraints of offline outputs, from SamplingParams or the arguments of older releases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from quire.core.params import SamplingParams
from quire.core.structured_output_params import (
    GUIDED_FIELDS,
    StructuredOutputsParams,
    parse_guided_fields,
)
from quire.errors import RequestError, Unsupported


class LLMGuidedOptions(TypedDict, total=False):
    """The fields of `guided_options_request` of LLM.generate in older releases."""

    guided_json: str | dict[str, Any]
    guided_regex: str
    guided_choice: list[str]
    guided_grammar: str
    guided_json_object: bool
    structural_tag: str
    guided_decoding_backend: str
    guided_whitespace_pattern: str


@dataclass(slots=True)
class GuidedDecodingRequest:
    """The same as an object."""

    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_json_object: bool | None = None
    structural_tag: str | None = None


GuidedOptions = GuidedDecodingRequest | Mapping[str, Any]


def refuse_guided(options: GuidedOptions | None) -> None:
    """Raise RequestError: a beam search has no constraint."""
    if options is not None:
        message = "guided_options_request: a beam search cannot be constrained; sample instead"
        raise Unsupported(message, param="guided_options_request")


def apply_guided(
    params: Sequence[SamplingParams], options: GuidedOptions | None
) -> list[SamplingParams]:
    """Return the params, each with the options' constraint. Raises RequestError."""
    constraint = None if options is None else _structured_output_params(options)
    if constraint is None:
        return list(params)
    params_list = []
    for one in params:
        if one.structured_outputs is not None:
            message = "give structured_outputs or guided_options_request, not both"
            raise RequestError(message, param="guided_options_request")
        params_list.append(one.clone())
        params_list[-1].structured_outputs = constraint
    return params_list


def _structured_output_params(options: GuidedOptions) -> StructuredOutputsParams | None:
    if isinstance(options, GuidedDecodingRequest):
        options = dataclasses.asdict(options)
    if not isinstance(options, Mapping):
        message = "guided_options_request must be a GuidedDecodingRequest, or a dict of its fields"
        raise RequestError(message, param="guided_options_request")
    for name in options:
        if name not in GUIDED_FIELDS:
            message = (
                f"guided_options_request has no {name!r}; allowed are {', '.join(GUIDED_FIELDS)}"
            )
            raise RequestError(message, param="guided_options_request")
    found = parse_guided_fields(options)
    return None if found is None else found[0]
