"""KV cache dtype: resolves the option, and what a checkpoint states, to a format of the cache."""

from __future__ import annotations

from quire.config.decisions import DecisionLog
from quire.config.facts import DeviceFacts, ModelFacts
from quire.config.memory.kv_format import KV_FORMATS
from quire.config.options import Options
from quire.errors import ConfigError

CODED_CACHES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8_per_token_head": "int8_per_token_head",
    "fp8_per_token_head": "fp8_per_token_head",
}
"""Values of kv_cache_dtype that store 8 bits -> name of the format."""


def resolve_cache_dtype(
    options: Options, model: ModelFacts, device: DeviceFacts, dtype: str, why: DecisionLog
) -> str:
    """Resolve the format of the KV cache, a name in KV_FORMATS."""
    requested = options.cache.kv_cache_dtype
    stored = None if model.quantization is None else model.quantization.kv_cache
    name, reason = CODED_CACHES.get(requested, requested), "requested"
    if requested == "auto":
        name, reason = (dtype, "the model's") if stored is None else (stored, "the checkpoint's")
    elif requested not in (dtype, *CODED_CACHES):
        allowed = f"auto, {', '.join(CODED_CACHES)} or the model's dtype ({dtype})"
        raise ConfigError(f"kv_cache_dtype must be {allowed}, got {requested!r}")
    if options.cache.calculate_kv_scales:
        if name == "float8_e4m3fn":
            name, reason = "fp8_per_token_head", "calculate_kv_scales"
        elif name in ("float8_e5m2", "int8"):
            raise ConfigError(
                f"calculate_kv_scales is for kv_cache_dtype=fp8, and the cache is {name}: use "
                "kv_cache_dtype=fp8_per_token_head or int8_per_token_head"
            )
    form = KV_FORMATS[name]
    if form.itemsize == 1 and any(layer.latent for layer in model.layers):
        if requested == "auto":
            return str(why.record("cache.dtype", dtype, "a cache of latents has no 8 bits"))
        raise ConfigError(
            f"kv_cache_dtype={requested!r}: {model.model_type} caches latents (multi-head latent "
            f"attention), which quire keeps in the model's dtype; use auto or {dtype}"
        )
    if form.dtype == "float8_e4m3fn" and not device.has_fp8:
        major, minor = device.capability
        lack = f"this GPU has compute capability {major}.{minor}, and e4m3 floats need 8.9"
        if requested == "auto":
            return str(why.record("cache.dtype", dtype, lack))
        raise ConfigError(
            f"kv_cache_dtype={requested!r}: {lack}; use int8_per_token_head, or auto for {dtype}"
        )
    return str(why.record("cache.dtype", name, reason))
