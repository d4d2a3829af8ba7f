"""Reads an adapter's folder for one model: every tensor has a place there, or the whole is refused.

    config -> headers -> places of all names -> shapes -> tensors, scaled and converted

Nothing of a size that a file states is allocated before it has been compared with the model.
"""

from __future__ import annotations

from pathlib import Path

import torch

from quire.errors import WeightError
from quire.weights.adapters.adapter import Adapter, AdapterLimits, PackedTensors
from quire.weights.adapters.deltas import (
    AdapterModule,
    AdapterProblems,
    DeltaBuilder,
    whole_shape,
)
from quire.weights.adapters.fill import fill, short
from quire.weights.adapters.gguf_file import open_gguf_adapter
from quire.weights.adapters.lora_config import read_lora_config
from quire.weights.adapters.modules import AdapterModules, ModulePlace
from quire.weights.adapters.names import AdapterTensorName, parse_tensor_name
from quire.weights.adapters.packed import Allocate, plain_bytes
from quire.weights.adapters.tensor_files import AdapterTensors, open_tensors

STORED_BYTES = 8
"""Bytes of a number in the widest dtype of files."""


def read_adapter(
    folder: Path,
    modules: AdapterModules,
    dtype: torch.dtype,
    limits: AdapterLimits = AdapterLimits(),  # noqa: B008 - an immutable value
    allocate: Allocate | None = None,
) -> Adapter:
    """Read a folder of PEFT, or a GGUF file. dtype: what the tensors are converted to, scaled.

    allocate: makes memory that a GPU reads, so the adapter is packed; unless it is to be scaled.
    Raises: ConfigError (a key of its config is refused; files are missing), WeightError (tensors do
    not fit the model or the limits).
    """
    most = limits.max_bytes * STORED_BYTES
    if folder.suffix == ".gguf" and not folder.is_dir():
        config, source = open_gguf_adapter(folder, modules, most)
    else:
        config = read_lora_config(folder)
        source = open_tensors(folder, most)
    if config.rank > limits.max_rank:
        raise WeightError(
            f"the adapter has rank {config.rank}; the maximum is {limits.max_rank} (max_lora_rank)"
        )
    found, warnings = _group_by_module(source, modules)
    builder = DeltaBuilder(source, config, modules, dtype, limits)
    plans = builder.plan(found)
    on_gpu = allocate is not None and not config.dora
    filled = fill(plans, source, allocate if on_gpu and allocate is not None else plain_bytes)
    return Adapter(
        digest=filled.digest.hex(),
        rank=builder.rank,
        nbytes=builder.nbytes,
        deltas=filled.deltas,
        base_model=config.base_model,
        warnings=config.warnings + warnings,
        packed=PackedTensors(filled.layout, filled.buffer) if on_gpu else None,
    )


def _group_by_module(
    source: AdapterTensors, modules: AdapterModules
) -> tuple[list[AdapterModule], tuple[str, ...]]:
    """Group the tensors by module. Raises WeightError for every name that leads nowhere.

    Also returns a warning for each module that is left out.
    """
    found: dict[tuple[str, int], AdapterModule] = {}
    left_out: dict[str, None] = {}
    places: dict[str, ModulePlace | None] = {}
    problems, adapters = AdapterProblems(), set()
    for name, header in source.headers.items():
        parsed = parse_tensor_name(name)
        if parsed is None:
            problems.add(f"{short(name)} is no tensor of a LoRA adapter")
            continue
        if parsed.module not in places:
            places[parsed.module] = modules.find(parsed.module)
        place = places[parsed.module]
        if place is None and modules.is_left_out(parsed.module):
            left_out[parsed.module] = None
            continue
        if place is None or place.shape.refusal:
            problems.add(f"{short(name)}: {_no_place(parsed, place, modules)}")
            continue
        if parsed.adapter:
            adapters.add(parsed.adapter)
        if parsed.copied:
            _check_copy(name, header.shape, place, problems)
            continue
        whole_bank = place.shape.kind == "experts" and place.expert is None
        key = (parsed.module, parsed.level if whole_bank else 0)
        module = found.setdefault(key, AdapterModule(parsed.module, place))
        if (other := module.tensors.setdefault(parsed.slot, name)) != name:
            problems.add(f"{short(name)} and {short(other)} are the same tensor of one module")
    if len(adapters) > 1:
        names = ", ".join(repr(one) for one in sorted(adapters)[:4])
        problems.add(f"the file has tensors of {len(adapters)} adapters ({names:.200}); save one")
    problems.raise_if_any()
    if not found:
        raise WeightError("the adapter has no tensors")
    return list(found.values()), tuple(
        f"it changes {short(one)}, which the engine does not use" for one in left_out
    )


def _no_place(parsed: AdapterTensorName, place: ModulePlace | None, modules: AdapterModules) -> str:
    """Say why a tensor has no place in the model."""
    if place is None:
        return f"there is no module {short(parsed.module)}; {modules.near(parsed.module)}"
    return place.shape.refusal


def _check_copy(
    name: str, shape: tuple[int, ...], place: ModulePlace, problems: AdapterProblems
) -> None:
    """A copy of a base weight, which peft saves with an embedding, must be of this model."""
    if place.shape.kind not in ("embedding", "head"):
        problems.add(f"{short(name)} is a base weight; quire does not replace it")
    elif shape not in (want := whole_shape(place), want[:1]):
        problems.add(f"{short(name)} is {list(shape)}, the model has {list(want)}")
