"""Which layers of a model the engine adds adapters to, and what it refuses of an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from quire.config.adapters import ALL_LINEAR, EXPERTS
from quire.errors import WeightError
from quire.models._decoder import Decoder
from quire.models.base import ModelConfig
from quire.weights.adapters.adapter import Adapter, ExpertsDelta, LinearDelta
from quire.weights.adapters.modules import AdapterModules, ModuleShape

_UNSUPPORTED_KINDS = {
    "embedding": "adapters of token embeddings are not supported yet",
    "head": "adapters of output heads are not supported yet",
}


NO_ROOM_FOR_EXPERTS = (
    "no memory is reserved for adapters of experts, which would take more than a tenth of the "
    f"device's: name them, lora_target_modules={ALL_LINEAR},{EXPERTS}, or lower max_loras or "
    "max_lora_rank"
)


def refuse_adapters(model: nn.Module, config: ModelConfig) -> str | None:
    """Return what the model is if no adapter can be added to it; None: some can."""
    if not isinstance(model, Decoder):
        return "models that run through transformers"
    if any(layer.cross for layer in config.attention_layers()):
        return "models with an encoder"
    return "encoders" if config.bidirectional else None


def restrict_targets(
    found: AdapterModules, targets: tuple[str, ...] | None, experts: bool
) -> AdapterModules:
    """Refuse layers that the engine cannot change, and those that the user does not want changed.

    targets: last components of names, of which a part must have one, or ALL_LINEAR; None: all.
    experts: whether there is room for adapters of experts.
    """
    layers = {
        name: replace(
            shape, refusal=shape.refusal or _refusal(name, shape, found, targets, experts)
        )
        for name, shape in found.layers.items()
    }
    return replace(found, layers=layers)


def _refusal(
    name: str,
    shape: ModuleShape,
    found: AdapterModules,
    targets: tuple[str, ...] | None,
    experts: bool,
) -> str:
    if shape.kind in _UNSUPPORTED_KINDS:
        return _UNSUPPORTED_KINDS[shape.kind]
    if not name.startswith("layers."):
        return "it is in no layer of the decoder"
    if targets is None:
        return "" if experts or shape.kind != "experts" else NO_ROOM_FOR_EXPERTS
    if shape.kind == "linear" and ALL_LINEAR in targets:
        return ""
    leaves = {path.rpartition(".")[2] for path in found.weights.checkpoint_paths(name)}
    if leaves.isdisjoint(targets):
        return f"lora_target_modules allows {', '.join(targets)} only"
    return ""


def adapted_layers(found: AdapterModules) -> tuple[str, ...]:
    """Return the names of the layers that adapters can change."""
    return tuple(name for name, shape in found.layers.items() if not shape.refusal)


def check_deltas(adapter: Adapter, ranks: int) -> None:
    """Raise WeightError for a kind of delta that the engine does not add yet.

    ranks: over which layers are cut.
    """
    problems = [*dict.fromkeys(_unsupported(adapter, ranks))]
    if problems:
        raise WeightError(f"the adapter has what is not supported yet: {'; '.join(problems[:8])}")


def _unsupported(adapter: Adapter, ranks: int) -> Iterator[str]:
    for layer, parts in adapter.deltas.items():
        for delta in parts.values():
            if isinstance(delta, ExpertsDelta):
                continue
            if not isinstance(delta, LinearDelta):
                yield f"{type(delta).__name__} of {layer}"
            elif ranks > 1 and delta.magnitude is not None:
                yield "magnitudes (use_dora) on several ranks"
            elif ranks > 1 and delta.bias is not None:
                yield "biases of B (lora_bias) on several ranks"
