"""Spreads the arguments of a call of LLM over its prompts: one for all, or one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral

from quire.core.params import RequestOutputKind, SamplingParams
from quire.errors import RequestError
from quire.llm.compat import check_priority

SamplingParamsArg = SamplingParams | Sequence[SamplingParams]


def params_per_prompt(given: SamplingParamsArg, count: int) -> list[SamplingParams]:
    """Return one per prompt, each a copy that returns one final output. Raises RequestError."""
    if isinstance(given, SamplingParams):
        return [_with_final_output(given)] * count
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        raise _wrong_params(given)
    _check_count("sampling_params", len(given), count)
    return [_with_final_output(one) for one in given]


def priority_per_prompt(given: int | Sequence[int] | None, count: int, policy: str) -> list[int]:
    """Return one per prompt. policy: of the scheduler. Raises RequestError."""
    if given is None:
        return [0] * count
    each = [given] * count if isinstance(given, int) else list(given)
    _check_count("priority", len(each), count)
    if wrong := [one for one in each if not isinstance(one, Integral)]:
        raise RequestError(f"priority must be an integer, got {wrong[0]!r:.40}", param="priority")
    return [check_priority(one, policy) for one in each]


def check_tools(given: Sequence[object] | None) -> None:
    """Raise RequestError for what cannot be a list of tools."""
    for i, tool in enumerate(given or ()):
        if not isinstance(tool, Mapping):
            message = f"tools[{i}] must be a dict with type and function, got {tool!r:.40}"
            raise RequestError(message, param="tools")


def lora_per_prompt(lora_request: object, count: int) -> Sequence[object]:
    """Return the LoRARequest of each prompt, which its output shows."""
    return lora_request if isinstance(lora_request, (list, tuple)) else [lora_request] * count


def _check_count(name: str, given: int, count: int) -> None:
    if given != count:
        message = f"give one {name} for all, or one per prompt ({count}); got {given}"
        raise RequestError(message, param=name)


def _wrong_params(given: object) -> RequestError:
    message = f"sampling_params must be SamplingParams, or a list of them, got {given!r:.100}"
    return RequestError(message, param="sampling_params")


def _with_final_output(params: SamplingParams) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise _wrong_params(params)
    copy = params.clone()
    copy.output_kind = RequestOutputKind.FINAL_ONLY
    return copy
