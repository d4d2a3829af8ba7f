"""Options of speculative decoding, and the keys of `speculative_config`, also of older releases."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from quire.config.option_field import option
from quire.config.values import coerce
from quire.errors import ConfigError

OPTION_NAME = "speculative_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Speculative decoding: a step verifies several drafted tokens of a sequence."""

    speculative_config: dict[str, Any] | None = field(default=None, metadata={"short": "-sc"})
    """JSON: method (ngram, suffix, draft_model, eagle, eagle3, mtp, medusa), model (folder or name
    of the drafter), num_speculative_tokens (most drafts of a step; the number is chosen by
    measurement), prompt_lookup_min and prompt_lookup_max (tokens of a match of ngram, 5),
    suffix_decoding_max_tree_depth, suffix_decoding_max_cached_requests,
    suffix_decoding_max_spec_factor, suffix_decoding_min_token_prob, max_model_len, revision,
    adaptive (false: always the most drafts). Texts are the same as without. None: drafts are made
    of the predictions that requests bring."""
    spec_method: str | None = None
    """Method of speculative_config."""
    spec_model: str | None = None
    """Model of speculative_config."""
    spec_tokens: int | None = option(None, low=1)
    """num_speculative_tokens of speculative_config."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The keys of the object that have an effect."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    max_model_len: int | None = None
    revision: str | None = None
    draft_tensor_parallel_size: int | None = None
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    num_speculative_tokens_per_batch_size: list[Any] | None = None
    adaptive: bool = True
    ignored: tuple[tuple[str, str], ...] = ()  # given keys without an effect, and why


OLD_KEYS = {
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_model": "model",
    "acceptance_method": "rejection_sample_method",
}
_NO_EFFECT = {
    "drafts are made in quire's own way": """enforce_eager attention_backend moe_backend
        disable_padded_drafter_batch use_local_argmax_reduction disable_eagle_block_drop
        disable_lookahead_block_hashes index_share_for_mtp_iteration disable_mqa_scorer
        code_revision draft_lm_head_quantization""",
    "the number of drafts follows measured acceptance and step times": """disable_by_batch_size
        enable_adaptive_verification""",
    "logprobs are those of the target with drafts too": "disable_logprobs",
    "texts are the same as without drafts": """draft_sample_method
        typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha
        posterior_threshold posterior_alpha""",
    "it belongs to a method that is refused": """dspark_draft_topk xpress_topc fly_window_size
        fly_entropy_threshold fly_entropy_top_k""",
}
_REFUSED = {
    "speculative_token_tree": "drafts are chains",
    "parallel_drafting": "drafts are made one after the other",
    "use_heterogeneous_vocab": "drafter and target need the same vocabulary",
    "quantization": "a drafter's weights stay as its checkpoint has them",
    "kv_cache_dtype": "the KV of drafts is in the target's blocks, with its kv_cache_dtype",
    "draft_load_config": "a drafter is loaded as the target is",
}
NO_EFFECT = {name: why for why, names in _NO_EFFECT.items() for name in names.split()}
_ACCEPTANCE = {
    **dict.fromkeys(("standard", "block", "strict", "probabilistic", "rejection_sampler"), False),
    "synthetic": True,
}
"""Names of vLLM for how drafts are accepted -> whether it is simulated, for benchmarks."""


def parse_speculative_config(given: SpeculationOptions) -> SpeculativeConfig | None:
    """Parse and check the object and its shortcuts; None: nothing is given. Raises ConfigError."""
    whole = _with_shortcuts(given)
    if not whole:
        return None
    if "tensor_parallel_size" in whole:
        raise ConfigError(
            f"{OPTION_NAME} has no key 'tensor_parallel_size'; the key is "
            "draft_tensor_parallel_size, 1 or that of the target"
        )
    hints = get_type_hints(SpeculativeConfig)
    found: dict[str, Any] = {}
    ignored = []
    for given_key, value in whole.items():
        key = OLD_KEYS.get(given_key, given_key)
        if key in NO_EFFECT:
            if value is not None:
                ignored.append((f"{key}={value!r}", NO_EFFECT[key]))
        elif key in _REFUSED:
            if value:
                message = f"{OPTION_NAME}.{key}={value!r} is not supported"
                raise ConfigError(f"{message}: {_REFUSED[key]}; leave it out")
        elif key not in hints or key == "ignored":
            raise _unknown_key(key)
        elif value is not None:
            found[key] = coerce(f"{OPTION_NAME}.{key}", hints[key], value)
    parsed = SpeculativeConfig(**found, ignored=tuple(ignored))
    _check_ranges(parsed)
    return parsed


def synthetic_rates(parsed: SpeculativeConfig, most: int) -> tuple[float, ...] | None:
    """Return the acceptance by position that a benchmark simulates; None: acceptance is real.

    Raises: ConfigError.
    """
    name = parsed.rejection_sample_method
    rates, length = parsed.synthetic_acceptance_rates, parsed.synthetic_acceptance_length
    if name not in _ACCEPTANCE:
        raise ConfigError(
            f"{OPTION_NAME}.rejection_sample_method must be one of {', '.join(_ACCEPTANCE)}, got "
            f"{name!r}: drafts never change a text here"
        )
    if not _ACCEPTANCE[name]:
        if rates is not None or length is not None:
            raise ConfigError(
                f"{OPTION_NAME}: synthetic_acceptance_rates and synthetic_acceptance_length need "
                'rejection_sample_method="synthetic"'
            )
        return None
    if (rates is None) == (length is None):
        raise ConfigError(
            f"{OPTION_NAME}: synthetic acceptance needs synthetic_acceptance_rates or "
            "synthetic_acceptance_length, one of them"
        )
    if length is not None:
        return _rates_of_length(length, most)
    assert rates is not None
    numbers = tuple(coerce(f"{OPTION_NAME}.synthetic_acceptance_rates", float, x) for x in rates)
    falls = all(a >= b for a, b in zip((1.0, *numbers), (*numbers, 0.0)))
    if len(numbers) != most or not falls:
        raise ConfigError(
            f"{OPTION_NAME}.synthetic_acceptance_rates must be {most} numbers from 1 to 0 that do "
            f"not rise, one for each draft, got {list(rates)}"
        )
    return numbers


def _rates_of_length(length: float, most: int) -> tuple[float, ...]:
    """Return p, p**2, ... whose sum is the mean number of accepted drafts."""
    if not 1 <= length <= most + 1:
        raise ConfigError(
            f"{OPTION_NAME}.synthetic_acceptance_length must be from 1 to {most + 1}, the most "
            f"drafts and one, got {length:g}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, most + 1)) < length - 1:
            low = middle
        else:
            high = middle
    return tuple(high**i for i in range(1, most + 1))


def _with_shortcuts(given: SpeculationOptions) -> dict[str, Any]:
    whole = dict(given.speculative_config or {})
    for name, key in SHORTCUTS.items():
        value = getattr(given, name)
        if value is None:
            continue
        if whole.get(key) not in (None, value):
            raise ConfigError(
                f"{name}={value} and {key} in {OPTION_NAME} ({whole[key]}) differ: give one of them"
            )
        whole[key] = value
    return whole


SHORTCUTS = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}


def _unknown_key(key: str) -> ConfigError:
    known = [one.name for one in fields(SpeculativeConfig) if one.name != "ignored"]
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(known)}"
    return ConfigError(f"{OPTION_NAME} has no key {key!r}; {hint}")


def _check_ranges(parsed: SpeculativeConfig) -> None:
    least: Mapping[str, float] = {
        "num_speculative_tokens": 1,
        "prompt_lookup_max": 1,
        "prompt_lookup_min": 1,
        "suffix_decoding_max_tree_depth": 2,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 0,
        "suffix_decoding_min_token_prob": 0,
        "max_model_len": 1,
        "draft_tensor_parallel_size": 1,
    }
    for name, low in least.items():
        value = getattr(parsed, name)
        if value is not None and not value >= low:
            raise ConfigError(f"{OPTION_NAME}.{name} must be >= {low}, got {value}")
    if not parsed.suffix_decoding_min_token_prob <= 1:
        raise ConfigError(
            f"{OPTION_NAME}.suffix_decoding_min_token_prob must be in [0, 1], got "
            f"{parsed.suffix_decoding_min_token_prob}"
        )
    least_match, match = parsed.prompt_lookup_min, parsed.prompt_lookup_max
    if least_match is not None and match is not None and least_match > match:
        raise ConfigError(
            f"{OPTION_NAME}.prompt_lookup_min ({least_match}) must be <= prompt_lookup_max "
            f"({match})"
        )
    table = parsed.num_speculative_tokens_per_batch_size
    if table is not None and not (isinstance(table, list) and all(map(_is_bound, table))):
        raise ConfigError(
            f"{OPTION_NAME}.num_speculative_tokens_per_batch_size must be a list of "
            f"[low, high, drafts], got {table!r:.100}"
        )


def _is_bound(row: object) -> bool:
    counts = row if isinstance(row, (list, tuple)) else ()
    return len(counts) == 3 and all(type(one) is int and one >= 0 for one in counts)
