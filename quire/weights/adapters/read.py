"""Reads an adapter's folder for one model: every tensor has a place there, or the whole is refused.

    config -> headers -> places of all names -> shapes -> bytes -> tensors, scaled and converted

Nothing of a size that a file states is allocated before it has been compared with the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import ConfigError, WeightError
from quire.weights.adapters.adapter import (
    Adapter,
    AdapterLimits,
    Delta,
    LinearDelta,
    tensors_of,
)
from quire.weights.adapters.lora_config import CONFIG_FILE, LoraConfig, read_lora_config
from quire.weights.adapters.modules import AdapterModules, ModulePlace
from quire.weights.adapters.names import AdapterTensorName, Slot, parse_tensor_name
from quire.weights.adapters.tensor_files import AdapterTensors, open_tensors
from quire.weights.mapping import MAX_LISTED

MAX_NAME = 160
"""Characters of a stranger's name in a message."""
STORED_BYTES = 8
"""Bytes of a number in the widest dtype of files."""


@dataclass(slots=True)
class _Module:
    """The tensors of one module, by slot, under the names that the file has."""

    name: str  # of the module, as the file has it
    place: ModulePlace
    tensors: dict[Slot, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Problems:
    """All that is wrong with an adapter, for one error."""

    found: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        self.found.append(problem)
        if len(self.found) > MAX_LISTED:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        if self.found:
            more = " and more" if len(self.found) > MAX_LISTED else ""
            lines = "\n  ".join(self.found[:MAX_LISTED])
            raise WeightError(f"the adapter does not fit the model:\n  {lines}{more}")


def read_adapter(
    folder: Path,
    modules: AdapterModules,
    dtype: torch.dtype,
    limits: AdapterLimits = AdapterLimits(),  # noqa: B008 - an immutable value
) -> Adapter:
    """Read a folder of PEFT. dtype: what the tensors are converted to, scaled.

    Raises: ConfigError (a key of its config is refused; files are missing), WeightError (tensors do
    not fit the model or the limits).
    """
    try:
        config = read_lora_config(folder)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} has no {CONFIG_FILE}: it is no LoRA adapter") from error
    _check_rank(config.rank, limits)
    source = open_tensors(folder, limits.max_bytes * STORED_BYTES)
    found = _find_modules(source, modules, config)
    return _Builder(source, config, modules, dtype, limits).build(found)


def _check_rank(rank: int, limits: AdapterLimits) -> None:
    if rank > limits.max_rank:
        raise WeightError(
            f"the adapter has rank {rank}; the maximum is {limits.max_rank} (max_lora_rank)"
        )


def _find_modules(
    source: AdapterTensors, modules: AdapterModules, config: LoraConfig
) -> list[_Module]:
    """Group the tensors by module. Raises WeightError for every name that leads nowhere."""
    found: dict[tuple[str, int], _Module] = {}
    places: dict[str, ModulePlace | None] = {}
    problems, adapters = _Problems(), set()
    for name in source.headers:
        parsed = parse_tensor_name(name)
        if parsed is None:
            problems.add(f"{_short(name)} is no tensor of a LoRA adapter")
            continue
        if parsed.module not in places:
            places[parsed.module] = modules.find(parsed.module)
        place = places[parsed.module]
        if problem := _misplaced(parsed, place, modules):
            problems.add(f"{_short(name)}: {problem}")
            continue
        assert place is not None
        if parsed.adapter:
            adapters.add(parsed.adapter)
        key = (parsed.module, parsed.level if _is_bank(place) else 0)
        module = found.setdefault(key, _Module(parsed.module, place))
        if parsed.copied:
            if place.shape.kind not in ("embedding", "head"):
                problems.add(f"{_short(name)} is a base weight; quire does not replace it")
            elif (shape := source.headers[name].shape) != (want := _whole_shape(place)):
                problems.add(f"{_short(name)} is {list(shape)}, the model has {list(want)}")
        elif (other := module.tensors.setdefault(parsed.slot, name)) != name:
            problems.add(f"{_short(name)} and {_short(other)} are the same tensor of one module")
    if len(adapters) > 1:
        names = ", ".join(repr(one) for one in sorted(adapters)[:4])
        problems.add(f"the file has tensors of {len(adapters)} adapters ({names:.200}); save one")
    problems.raise_if_any()
    if not any(module.tensors for module in found.values()):
        raise WeightError("the adapter has no tensors")
    return [module for module in found.values() if module.tensors]


