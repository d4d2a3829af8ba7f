"""Reads the quantization that config.json describes, or that the user has chosen.

Each `quant_method` has a reader, one module of this package; another one is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.config.quant import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fbgemm,
    fp4,
    fp8,
    gguf,
    gptq,
    hqq,
    modelopt,
    quark,
    squeezellm,
)
from quire.config.quant.facts import QuantFacts
from quire.config.quant.fields import Json
from quire.config.quant.names import means, refuse_unread
from quire.config.quant.online import find_online, online_names
from quire.config.quant.side_files import CONFIG_KEYS
from quire.errors import ConfigError

READERS = {
    "bitsandbytes": bitsandbytes.read,
    "fp8": fp8.read,
    "compressed-tensors": compressed_tensors.read,
    "gptq": gptq.read,
    "awq": awq.read,
    "squeezellm": squeezellm.read,
    "auto-round": auto_round.read,
    "intel/auto-round": auto_round.read,
    "mxfp4": fp4.read_mxfp4,
    "modelopt": modelopt.read,
    "modelopt_fp4": modelopt.read,
    "fbgemm_fp8": fbgemm.read,
    "quark": quark.read,
    "gguf": gguf.read,
    "hqq": hqq.read,
}
"""quant_method -> reader of the object that has it."""


def read_quantization(hf: Json, requested: str | None = None) -> QuantFacts | None:
    """Return the checkpoint's quantization, or the requested one; None: unquantized weights.

    Raises ConfigError for unsupported formats, and if the two disagree.
    """
    for key in CONFIG_KEYS:
        if hf.get(key):
            return reconcile_quantization(_read_checkpoint_quantization(hf[key], key), requested)
    return reconcile_quantization(None, requested)


def reconcile_quantization(
    found: QuantFacts | None, requested: str | None, layers: int = 0
) -> QuantFacts | None:
    """Combine the checkpoint's quantization with the option. Raises ConfigError if they differ.

    layers: of the model; some of them may be given more bits on load.
    """
    if requested is None:
        return found
    refuse_unread(requested, "quantization")
    if found is not None and found.default == fp4.GPT_OSS and not means(requested, "mxfp4"):
        found = None  # its experts are widened, then quantized like the layers that are plain
    if found is not None and found.is_stored:
        methods = {one.method for one in (found.default,) if one is not None}
        if any(means(requested, method) for method in (found.quant_method, *methods)):
            return found
        raise ConfigError(
            f"quantization={requested!r}, but the checkpoint is already quantized "
            f"({found.quant_method}); leave quantization out"
        )
    made = find_online(requested, layers)
    if made is None:
        known = ", ".join(online_names())
        raise ConfigError(
            f"quantization={requested!r}, but the checkpoint is not quantized, and no weights are "
            f"made so on load; allowed: {known}"
        )
    return made if found is None else replace(made, kv_cache=found.kv_cache)


def _read_checkpoint_quantization(found: object, key: str) -> QuantFacts | None:
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: {key} is {found!r}; it must be an object")
    dialect = found.get("quant_method") or found.get("method") or "unnamed"
    refuse_unread(str(dialect), f"config.json: {key}.quant_method")
    reader = READERS.get(dialect) if isinstance(dialect, str) else None
    if reader is None:
        raise ConfigError(
            f"config.json: {key} has the quantization method {dialect!r}; supported: "
            f"unquantized checkpoints, {', '.join(READERS)}"
        )
    return reader(found)
