"""Speculation: decides how drafts are made, and how many at most."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quire.config.decisions import DecisionLog
from quire.config.drafters import DrafterFacts, Json, mtp_layers, read_drafter
from quire.config.engine_config import SpeculationSection
from quire.config.facts import ModelFacts
from quire.config.json_file import read_json_object
from quire.config.memory.memory_plan import EngineShape
from quire.config.options import Options
from quire.config.speculation_options import (
    OPTION_NAME,
    SpeculationOptions,
    SpeculativeConfig,
    parse_speculative_config,
    synthetic_rates,
)
from quire.errors import ConfigError
from quire.registry import PluginRegistry, find_entry_points

log = logging.getLogger(__name__)

HOST_METHODS = ("ngram", "suffix")
"""Methods that make drafts of the tokens alone."""
CHAIN_METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods whose weights make one draft after the other."""
MODEL_METHODS = (*CHAIN_METHODS, "medusa")
"""Methods with weights."""
NGRAM_WORDS = ("ngram", "[ngram]", "ngram_gpu")
DEFAULT_DRAFTS = {"ngram": 8, "suffix": 24}
"""Most drafts of a row where neither user nor files state a number; 5 with other methods."""
_PACKAGES = ("quire.core.drafters", "quire.runner.drafters")
_REFUSED = {
    "mlp_speculator": "use a head of EAGLE-3 or Medusa, a draft model, or suffix",
    "custom_class": 'a package adds a drafter by an entry point of "quire.core.drafters", whose '
    "name is then the method",
    "extract_hidden_states": "it makes no drafts",
}


def built_methods() -> list[str]:
    """Return the methods that there are drafters for, those of other packages last."""
    found = {name for one in _PACKAGES for name in PluginRegistry(one).names()}
    others = sorted(one.name for one in find_entry_points(_PACKAGES[0]))
    return [one for one in (*HOST_METHODS, *MODEL_METHODS) if one in found] + others


def wanted_drafter(given: SpeculationOptions) -> tuple[str | None, str | None, str | None]:
    """Return the method, the model and its revision that are given. Raises ConfigError.

    A method without weights has no model; without a method the files of the model show it.
    """
    parsed = parse_speculative_config(given)
    if parsed is None:
        return None, None, None
    method, model = _plain_method(parsed.method), parsed.model
    if model in NGRAM_WORDS:
        method, model = method or "ngram", None
    if method is None and model is None:
        raise ConfigError(
            f"{OPTION_NAME} needs a method ({', '.join(built_methods())}), or a model whose files "
            "show it"
        )
    return method, None if method in HOST_METHODS else model, parsed.revision


def with_verifier(options: Options, folder: Path) -> Options:
    """Return the options that serve a model's folder: a head of *speculators* names its model.

    That model is then served with the head. folder: of options.model. Raises: ConfigError.
    """
    path = folder / "config.json"
    if not path.is_file() or "speculators_config" not in read_json_object(path):
        return options
    section, head = options.model, read_drafter(folder)
    if head.verifier is None or parse_speculative_config(options.speculation) is not None:
        raise ConfigError(
            f"{section.model} is a head for speculative decoding: give its model, and the head as "
            f'{OPTION_NAME}={{"model": "{section.model}"}}'
        )
    log.info("%s is a head: %s is served with it", section.model, head.verifier)
    given = {"model": section.model, "revision": section.revision}
    names = section.served_model_name or (section.model, head.verifier)
    return replace(
        options,
        model=replace(section, model=head.verifier, revision=None, served_model_name=names),
        speculation=SpeculationOptions(speculative_config=given),
    )


