"""Checks single request values. Each function raises RequestError that names the caller's field."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence

from quire.errors import RequestError

MAX_INT64 = 2**63 - 1
"""Bound of every integer: values are sent between processes and stored in int64 tensors."""

MAX_SHOWN = 60
"""Characters of a value in a message."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120


def invalid_param(param: str, given: object, allowed: str) -> RequestError:
    """Return the error. given: shortened in the message."""
    return RequestError(f"{param} must be {allowed}, got {_SHORT.repr(given)}", param=param)


def shown_json(value: object) -> str:
    """Return a value of a request for a message: as JSON, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = _SHORT.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def check_int(param: str, given: object, low: int, high: int | None, allowed: str) -> None:
    """Check the type and the range. high: None is MAX_INT64."""
    if isinstance(given, bool) or not isinstance(given, int) or given < low:
        raise invalid_param(param, given, allowed)
    if given > (MAX_INT64 if high is None else high):
        raise invalid_param(
            param, given, allowed if high is not None else f"{allowed}, and below 2**63"
        )


def check_float(param: str, given: object, low: float, high: float, allowed: str) -> None:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise invalid_param(param, given, allowed)
    if not (math.isfinite(given) and low <= given <= high):
        raise invalid_param(param, given, allowed)


def check_token_ids(param: str, given: object, *, empty: bool = True) -> None:
    allowed = f"a {'' if empty else 'non-empty '}list of token ids (integers >= 0)"
    if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, set, frozenset)):
        raise invalid_param(param, given, allowed)
    if not empty and not given:
        raise invalid_param(param, given, allowed)
    for one in given:
        if isinstance(one, bool) or not isinstance(one, int) or one < 0:
            raise RequestError(
                f"{param} must be {allowed}, got {_SHORT.repr(one)} in it", param=param
            )


def check_strings(param: str, given: object) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise invalid_param(param, given, "a list of non-empty strings")
    for one in given:
        if not isinstance(one, str) or not one:
            raise RequestError(
                f"{param} must hold non-empty strings, got {_SHORT.repr(one)} in it", param=param
            )
