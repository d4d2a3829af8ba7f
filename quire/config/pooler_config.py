"""Pooler config: how a user wants hidden states to become vectors or scores, as in vLLM.

It is given as JSON, as a dict or as an object; fields that are None are as the model's files state.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from quire.errors import ConfigError

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""Result of a pooling request: a vector, a distribution, or one of either for each token."""

PoolingMethod = Literal["cls", "last", "mean", "max", "mean_sqrt_len", "weighted_mean", "splade"]

SEQUENCE_TYPES: dict[str, PoolingMethod] = {
    "CLS": "cls",
    "LAST": "last",
    "MEAN": "mean",
    "MAX": "max",
    "MEAN_SQRT_LEN": "mean_sqrt_len",
    "WEIGHTED_MEAN": "weighted_mean",
}
TOKEN_TYPES = ("ALL", "STEP")
OLD_NAMES = {
    "normalize": "use_activation",
    "softmax": "use_activation",
    "activation": "use_activation",
    "logit_bias": "logit_mean",
}
"""Name of an earlier release -> the present name."""
OLD_TASKS = {"score": "classify", "encode": None, "reward": None}
"""Task of an earlier release -> the present one; None: the model's own."""


@dataclass(frozen=True, init=False)
class PoolerConfig:
    """Settings of pooling. Names of earlier releases are accepted too.

    Raises ConfigError for a name that is not known, and for a value that is not allowed.
    """

    task: str | None = None  # the task of requests that name none
    pooling_type: str | None = None  # fills one of the next two
    seq_pooling_type: str | None = None  # how the tokens of a prompt become one vector
    tok_pooling_type: str | None = None  # which tokens a token task returns
    use_activation: bool | None = None  # normalize vectors; probabilities instead of logits
    enable_flash_late_interaction: bool = True  # no effect
    dimensions: int | None = None  # of embeddings, for requests that name none
    enable_chunked_processing: bool = False  # divide inputs longer than max_model_len
    max_embed_len: int | None = None  # of such inputs
    logit_mean: float | None = None  # the activation gets (logit - mean) / sigma
    logit_sigma: float | None = None
    step_tag_id: int | None = None  # token whose rows STEP returns
    returned_token_ids: tuple[int, ...] | None = None  # labels that token_classify returns

    def __init__(self, **given: object) -> None:
        values: dict[str, Any] = {one.name: one.default for one in fields(self)}
        values.update({name: v for name, v in _current_names(given).items() if v is not None})
        values = _check_fields(values)
        kind = values["pooling_type"]
        if kind is not None:
            other = "tok_pooling_type" if kind in TOKEN_TYPES else "seq_pooling_type"
            if values[other] not in (None, kind):
                raise ConfigError(
                    f"pooler_config: pooling_type {kind} and {other} {values[other]} differ: "
                    "give one of them"
                )
            values[other] = kind
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, given: object) -> PoolerConfig:
        """Make one from JSON, a dict, or an object with these fields. Raises ConfigError."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ConfigError(
                    f"pooler_config must be a JSON object, got {given!r:.200}: {error}"
                ) from None
        elif dataclasses.is_dataclass(given) and not isinstance(given, type):
            given = dataclasses.asdict(given)
        if not isinstance(given, Mapping):
            raise ConfigError(f"pooler_config must be a JSON object, got {given!r:.200}")
        return cls(**given)

    def non_default(self) -> dict[str, Any]:
        """Return the fields that are set, for another process."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            one.name: values[one.name] for one in fields(self) if values[one.name] != one.default
        }


def _current_names(given: Mapping[str, object]) -> dict[str, object]:
    """Translate names of earlier releases. Raises ConfigError for a name that is not known."""
    known = [one.name for one in fields(PoolerConfig)]
    named: dict[str, object] = {}
    for name, value in given.items():
        new = OLD_NAMES.get(name, name)
        if new not in known:
            near = difflib.get_close_matches(str(name), [*known, *OLD_NAMES], n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}"
            raise ConfigError(f"pooler_config has no field {name!r:.80}; {hint}")
        if value is not None and named.get(new) not in (None, value):
            raise ConfigError(f"pooler_config: {name} is another name of {new}; they differ")
        if value is not None or new not in named:
            named[new] = value
    return named


def _check_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields in their final form."""
    out = dict(given)
    task = given["task"]
    out["task"] = OLD_TASKS.get(task, task) if isinstance(task, str) else task
    _require(out["task"] in (None, *get_args(PoolingTask)), "task", task, get_args(PoolingTask))
    for name, allowed in (
        ("pooling_type", (*SEQUENCE_TYPES, *TOKEN_TYPES)),
        ("seq_pooling_type", tuple(SEQUENCE_TYPES)),
        ("tok_pooling_type", TOKEN_TYPES),
    ):
        value = given[name]
        out[name] = value.upper() if isinstance(value, str) else value
        _require(out[name] in (None, *allowed), name, value, allowed)
    for name in ("use_activation", "enable_flash_late_interaction", "enable_chunked_processing"):
        good = isinstance(given[name], bool) or (name == "use_activation" and given[name] is None)
        _require(good, name, given[name], ("true", "false"))
    for name, least in (("dimensions", 1), ("max_embed_len", 1), ("step_tag_id", 0)):
        _require(_is_count(given[name], least), name, given[name], (f"an integer >= {least}",))
    for name in ("logit_mean", "logit_sigma"):
        value = given[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        good = value is None or (number and abs(value) <= sys.float_info.max)
        good = good and not (name == "logit_sigma" and value == 0)
        allowed_number = "a finite number" + (", not 0" if name == "logit_sigma" else "")
        _require(good, name, value, (allowed_number,))
        out[name] = None if value is None else float(value)
    ids = given["returned_token_ids"]
    good = ids is None or (
        isinstance(ids, (list, tuple))
        and bool(ids)
        and all(_is_count(one, 0, False) for one in ids)
    )
    _require(good, "returned_token_ids", ids, ("a list of integers >= 0",))
    out["returned_token_ids"] = None if ids is None else tuple(ids)
    return out


def _is_count(value: object, least: int, optional: bool = True) -> bool:
    if value is None:
        return optional
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(good: bool, name: str, given: object, allowed: tuple[str, ...]) -> None:
    if not good:
        raise ConfigError(
            f"pooler_config: {name} must be {' or '.join(allowed)}, got {given!r:.80}"
        )