def _misplaced(
    parsed: AdapterTensorName, place: ModulePlace | None, modules: AdapterModules
) -> str:
    """Say why a tensor has no place in the model; "": it has one."""
    if place is None:
        return f"there is no module {_short(parsed.module)}; {modules.near(parsed.module)}"
    return place.shape.refusal


class _Builder:
    """Makes deltas of the tensors of modules."""

    def __init__(
        self,
        source: AdapterTensors,
        config: LoraConfig,
        modules: AdapterModules,
        dtype: torch.dtype,
        limits: AdapterLimits,
    ) -> None:
        self._source, self._config, self._modules = source, config, modules
        self._dtype, self._limits = dtype, limits
        self._problems = _Problems()
        self._rank = self._nbytes = 0
        self._places: dict[tuple[str, int], str] = {}  # layer, part -> the module that fills it
        self._deltas: dict[str, dict[int, Delta]] = {}

    def build(self, found: list[_Module]) -> Adapter:
        """Check all modules, then read their tensors."""
        readers: list[tuple[str, Callable[[], dict[int, Delta]]]] = []
        for module in found:
            reader = self._plan(module)
            if reader is not None:
                readers.append((module.place.layer, reader))
        self._problems.raise_if_any()
        if self._nbytes > self._limits.max_bytes:
            raise WeightError(
                f"the adapter takes {self._nbytes} bytes; the maximum is {self._limits.max_bytes}"
            )
        for layer, reader in readers:
            self._deltas.setdefault(layer, {}).update(reader())
        nbytes = sum(
            tensor.nbytes
            for parts in self._deltas.values()
            for delta in parts.values()
            for _, tensor in tensors_of(delta)
        )
        return Adapter(
            digest=_digest(self._deltas),
            rank=self._rank,
            nbytes=nbytes,
            deltas=self._deltas,
            base_model=self._config.base_model,
            warnings=self._config.warnings,
        )

    def _plan(self, module: _Module) -> Callable[[], dict[int, Delta]] | None:
        """Check the shapes of a module's tensors. Return what reads them; None: they are wrong."""
        kind, slots = module.place.shape.kind, module.tensors.keys()
        if slots <= {"A", "B", "bias", "magnitude"} and kind in ("linear", "head"):
            return self._plan_linear(module)
        names = ", ".join(_short(name) for name in module.tensors.values())
        self._problems.add(f"{names}: quire cannot add this to a layer of kind {kind}")
        return None

    # --- linear layers and output heads ---

    def _plan_linear(self, module: _Module) -> Callable[[], dict[int, Delta]] | None:
        place, shape = module.place, module.place.shape
        parts = range(len(shape.outputs)) if place.part is None else (place.part,)
        outputs = sum(shape.outputs[part] for part in parts)
        rank = self._check_rank(module, "A", "B")
        wanted = {"A": (rank, shape.inputs), "B": (outputs, rank), "bias": (outputs,)}
        self._check_shapes(module, {**wanted, "magnitude": (outputs,)})
        if not self._claim(module, parts):
            return None
        self._nbytes += (rank * shape.inputs * len(parts) + outputs * rank) * self._dtype.itemsize

        def read() -> dict[int, Delta]:
            scale = self._config.scale_of(module.name)
            a = self._read(module, "A")
            b = self._read(module, "B", scale)
            bias = self._read(module, "bias", scale) if "bias" in module.tensors else None
            magnitude = None
            if "magnitude" in module.tensors:
                magnitude = self._read(module, "magnitude", dtype=torch.float32).view(-1)
            sizes = [shape.outputs[part] for part in parts]
            rows = [self._split(module, one, sizes) for one in (b, bias, magnitude)]
            return {part: LinearDelta(a, *cut) for part, *cut in zip(parts, *rows, strict=True)}

        return read

    def _split(self, module: _Module, tensor: Tensor | None, sizes: list[int]) -> list[Any]:
        """Return the rows of each part, in the model's order; None for each of None."""
        if tensor is None or len(sizes) == 1:
            return [tensor] * len(sizes)
        order = module.place.shape.order
        return [one.clone() for one in (tensor if order is None else tensor[order]).split(sizes)]

    # --- checks ---

    def _shape(self, module: _Module, slot: Slot) -> tuple[int, ...]:
        return self._source.headers[module.tensors[slot]].shape

    def _check_rank(self, module: _Module, a: Slot, b: Slot, experts: int = 1) -> int:
        """Return the rank of a module's tensors, which must be that of the config."""
        for slot, other in ((a, b), (b, a)):
            if slot not in module.tensors:
                name = _short(module.tensors.get(other, module.name))
                self._problems.add(f"{name} has no lora_{slot} beside it")
                return 0
        rank, stated = self._config.rank_of(module.name), 0
        shape = self._shape(module, a)
        if len(shape) == 2:
            stated = shape[0] // experts
        if stated != rank or shape[0] != rank * experts:
            self._problems.add(
                f"{_short(module.tensors[a])} is {list(shape)}; by r and rank_pattern of "
                f"{CONFIG_FILE} it has {rank * experts} rows"
            )
        elif rank > self._limits.max_rank:
            self._problems.add(
                f"{_short(module.tensors[a])} has rank {rank}; the maximum is "
                f"{self._limits.max_rank} (max_lora_rank)"
            )
        self._rank = max(self._rank, rank)
        return rank

    def _check_shapes(self, module: _Module, wanted: Mapping[str, tuple[int, ...]]) -> None:
        for slot, name in module.tensors.items():
            shape, want = self._source.headers[name].shape, wanted[slot]
            loose = slot == "magnitude" and shape == (1, *want)  # of older files
            if shape != want and not loose:
                self._problems.add(f"{_short(name)} is {list(shape)}, the model has {list(want)}")
        for slot, on, key in (
            ("magnitude", self._config.dora, "use_dora"),
            ("bias", self._config.lora_bias, "lora_bias"),
        ):
            if on != (slot in module.tensors):
                lack = "has no" if on else "has a"
                self._problems.add(
                    f"{_short(module.name)} {lack} {slot}; {key} of {CONFIG_FILE} is "
                    f"{str(on).lower()}"
                )

    def _claim(self, module: _Module, parts: Iterator[int] | range | tuple[int, ...]) -> bool:
        """Note which module fills parts of a layer. False: another does."""
        for part in parts:
            other = self._places.setdefault((module.place.layer, part), module.name)
            if other != module.name:
                self._problems.add(
                    f"{_short(module.name)} and {_short(other)} are the same part of the model"
                )
                return False
        return True

    # --- tensors ---

    def _read(
        self,
        module: _Module,
        slot: Slot,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read, scale in float32, convert. Raises WeightError for NaN and infinity."""
        name = module.tensors[slot]
        tensor = self._source.read(name)
        if scale is not None:
            tensor = tensor.float().mul_(scale)
        made = tensor.to(dtype or self._dtype)
        if not _is_finite(made):
            raise WeightError(
                f"{_short(name)} has values that are NaN or infinite"
                + ("" if not _is_finite(tensor) else f" in {dtype or self._dtype}")
            )
        return made


def _whole_shape(place: ModulePlace) -> tuple[int, ...]:
    """The shape of the weight of an embedding or a head."""
    shape = place.shape
    if shape.kind == "embedding":
        return shape.inputs, shape.outputs[0]
    return sum(shape.outputs), shape.inputs


def _is_bank(place: ModulePlace) -> bool:
    return place.shape.kind == "experts" and place.expert is None


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite. A finite sum proves it; another sum may have overflown."""
    if torch.isfinite(tensor.sum(dtype=torch.float32)):
        return True
    return bool(torch.isfinite(tensor).all())


def _digest(deltas: Mapping[str, Mapping[int, Delta]]) -> str:
    made = hashlib.sha256()
    for layer in sorted(deltas):
        for part, delta in sorted(deltas[layer].items()):
            for name, tensor in tensors_of(delta):
                what = (layer, part, type(delta).__name__, name, tensor.dtype, *tensor.shape)
                made.update(repr(what).encode())
                made.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def _short(name: str) -> str:
    """A name for a message: one line, not long."""
    return repr(name) if len(name) <= MAX_NAME else f"{name[:MAX_NAME]!r}..."
