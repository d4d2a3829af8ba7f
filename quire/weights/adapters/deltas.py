"""Makes deltas of the tensors of modules. All shapes are checked before a tensor is read.

    linear, head   A [r, I], B [O, r]; all parts of a fused layer may share one A
    embedding      A [r, V], B [E, r]
    one expert     as linear; the experts of a bank become one delta
    bank           A [X * r, I] expert by expert, B [O, r * X] with the experts innermost
    whole weights and token rows, in place of the model's

Files of peft before 0.19 have A and B of a bank in each other's place, unless the model stores it
[X, I, O]: the delta is then that of the transposed weight. So has a parameter [I, O] of one layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import WeightError
from quire.weights.adapters.adapter import (
    AdapterLimits,
    Delta,
    EmbeddingDelta,
    ExpertsDelta,
    LinearDelta,
    TokenRows,
    WholeWeight,
    tensors_of,
)
from quire.weights.adapters.folder import CONFIG_FILE
from quire.weights.adapters.lora_config import LoraConfig
from quire.weights.adapters.modules import AdapterModules, ModulePlace
from quire.weights.adapters.names import Slot
from quire.weights.adapters.tensor_files import AdapterTensors
from quire.weights.mapping import MAX_LISTED

MAX_NAME = 160
"""Characters of a stranger's name in a message."""

READERS = 8
"""Threads that read, convert and hash: most of that is done without the interpreter's lock."""

SERIAL = 1 << 14
"""Numbers that torch changes in the thread that calls it. Of more it gives each of these threads a
team of its own, as large as the machine, whose members wait for one another."""

_LAYERS = frozenset(("linear", "head"))
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Parts = dict[int, Delta]


@dataclass(slots=True)
class AdapterModule:
    """The tensors of one module, by slot, under the names that the file has."""

    name: str  # of the module, as the file has it
    place: ModulePlace
    tensors: dict[Slot, str] = field(default_factory=dict)


