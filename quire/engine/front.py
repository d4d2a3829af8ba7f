"""The text half of an engine, from its config: the tokenizer, and what makes requests.

Needs no torch, so that a process that only speaks to people starts fast and stays small.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from quire.config.config import EngineConfig
from quire.core.params import SamplingParams
from quire.errors import ConfigError, RequestError
from quire.grammar import words
from quire.grammar.words import House
from quire.text.inputs import InputProcessor
from quire.text.tokenizer import Tokenizer, load_tokenizer

Check = Callable[[SamplingParams], None]


def load_texts(config: EngineConfig, folder: Path | None) -> Tokenizer | None:
    """The tokenizer in this folder, as the config says; None for None."""
    if folder is None:
        return None
    said = config.model
    return load_tokenizer(folder, said.tokenizer_mode, trust_remote_code=said.trust_remote_code)


def inputs_of(
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    *,
    checks: Iterable[Check] = (),
    process: int = 0,
) -> InputProcessor:
    """Makes requests for the engine of this config. process: which of several, for their seeds."""
    seed = config.model.seed
    return InputProcessor(
        tokenizer,
        max_model_len=config.scheduler.max_model_len,
        vocab_size=config.model.vocab,
        eos_ids=config.sampling.eos_ids,
        defaults=_defaults(config),
        max_logprobs=config.model.max_logprobs,
        seeds=random.Random(seed if process == 0 else f"{seed} {process}"),
        checks=checks,
        constrain=partial(words.constraint, house=house_of(config)),
    )


def _defaults(config: EngineConfig) -> SamplingParams:
    try:
        return SamplingParams(**config.sampling.defaults)
    except RequestError as error:
        message = f"generation_config.json, or what overrides it: {error}"
        raise ConfigError(message) from None


def house_of(config: EngineConfig) -> House:
    """How texts with a form are written and compiled, where a request does not say."""
    said = config.structured
    return House(
        said.backend,
        disable_any_whitespace=said.disable_any_whitespace,
        disable_additional_properties=said.disable_additional_properties,
        enable_in_reasoning=said.enable_in_reasoning,
    )
