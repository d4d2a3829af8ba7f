"""Which layers of a model the engine adds adapters to, and what it refuses of an adapter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from quire.config.adapters import ALL_LINEAR, EXPERTS
from quire.config.engine_config import AdapterSection
from quire.errors import WeightError
from quire.models._decoder import EMBEDDING_MODULES, Decoder
from quire.weights.adapters.adapter import Adapter, TokenRows, WholeWeight
from quire.weights.adapters.modules import AdapterModules, ModuleShape

NO_ROOM_FOR_EXPERTS = (
    "no memory is reserved for adapters of experts, which would take more than a tenth of the "
    f"device's: name them, lora_target_modules={ALL_LINEAR},{EXPERTS}, or lower max_loras or "
    "max_lora_rank"
)


OUTPUT_HEAD = "lm_head"


def refuse_adapters(model: nn.Module) -> str | None:
    """Return what the model is if no adapter can be added to it; None: some can."""
    return None if isinstance(model, Decoder) else "models that run through transformers"


def layers_of_stage(model: nn.Module, names: Iterable[str], *, first: bool) -> list[str]:
    """Return those of the layers that a pipeline stage runs. first: whether it embeds the tokens:
    the last stage may have the embedding for the output head only."""
    found = dict(model.named_modules())
    return [name for name in names if name in found and (first or name not in EMBEDDING_MODULES)]


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
    if shape.kind == "head" and name != OUTPUT_HEAD:
        return ""
    if name.startswith("lm_transform."):
        return "adapters of what is between the last layer and the output head are not supported"
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


def check_deltas(
    adapter: Adapter, found: AdapterModules, section: AdapterSection, itemsize: int, ranks: int
) -> None:
    """Raise WeightError for what the engine does not add, or has no room for.

    itemsize: of the adapter's numbers. ranks: over which layers are cut.
    """
    problems = [*_replaced(adapter, found, section, itemsize, ranks)]
    if problems:
        raise WeightError(f"the adapter has what is not supported: {'; '.join(problems[:8])}")


def _replaced(
    adapter: Adapter, found: AdapterModules, section: AdapterSection, itemsize: int, ranks: int
) -> Iterator[str]:
    """Yield problems of weights in place of the model's."""
    layers = {name: found.layers[name] for name in adapted_layers(found)}
    token = sum(_numbers_of_token(name, shape) for name, shape in layers.items())
    for layer, parts in adapter.deltas.items():
        delta, shape = parts.get(0), layers[layer]
        if shape.kind == "head" and layer != OUTPUT_HEAD:
            if not isinstance(delta, WholeWeight):
                yield f"{layer} is a head that classifies: train it whole (modules_to_save)"
            continue
        if not isinstance(delta, (WholeWeight, TokenRows)):
            continue
        if isinstance(delta, WholeWeight):
            rows = -(-len(delta.weight) // ranks)
        else:
            rows = len(delta.rows)
            if shape.has_bias:
                yield f"{layer} has a bias, so its rows of tokens cannot be replaced"
        if rows > (most := section.max_replaced_tokens):
            size = rows * token * itemsize * section.max_adapters
            yield (
                f"it replaces {rows} rows of {layer}, and each slot has memory for {most}: "
                f"{section.max_adapters} slots need lora_modules_to_save_memory={size}"
            )


def _numbers_of_token(name: str, shape: ModuleShape) -> int:
    """Numbers of what an adapter may have in place of one token's row in a layer."""
    if shape.kind == "embedding":
        return shape.outputs[0]
    return shape.inputs + shape.has_bias if name == OUTPUT_HEAD else 0