def find_drafter(
    given: SpeculationOptions, find: Callable[[str, str | None], Path], *, name: str, hf: Json
) -> DrafterFacts | None:
    """Read the facts of the drafter that is given; None: there is none with weights.

    find: the folder of a model, by name and revision. name, hf: of the target, and its config.json.
    Raises: ConfigError.
    """
    method, model, revision = wanted_drafter(given)
    own = mtp_layers(hf)
    if own is not None and (method == "mtp" or model == name):
        return DrafterFacts(folder="", method="mtp", drafts=own)
    return None if model is None else read_drafter(find(model, revision), model)


def bound_drafts(given: SpeculationOptions) -> int:
    """Return an upper bound of the drafts of a row, before the drafter is known. Raises
    ConfigError."""
    parsed = parse_speculative_config(given)
    stated = None if parsed is None else parsed.num_speculative_tokens
    return stated or max(DEFAULT_DRAFTS.values())


def resolve_speculation(
    given: SpeculationOptions,
    model: ModelFacts,
    shape: EngineShape,
    why: DecisionLog,
    *,
    generates: bool,
) -> SpeculationSection:
    """Resolve the section. Raises ConfigError."""
    parsed = parse_speculative_config(given)
    if parsed is None:
        has_rows = shape.draft_states or not model.states
        return SpeculationSection() if has_rows else SpeculationSection(max_drafts=0)
    if not generates:
        raise ConfigError(f"{OPTION_NAME}: this model pools and generates no text: leave it out")
    for key, reason in parsed.ignored:
        log.info("%s: %s has no effect: %s", OPTION_NAME, key, reason)
    method = _method(given, parsed, model.drafter)
    drafter = model.drafter if method in MODEL_METHODS else None
    if drafter is not None and drafter.vocab not in (None, model.vocab) and method != "mtp":
        raise ConfigError(
            f"{OPTION_NAME}: the drafter's vocabulary has {drafter.vocab} tokens, and that of "
            f"{model.name} has {model.vocab}: drafts need the same tokens"
        )
    if parsed.draft_tensor_parallel_size not in (None, 1, shape.tensor):
        raise ConfigError(
            f"{OPTION_NAME}.draft_tensor_parallel_size must be 1 or {shape.tensor}, the target's, "
            f"got {parsed.draft_tensor_parallel_size}"
        )
    if drafter is not None and max(shape.stages, shape.data) > 1:
        raise ConfigError(
            f"{OPTION_NAME}: method {method!r} runs on one pipeline stage and one data-parallel "
            f"rank, and there are {max(shape.stages, shape.data)}: use tensor_parallel_size, or "
            "ngram or suffix"
        )
    most = _resolve_max_drafts(method, parsed, drafter, why)
    low, high = parsed.prompt_lookup_min, parsed.prompt_lookup_max
    reason = "requested" if drafter is None or parsed.method else "the drafter's files show it"
    return SpeculationSection(
        method=str(why.record("speculation.method", method, reason)),
        max_drafts=most,
        max_len=_resolve_max_len(parsed, drafter, shape, why),
        lookup_min=low or high or 5,
        lookup_max=high or low or 5,
        suffix_depth=parsed.suffix_decoding_max_tree_depth,
        suffix_requests=parsed.suffix_decoding_max_cached_requests,
        suffix_factor=parsed.suffix_decoding_max_spec_factor,
        suffix_min_probability=parsed.suffix_decoding_min_token_prob,
        draft_model=None if drafter is None or method == "mtp" else drafter.folder,
        synthetic_rates=_resolve_synthetic_rates(method, parsed, most),
        adaptive=parsed.adaptive,
    )


def _plain_method(name: str | None) -> str | None:
    """Return the method that a name of vLLM means."""
    if name is None:
        return None
    method = name.lower()
    if method in NGRAM_WORDS:
        return "ngram"
    if method.endswith("_mtp"):
        log.info("%s: the method %s is now called mtp", OPTION_NAME, method)
        return "mtp"
    return method


