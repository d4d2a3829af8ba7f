"""Attention backend selection: chooses a backend, with the reason why others were not chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.attention.base import BackendCapabilities
from quire.errors import ConfigError
from quire.registry import PluginRegistry

PREFERENCE_ORDER = ("paged", "mla", "packed")
"""Best first. A backend that is not listed is used only when it is requested by name."""


@dataclass(frozen=True, slots=True)
class BackendRequirements:
    """What the model and the device require of a backend."""

    device: str
    dtype: torch.dtype
    head_dim: int
    window: bool = False
    softcap: bool = False
    latent: bool = False
    packed: bool = False
    coded_cache: bool = False
    encoder: bool = False
    spans: bool = False


class AttentionBackendChoice(NamedTuple):
    """The chosen backend, and a line for each candidate: why it is taken or not."""

    name: str
    reasons: tuple[str, ...]


def backend_registry() -> PluginRegistry:
    """Every attention backend by name."""
    return PluginRegistry("quire.attention", kind="attention backend")


def select_backend(wanted: str | None, needs: BackendRequirements) -> AttentionBackendChoice:
    """The backend called `wanted`, or the first of ORDER that can serve. Raises ConfigError."""
    reasons: list[str] = []
    for name in [wanted] if wanted is not None else PREFERENCE_ORDER:
        lack = unmet_requirement(_capabilities(name), needs)
        if not lack:
            why = "requested" if wanted is not None else "first in order that fits"
            return AttentionBackendChoice(name, (*reasons, f"{name}: {why}"))
        reasons.append(f"{name}: {lack}")
    raise ConfigError("no attention backend fits: " + "; ".join(reasons))


def unmet_requirement(caps: BackendCapabilities, needs: BackendRequirements) -> str:
    """Return what the backend lacks; empty if nothing."""
    if needs.device not in caps.devices:
        return f"runs on {', '.join(sorted(caps.devices))}, not on {needs.device}"
    if needs.dtype not in caps.dtypes:
        return f"has no {needs.dtype}"
    if caps.max_head_dim is not None and needs.head_dim > caps.max_head_dim:
        return f"head size {needs.head_dim} is over its {caps.max_head_dim}"
    if needs.latent != caps.latent:
        return "keeps latents only" if caps.latent else "keeps keys and values, not latents"
    if needs.packed != caps.packed:
        return "uses no KV cache" if caps.packed else "needs a KV cache, and the model has none"
    if needs.window and not caps.sliding_window:
        return "has no sliding window"
    if needs.softcap and not caps.softcap:
        return "has no soft cap"
    if needs.spans and not caps.spans:
        return "has no tokens that see others after them"
    if needs.encoder and not caps.encoder:
        return "has no cross attention"
    if needs.coded_cache and not caps.coded_cache:
        return "has no cache of 8 bits (kv_cache_dtype)"
    return ""


def _capabilities(name: str) -> BackendCapabilities:
    caps = backend_registry().load(name).CAPS
    assert isinstance(caps, BackendCapabilities), f"quire.attention.{name}.CAPS is {caps!r}"
    return caps
