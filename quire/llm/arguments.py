"""Spreads the arguments of a call of LLM over its prompts: one for all, or one each."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.params import RequestOutputKind, SamplingParams
from quire.errors import RequestError
from quire.llm.compat import check_priority

SamplingParamsArg = SamplingParams | Sequence[SamplingParams]


def params_per_prompt(given: SamplingParamsArg, count: int) -> list[SamplingParams]:
    """Return one per prompt, each a copy that returns one final output. Raises RequestError."""
    if isinstance(given, SamplingParams):
        return [_with_final_output(given)] * count
    _check_count("sampling_params", len(given), count)
    return [_with_final_output(one) for one in given]


def priority_per_prompt(given: int | Sequence[int] | None, count: int, policy: str) -> list[int]:
    """Return one per prompt. policy: of the scheduler. Raises RequestError."""
    if given is None:
        return [0] * count
    each = [given] * count if isinstance(given, int) else list(given)
    _check_count("priority", len(each), count)
    return [check_priority(one, policy) for one in each]


def lora_per_prompt(lora_request: object, count: int) -> Sequence[object]:
    """Return the LoRARequest of each prompt, which its output shows."""
    return lora_request if isinstance(lora_request, (list, tuple)) else [lora_request] * count


def _check_count(name: str, given: int, count: int) -> None:
    if given != count:
        message = f"give one {name} for all, or one per prompt ({count}); got {given}"
        raise RequestError(message, param=name)


def _with_final_output(params: SamplingParams) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        message = f"sampling_params must be SamplingParams, got a {type(params).__name__}"
        raise RequestError(message, param="sampling_params")
    copy = params.clone()
    copy.output_kind = RequestOutputKind.FINAL_ONLY
    return copy