def _method(
    given: SpeculationOptions, parsed: SpeculativeConfig, drafter: DrafterFacts | None
) -> str:
    """Return the method, checked against the files of the drafter. Raises ConfigError."""
    method, source, _ = wanted_drafter(given)
    if method in HOST_METHODS and parsed.model not in (None, *NGRAM_WORDS):
        log.info("%s: model=%r has no effect with %s", OPTION_NAME, parsed.model, method)
    found = None if drafter is None else drafter.method
    method = method or found
    if method not in (known := built_methods()):
        advice = _REFUSED.get(str(method), f"supported are {', '.join(known)}")
        raise ConfigError(f"{OPTION_NAME}: method {method!r} is not supported; {advice}")
    if method == "mtp" and drafter is None:
        raise ConfigError(
            f"{OPTION_NAME}: method 'mtp' needs a model whose checkpoint has layers that predict "
            "further tokens (num_nextn_predict_layers in config.json)"
        )
    if method in MODEL_METHODS and drafter is None:
        raise ConfigError(f"{OPTION_NAME}: method {method!r} needs a model: the drafter's folder")
    if found not in (None, "draft_model", method):
        raise ConfigError(
            f"{OPTION_NAME}: the files in {source} are those of method {found!r}, not {method!r}"
        )
    return method


def _resolve_max_drafts(
    method: str, parsed: SpeculativeConfig, drafter: DrafterFacts | None, why: DecisionLog
) -> int:
    """Resolve the most drafts of a row. Raises ConfigError."""
    stated = None if drafter is None else drafter.drafts
    most, reason = parsed.num_speculative_tokens, "requested"
    if table := parsed.num_speculative_tokens_per_batch_size:
        greatest = max(row[2] for row in table)
        log.info(
            "%s: num_speculative_tokens_per_batch_size bounds the drafts by its greatest number "
            "(%d): the number for each step is chosen by measurement",
            OPTION_NAME,
            greatest,
        )
        most = min(most or greatest, max(1, greatest))
    if most is None and stated:
        most, reason = stated, "the drafter's files"
    if most is None:
        most, reason = DEFAULT_DRAFTS.get(method, 5), f"the default of {method}"
    if method == "mtp" and stated and most % stated:
        raise ConfigError(
            f"{OPTION_NAME}.num_speculative_tokens must be a multiple of {stated}, the layers of "
            f"the checkpoint that predict tokens, got {most}"
        )
    if method == "medusa" and stated and most > stated:
        raise ConfigError(
            f"{OPTION_NAME}.num_speculative_tokens must be at most {stated}, the heads of the "
            f"checkpoint, got {most}"
        )
    return int(why.record("speculation.max_drafts", most, reason))


def _resolve_max_len(
    parsed: SpeculativeConfig, drafter: DrafterFacts | None, shape: EngineShape, why: DecisionLog
) -> int | None:
    """Resolve the tokens up to which sequences have drafts; None: all have."""
    stated = None if drafter is None else drafter.max_len
    if drafter is not None and drafter.method != "draft_model" and stated is not None:
        if stated < (parsed.max_model_len or shape.max_model_len):
            log.info(
                "%s: the head was trained for %d tokens, and sequences have up to %d: behind those "
                "fewer of its drafts may be accepted; max_model_len in it ends them there",
                OPTION_NAME,
                stated,
                shape.max_model_len,
            )
        stated = None
    limits = [one for one in (parsed.max_model_len, stated) if one is not None]
    if not limits or min(limits) >= shape.max_model_len:
        return None
    reason = "longer sequences have no drafts"
    return int(why.record("speculation.max_len", min(limits), reason))


def _resolve_synthetic_rates(
    method: str, parsed: SpeculativeConfig, most: int
) -> tuple[float, ...] | None:
    rates = synthetic_rates(parsed, most)
    if rates is not None and method in HOST_METHODS:
        raise ConfigError(
            f"{OPTION_NAME}: synthetic acceptance is for benchmarks of methods with weights "
            f"({', '.join(MODEL_METHODS)}), not {method}"
        )
    return rates