@dataclass(slots=True)
class AdapterProblems:
    """All that is wrong with an adapter, for one error."""

    found: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        self.found.append(problem)
        if len(self.found) > MAX_LISTED:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raise a WeightError that lists the problems, if there is any."""
        if self.found:
            more = "\n  and more" if len(self.found) > MAX_LISTED else ""
            lines = "\n  ".join(self.found[:MAX_LISTED])
            raise WeightError(f"the adapter does not fit the model:\n  {lines}{more}")


class DeltaBuilder:
    """Checks modules, then reads their tensors: scaled in float32, converted to one dtype."""

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
        self._problems = AdapterProblems()
        self._nbytes = 0  # of what the tensors will be converted to
        self._filled: dict[tuple[str, int, int | None], str] = {}  # layer, part, expert -> module
        self._digests: dict[tuple[str, int], bytes] = {}  # layer, part -> of the delta
        self._named: set[str] = set()  # layers that the file has tensors of
        self.rank = 0

    def build(self, found: Iterable[AdapterModule]) -> dict[str, Parts]:
        """Return the deltas of each layer. Raises WeightError."""
        plans: list[tuple[str, Callable[[], Parts]]] = []
        found = tuple(found)
        self._named = {module.place.layer for module in found}
        experts: dict[tuple[str, int], list[AdapterModule]] = {}
        for module in found:
            place = module.place
            if place.expert is not None and place.part is not None:
                experts.setdefault((place.layer, place.part), []).append(module)
            else:
                plans += [(layer, plan) for layer, plan in self._plan(module)]
        for (layer, _), members in experts.items():
            plans.append((layer, self._plan_experts(members)))
        self._problems.raise_if_any()
        if self._nbytes > self._limits.max_bytes:
            raise WeightError(
                f"the adapter takes {self._nbytes} bytes; the maximum is {self._limits.max_bytes}"
            )
        deltas: dict[str, Parts] = {}
        with ThreadPoolExecutor(READERS, "read-adapter") as pool:
            for layer, parts in pool.map(self._read_parts, plans):
                deltas.setdefault(layer, {}).update(parts)
        return deltas

    def _read_parts(self, plan: tuple[str, Callable[[], Parts]]) -> tuple[str, Parts]:
        """In a thread. What was read is hashed while it is in the processor's cache."""
        layer, read = plan
        parts = read()
        for part, delta in parts.items():
            self._digests[layer, part] = _digest_of(layer, part, delta)
        return layer, parts

    def digest(self) -> str:
        """The hash of the hashes of all that was built, each with its place; hex."""
        ordered = [self._digests[place] for place in sorted(self._digests)]
        return hashlib.sha256(b"".join(ordered)).hexdigest()

    def _plan(self, module: AdapterModule) -> list[tuple[str, Callable[[], Parts]]]:
        """Check the shapes of a module's tensors. Return what reads them, by layer."""
        kind, slots, layer = module.place.shape.kind, module.tensors.keys(), module.place.layer
        if kind in _LAYERS and slots <= {"A", "B", "bias", "magnitude"}:
            return [(layer, self._plan_linear(module))]
        if kind == "embedding" and slots <= {"embedding_A", "embedding_B", "magnitude"}:
            return [(layer, self._plan_embedding(module))]
        if kind == "experts" and slots <= {"A", "B"}:
            return [(layer, self._plan_bank(module))]
        if kind in ("embedding", "head"):
            if slots <= {"whole", "whole_bias"}:
                return [(layer, self._plan_whole(module))]
            if slots == {"tokens"}:
                plan = self._plan_tokens(module)
                tied = self._modules.tied.items()
                ties = [ours for ours, of in tied if of == layer and ours not in self._named]
                self._claim(module, [(one, 0, None) for one in ties])
                return [(one, plan) for one in (layer, *ties)]
        names = ", ".join(short(name) for name in module.tensors.values())
        why = "modules_to_save may name the embedding and the output head" if kind in _LAYERS else (
            "train another module"
        )  # fmt: skip
        self._problems.add(f"{names}: quire cannot add this to a layer of kind {kind}; {why}")
        return []

    def _plan_linear(self, module: AdapterModule) -> Callable[[], Parts]:
        place, shape = module.place, module.place.shape
        parts = list(range(len(shape.outputs)) if place.part is None else (place.part,))
        sizes = [shape.outputs[part] for part in parts]
        outputs, inputs, key = sum(sizes), shape.inputs, self._pattern_key(module)
        rank = self._check_rank(module, "A", "B", key)
        swapped = place.transposed and key != module.name
        ends = (outputs, inputs) if swapped else (inputs, outputs)
        wanted: dict[Slot, tuple[int, ...]] = {"A": (rank, ends[0]), "B": (ends[1], rank)}
        self._check_shapes(module, {**wanted, "bias": (outputs,), "magnitude": (outputs,)})
        self._check_variant(module)
        self._claim(module, [(place.layer, part, None) for part in parts])
        self._count(rank * (inputs * len(parts) + outputs))

        def read() -> Parts:
            scale = self._config.scale_of(key)
            if swapped:
                a, b = transposed(self._read(module, "B")), self._read(module, "A", scale)
            else:
                a, b = self._read(module, "A"), transposed(self._read(module, "B", scale))
            bias = self._read_if_there(module, "bias", scale, torch.float32)
            magnitude = self._read_magnitude(module)
            rows = [_split(module, one, sizes) for one in (b, bias, magnitude)]
            return {part: LinearDelta(a, *cut) for part, *cut in zip(parts, *rows, strict=True)}

        return read

    def _plan_embedding(self, module: AdapterModule) -> Callable[[], Parts]:
        shape = module.place.shape
        rank = self._check_rank(module, "embedding_A", "embedding_B", module.name)
        vocab, size = shape.inputs, shape.outputs[0]
        wanted: dict[Slot, tuple[int, ...]] = {
            "embedding_A": (rank, vocab),
            "embedding_B": (size, rank),
            "magnitude": (size,),
        }
        self._check_shapes(module, wanted)
        self._check_variant(module)
        self._claim(module, [(module.place.layer, 0, None)])
        self._count(rank * (vocab + size))

        def read() -> Parts:
            a = self._read(module, "embedding_A")
            b = self._read(module, "embedding_B", self._config.scale_of(module.name) * shape.scale)
            magnitude = self._read_magnitude(module)
            if magnitude is not None:
                magnitude = magnitude * shape.scale
            return {0: EmbeddingDelta(a, transposed(b), magnitude)}

        return read

    def _plan_whole(self, module: AdapterModule) -> Callable[[], Parts]:
        place = module.place
        shape = whole_shape(place)
        wanted: dict[Slot, tuple[int, ...]] = {"whole": shape}
        if place.shape.has_bias:
            wanted["whole_bias"] = shape[:1]
        for slot in wanted.keys() ^ module.tensors.keys():
            lack = "has no" if slot in wanted else "has a"
            self._problems.add(
                f"{short(module.name)} {lack} {'bias' if slot == 'whole_bias' else 'weight'}, "
                "unlike the model's"
            )
        self._check_shapes(module, {"whole_bias": shape[:1], **wanted})
        self._claim(module, [(place.layer, 0, None)])
        self._count(shape[0] * (shape[1] + 1))
        return lambda: {
            0: WholeWeight(
                self._read(module, "whole"), self._read_if_there(module, "whole_bias")
            )
        }  # fmt: skip

    def _plan_tokens(self, module: AdapterModule) -> Callable[[], Parts]:
        rows, size = whole_shape(module.place)
        ids = self._config.tokens_of(module.name)
        name = short(module.tensors["tokens"])
        if ids is None:
            self._problems.add(
                f"{name}: trainable_token_indices of {CONFIG_FILE} has no indices for it"
            )
            ids = ()
        elif ids and max(ids) >= rows:
            self._problems.add(
                f"{name} replaces token {max(ids)}; the model has {rows} rows: serve the model "
                "whose vocabulary was extended"
            )
        self._check_shapes(module, {"tokens": (len(ids), size)})
        self._claim(module, [(module.place.layer, 0, None)])
        self._count(len(ids) * size)

        def read() -> Parts:
            indices, order = torch.tensor(ids, dtype=torch.int32).sort()
            places = torch.full((rows,), -1, dtype=torch.int32)
            places[indices.long()] = torch.arange(len(ids), dtype=torch.int32)
            return {0: TokenRows(indices, self._read(module, "tokens")[order], places)}

        return read

    # --- experts ---

    def _plan_experts(self, members: Sequence[AdapterModule]) -> Callable[[], Parts]:
        """Of one projection of some experts of a bank."""
        place = members[0].place
        shape, part = place.shape, place.part
        assert part is not None
        outputs, inputs = shape.outputs[part], shape.inputs_of(part)
        largest = 0
        for module in members:
            rank = self._check_rank(module, "A", "B", module.name)
            self._check_shapes(module, {"A": (rank, inputs), "B": (outputs, rank)})
            self._claim(module, [(place.layer, part, module.place.expert)])
            largest = max(largest, rank)
        self._count(shape.experts * largest * (inputs + outputs))

        def read() -> Parts:
            a = torch.zeros(shape.experts, largest, inputs, dtype=self._dtype)
            b = torch.zeros(shape.experts, largest, outputs, dtype=self._dtype)
            for module in members:
                at, one = module.place.expert, self._read(module, "A")
                a[at, : len(one)] = one
                b[at, : len(one)] = self._read(module, "B", self._config.scale_of(module.name)).t()
            return {part: ExpertsDelta(a, b)}  # fmt: skip

        return read

    def _plan_bank(self, module: AdapterModule) -> Callable[[], Parts]:
        """Of a parameter of all experts: gate and up, or down. Its shape shows which."""
        place, shape = module.place, module.place.shape
        size, width = shape.inputs, shape.outputs[0]
        a, b = (self._shape_of(module, slot) for slot in ("A", "B"))
        matrices = {(size, 2 * width): "gate_up_proj", (width, size): "down_proj"}
        ends = (a[1], b[0]) if len(a) == len(b) == 2 else (0, 0)
        plain, turned = matrices.get(ends), matrices.get(ends[::-1])
        if plain is None and turned is None:
            names = " and ".join(
                f"{short(name)} is {list(self._source.headers[name].shape)}"
                for name in module.tensors.values()
            )
            self._problems.add(
                f"{names}; A and B of the model's experts have {size} and {2 * width}, or {width} "
                f"and {size}"
            )
            return dict
        matrix, swapped = plain or turned, plain is None
        if plain is not None and turned is not None and not shape.turned:  # it is square
            swapped = self._has_old_banks(module)
        parts = (2,) if matrix == "down_proj" else (0, 1)
        key = f"{module.name.removesuffix(f'.{matrix}')}.{matrix}"
        rank = self._check_rank(module, "A", "B", key, experts=shape.experts)
        if self._config.dora or self._config.lora_bias:
            what = "use_dora" if self._config.dora else "lora_bias"
            self._problems.add(f"{short(module.name)}: {what} is not served for banks of experts")
        self._claim(module, [(place.layer, part, None) for part in parts])
        self._count(shape.experts * rank * (len(parts) * shape.inputs_of(parts[0]) + b[0]))

        def read() -> Parts:
            scale = self._config.scale_of(key)
            first = self._read(module, "A", scale if swapped else None)
            second = self._read(module, "B", None if swapped else scale)
            first = first.view(-1, rank, a[1]).expand(shape.experts, -1, -1)  # [X, r, I]
            second = second.view(b[0], rank, -1).permute(2, 1, 0).expand(shape.experts, -1, -1)
            if swapped:
                first, second = second, first
            own = first.contiguous()
            if len(parts) == 1:
                return {2: ExpertsDelta(own, second.contiguous())}
            halves = (
                (second[..., 0::2], second[..., 1::2])
                if shape.interleaved
                else second.chunk(2, dim=-1)
            )  # fmt: skip
            return {part: ExpertsDelta(own, halves[part].contiguous()) for part in parts}

        return read

    def _has_old_banks(self, module: AdapterModule) -> bool:
        """Whether A and B of a square matrix are in each other's place."""
        if self._config.peft is None:
            self._problems.add(
                f"{short(module.name)} has square matrices of experts, and {CONFIG_FILE} has no "
                "peft_version, which decides what A and B are: write it"
            )
        return self._config.peft is not None and self._config.peft < (0, 19)

    # --- checks ---

    def _pattern_key(self, module: AdapterModule) -> str:
        """Return the name that patterns of the config match: with the parameter's, if one was
        trained as a parameter."""
        key = f"{module.name}.weight"
        ends = self._config.parameters
        return key if any(f".{key}".endswith(f".{one}") for one in ends) else module.name

    def _shape_of(self, module: AdapterModule, slot: Slot) -> tuple[int, ...]:
        """() if there is no such tensor."""
        name = module.tensors.get(slot)
        return () if name is None else self._source.headers[name].shape

    def _check_rank(
        self, module: AdapterModule, a: Slot, b: Slot, key: str, experts: int = 1
    ) -> int:
        """Return the rank that the config states. The tensors must have it, times the experts;
        one of a bank may be the same for all experts."""
        rank = self._config.rank_of(key)
        if rank > self._limits.max_rank:
            self._problems.add(
                f"{short(module.name)} has rank {rank}; the maximum is {self._limits.max_rank} "
                "(max_lora_rank)"
            )
        allowed = {rank, rank * experts}
        for slot, axis in ((a, 0), (b, 1)):
            shape = self._shape_of(module, slot)
            if slot not in module.tensors:
                self._problems.add(f"{short(module.name)} has no lora_{slot}")
            elif len(shape) == 2 and shape[axis] not in allowed:
                self._problems.add(
                    f"{short(module.tensors[slot])} is {list(shape)}: rank {shape[axis]}; by r and "
                    f"rank_pattern of {CONFIG_FILE} it has {max(allowed)}"
                )
        self.rank = max(self.rank, rank)
        return rank

    def _check_shapes(self, module: AdapterModule, wanted: Mapping[Slot, tuple[int, ...]]) -> None:
        for slot, name in module.tensors.items():
            shape = self._source.headers[name].shape
            loose = slot == "magnitude" and shape == (1, *wanted[slot])  # of older files
            if shape != wanted[slot] and not loose:
                self._problems.add(
                    f"{short(name)} is {list(shape)}, the model has {list(wanted[slot])}"
                )

    def _check_variant(self, module: AdapterModule) -> None:
        """The config and the tensors must agree on magnitudes and biases."""
        slots: tuple[tuple[Slot, bool, str], ...] = (
            ("magnitude", self._config.dora, "use_dora"),
            ("bias", self._config.lora_bias, "lora_bias"),
        )
        for slot, on, key in slots:
            if on != (slot in module.tensors):
                lack = "has no" if on else "has a"
                self._problems.add(
                    f"{short(module.name)} {lack} {slot} of the adapter, but {key} of "
                    f"{CONFIG_FILE} is {str(on).lower()}"
                )

    def _claim(self, module: AdapterModule, places: Iterable[tuple[str, int, int | None]]) -> None:
        """Note which module fills a place; no two may fill one."""
        for layer, part, expert in places:
            for key in {(layer, part, expert), (layer, part, None)}:
                other = self._filled.get(key, module.name)
                if other != module.name:
                    self._problems.add(
                        f"{short(module.name)} and {short(other)} are the same part of the model"
                    )
                    return
            self._filled[layer, part, expert] = module.name

    def _count(self, numbers: int) -> None:
        self._nbytes += numbers * self._dtype.itemsize

    # --- tensors ---

    def _read(
        self,
        module: AdapterModule,
        slot: Slot,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read, scale in float32, convert. Raises WeightError for NaN and infinity."""
        name = module.tensors[slot]
        tensor, dtype = self._source.read(name), dtype or self._dtype
        if scale is not None and scale != 1:
            tensor = tensor if tensor.dtype == dtype else tensor.float()
            for few in tensor.view(-1).split(SERIAL):
                few.mul_(scale)  # in float32 whatever the dtype is, rounded once
        made = tensor.to(dtype)
        if not is_finite(made):
            where = f" in {made.dtype}" if is_finite(tensor) else ""
            raise WeightError(f"{short(name)} has values that are NaN or infinite{where}")
        return made

    def _read_if_there(
        self,
        module: AdapterModule,
        slot: Slot,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        return self._read(module, slot, scale, dtype) if slot in module.tensors else None

    def _read_magnitude(self, module: AdapterModule) -> Tensor | None:
        if "magnitude" not in module.tensors:
            return None
        return self._read(module, "magnitude", dtype=torch.float32).view(-1)


def _split(module: AdapterModule, tensor: Tensor | None, sizes: list[int]) -> list[Any]:
    """Return the outputs of each part [.., O], in the model's order; None for each of None."""
    if tensor is None:
        return [None] * len(sizes)
    order = module.place.shape.order
    found = tensor if order is None or len(sizes) == 1 else tensor[..., order]
    return [one.contiguous() for one in found.split(sizes, dim=-1)]


def whole_shape(place: ModulePlace) -> tuple[int, int]:
    """The shape of the weight of an embedding or a head."""
    shape = place.shape
    if shape.kind == "embedding":
        return shape.inputs, shape.outputs[0]
    return sum(shape.outputs), shape.inputs


def short(name: str) -> str:
    """A stranger's name for a message: one line, not long."""
    return repr(name) if len(name) <= MAX_NAME else f"{name[:MAX_NAME]!r}..."


def transposed(matrix: Tensor) -> Tensor:
    """A transposed copy. Numpy takes a third of torch's time for narrow matrices."""
    words = matrix.view(_WORDS[matrix.element_size()]).numpy()
    return torch.from_numpy(words.T.copy()).view(matrix.dtype)


def _digest_of(layer: str, part: int, delta: Delta) -> bytes:
    made = hashlib.sha256()
    for name, tensor in tensors_of(delta):
        what = (layer, part, type(delta).__name__, name, tensor.dtype, *tensor.shape)
        made.update(repr(what).encode())
        made.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return made.digest()


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite: numbers of the same bits as integers, without the sign, are
    then below infinity. NaN is above."""
    if not tensor.numel():
        return True
    info = torch.finfo(tensor.dtype)
    most = torch.tensor(info.max, dtype=tensor.dtype).view(_WORDS[tensor.element_size()]).item()
    words = tensor.contiguous().view(_WORDS[tensor.element_size()]).numpy()
    return bool((words & np.iinfo(words.dtype).max).max() <= most)
