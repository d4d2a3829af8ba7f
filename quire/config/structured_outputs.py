"""Structured output config: parses its JSON object, and the options of older releases.

`structured_outputs_config` is one object; `guided_decoding_*` were separate flags. Quire's own
limits are separate options.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.decisions import DecisionLog
from quire.config.engine_config import StructuredSection
from quire.config.options import Options
from quire.config.structured_backends import KNOWN, canonical_name
from quire.config.values import coerce
from quire.errors import ConfigError

log = logging.getLogger(__name__)

USER_BACKENDS = ("auto", "guidance", "lm-format-enforcer", "outlines", "xgrammar")
"""Names of backends that users may give."""
LEGACY_SWITCHES = {
    "no-fallback": "disable_fallback",
    "disable-any-whitespace": "disable_any_whitespace",
    "no-additional-properties": "disable_additional_properties",
}
"""Backend suffixes of older releases: `xgrammar:disable-any-whitespace,no-fallback`."""
OPTION_NAME = "structured_outputs_config"


@dataclass(frozen=True, slots=True)
class StructuredConfig:
    """The keys of the object."""

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False
    disable_fallback: bool = False
    reasoning_parser: str = ""
    reasoning_parser_plugin: str = ""


def parse_structured_config(given: Mapping[str, Any]) -> StructuredConfig:
    """Parse and check the object. Raises ConfigError."""
    hints = {"backend": str, "reasoning_parser": str, "reasoning_parser_plugin": str}
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key not in StructuredConfig.__dataclass_fields__:
            near = difflib.get_close_matches(key, StructuredConfig.__dataclass_fields__, n=1)
            hint = f"; did you mean {near[0]}?" if near else ";"
            known = ", ".join(StructuredConfig.__dataclass_fields__)
            raise ConfigError(f"{OPTION_NAME} has no key {key!r}{hint} allowed are {known}")
        if value is not None:
            found[key] = coerce(f"{OPTION_NAME}.{key}", hints.get(key, bool), value)
    name, _, switches = str(found.get("backend", "auto")).partition(":")
    for switch in filter(None, switches.split(",")):
        if switch not in LEGACY_SWITCHES:
            known = ", ".join(LEGACY_SWITCHES)
            raise ConfigError(
                f"{OPTION_NAME}.backend has {switch!r} after its name; allowed are {known}"
            )
        found[LEGACY_SWITCHES[switch]] = True
    backend = canonical_name(name)
    if backend not in KNOWN:
        raise ConfigError(
            f"{OPTION_NAME}.backend must be one of {', '.join(USER_BACKENDS)}, got {name!r}"
        )
    return StructuredConfig(**found | {"backend": backend})


def resolve_structured(options: Options, why: DecisionLog) -> StructuredSection:
    """Resolve the section. Raises ConfigError."""
    section = options.structured
    parsed = parse_structured_config(section.structured_outputs_config)
    if parsed.disable_fallback:
        log.info("disable_fallback has no effect: quire never replaces a backend that is named")
    reason = "requested" if "backend" in section.structured_outputs_config else "the default"
    return StructuredSection(
        backend=why.record("structured.backend", parsed.backend, reason),
        disable_any_whitespace=parsed.disable_any_whitespace,
        disable_additional_properties=parsed.disable_additional_properties,
        enable_in_reasoning=parsed.enable_in_reasoning,
        compile_seconds=section.grammar_compile_seconds,
        compile_memory=section.grammar_compile_memory,
        cache_memory=section.grammar_cache_memory,
        cache_size=section.grammar_cache_size,
    )
