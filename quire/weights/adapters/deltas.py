"""Plans deltas of the tensors of modules. All shapes are checked before a tensor is read.

    linear, head   A [r, I], B [O, r]; all parts of a fused layer may share one A
    embedding      A [r, V], B [E, r]
    one expert     as linear; the experts of a bank become one delta
    bank           A [X * r, I] expert by expert, B [O, r * X] with the experts innermost
    whole weights and token rows, in place of the model's

Files of peft before 0.19 have A and B of a bank in each other's place, unless the model stores it
[X, I, O]: the delta is then that of the transposed weight. So has a parameter [I, O] of one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.errors import WeightError
from quire.weights.adapters.adapter import (
    AdapterLimits,
    EmbeddingDelta,
    ExpertsDelta,
    LinearDelta,
    TokenRows,
    WholeWeight,
)
from quire.weights.adapters.fill import (
    SERIAL,
    DeltaPlan,
    DeltaSpec,
    Move,
    Parts,
    is_finite,
    short,
    transposed,
)
from quire.weights.adapters.folder import CONFIG_FILE
from quire.weights.adapters.lora_config import LoraConfig
from quire.weights.adapters.modules import AdapterModules, ModulePlace
from quire.weights.adapters.names import Slot
from quire.weights.adapters.packed import TensorSpec
from quire.weights.adapters.tensor_files import AdapterTensors
from quire.weights.mapping import MAX_LISTED

_FIELDS: dict[Slot, torch.dtype] = {"bias": torch.float32, "magnitude": torch.float32}
"""Slots of another dtype than the adapter's."""
_LAYERS = frozenset(("linear", "head"))


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
    """Checks modules, and plans how their tensors are read: scaled in float32, converted to one
    dtype."""

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
        self._filled: dict[tuple[str, int, int | None], str] = {}  # layer, part, expert -> module
        self._named: set[str] = set()  # layers that the file has tensors of
        self.rank = self.nbytes = 0  # of all tensors that are planned

    def plan(self, found: Iterable[AdapterModule]) -> list[DeltaPlan]:
        """Return how the deltas of each layer are made. Raises WeightError."""
        plans: list[DeltaPlan] = []
        found = tuple(found)
        self._named = {module.place.layer for module in found}
        experts: dict[tuple[str, int], list[AdapterModule]] = {}
        for module in found:
            place = module.place
            if place.expert is not None and place.part is not None:
                experts.setdefault((place.layer, place.part), []).append(module)
            else:
                plans += self._plan(module)
        plans += [self._plan_experts(members) for members in experts.values()]
        self._problems.raise_if_any()
        self.nbytes = sum(
            spec.nbytes
            for plan in plans
            for spec in {id(one): one for one in plan.specs()}.values()
        )
        if self.nbytes > self._limits.max_bytes:
            raise WeightError(
                f"the adapter takes {self.nbytes} bytes; the maximum is {self._limits.max_bytes}"
            )
        return plans

    def _plan(self, module: AdapterModule) -> list[DeltaPlan]:
        """Check the shapes of a module's tensors. Return how they are read."""
        kind, slots, layer = module.place.shape.kind, module.tensors.keys(), module.place.layer
        if kind in _LAYERS and slots <= {"A", "B", "bias", "magnitude"}:
            return [self._plan_linear(module)]
        if kind == "embedding" and slots <= {"embedding_A", "embedding_B", "magnitude"}:
            return [self._plan_embedding(module)]
        if kind == "experts" and slots <= {"A", "B"}:
            return self._plan_bank(module)
        if kind in ("embedding", "head"):
            if slots <= {"whole", "whole_bias"}:
                return [self._plan_whole(module)]
            if slots == {"tokens"}:
                tied = self._modules.tied.items()
                ties = [ours for ours, of in tied if of == layer and ours not in self._named]
                self._claim(module, [(one, 0, None) for one in (layer, *ties)])
                return self._plan_tokens(module, (layer, *ties))
        names = ", ".join(short(name) for name in module.tensors.values())
        why = "modules_to_save may name the embedding and the output head" if kind in _LAYERS else (
            "train another module"
        )  # fmt: skip
        self._problems.add(f"{names}: quire cannot add this to a layer of kind {kind}; {why}")
        return []

    def _plan_linear(self, module: AdapterModule) -> DeltaPlan:
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
        scale, a = self._config.scale_of(key), self._spec(rank, inputs)
        specs = {}
        for part, size in zip(parts, sizes, strict=True):
            tensors = {"a": a, "b": self._spec(rank, size)}
            for slot in ("bias", "magnitude"):
                if slot in module.tensors:
                    tensors[slot] = TensorSpec((size,), torch.float32)
            specs[part] = DeltaSpec(LinearDelta, tensors)
        if len(parts) > 1:
            made = partial(
                self._split_linear, module, dict(zip(parts, sizes, strict=True)), swapped
            )
            return DeltaPlan(place.layer, specs, make=made)
        first = Move("B", parts[0], "a", None, turned=True) if swapped else Move("A", parts[0], "a")
        second = (
            Move("A", parts[0], "b", scale)
            if swapped
            else Move("B", parts[0], "b", scale, turned=True)
        )
        more = Move("bias", parts[0], "bias", scale), Move("magnitude", parts[0], "magnitude")
        return DeltaPlan(place.layer, specs, _moves(module, first, second, *more))

    def _split_linear(
        self, module: AdapterModule, sizes: Mapping[int, int], swapped: bool
    ) -> Parts:
        """Read a module that is several parts of a layer. sizes: outputs of each."""
        scale = self._config.scale_of(self._pattern_key(module))
        if swapped:
            a, b = transposed(self._read(module, "B")), self._read(module, "A", scale)
        else:
            a, b = self._read(module, "A"), transposed(self._read(module, "B", scale))
        bias = self._read_if_there(module, "bias", scale)
        magnitude = self._read_if_there(module, "magnitude")
        if magnitude is not None:
            magnitude = magnitude.view(-1)
        rows = [_split(module, one, [*sizes.values()]) for one in (b, bias, magnitude)]
        return {part: LinearDelta(a, *cut) for part, *cut in zip(sizes, *rows, strict=True)}

    def _plan_embedding(self, module: AdapterModule) -> DeltaPlan:
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
        tensors = {"a": self._spec(rank, vocab), "b": self._spec(rank, size)}
        if "magnitude" in module.tensors:
            tensors["magnitude"] = TensorSpec((size,), torch.float32)
        scale = self._config.scale_of(module.name) * shape.scale
        moves = _moves(
            module,
            Move("embedding_A", 0, "a"),
            Move("embedding_B", 0, "b", scale, turned=True),
            Move("magnitude", 0, "magnitude", shape.scale),
        )
        return DeltaPlan(module.place.layer, {0: DeltaSpec(EmbeddingDelta, tensors)}, moves)

    def _plan_whole(self, module: AdapterModule) -> DeltaPlan:
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
        tensors = {"weight": self._spec(*shape)}
        if "whole_bias" in module.tensors:
            tensors["bias"] = self._spec(*shape[:1])
        moves = _moves(module, Move("whole", 0, "weight"), Move("whole_bias", 0, "bias"))
        return DeltaPlan(place.layer, {0: DeltaSpec(WholeWeight, tensors)}, moves)

    def _plan_tokens(self, module: AdapterModule, layers: Sequence[str]) -> list[DeltaPlan]:
        """Of a layer, and of those that share its weight."""
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

        def make() -> Parts:
            indices, order = torch.tensor(ids, dtype=torch.int32).sort()
            places = torch.full((rows,), -1, dtype=torch.int32)
            places[indices.long()] = torch.arange(len(ids), dtype=torch.int32)
            return {0: TokenRows(indices, self._read(module, "tokens")[order], places)}

        def spec() -> DeltaSpec:
            tensors = {
                "indices": TensorSpec((len(ids),), torch.int32),
                "rows": self._spec(len(ids), size),
                "places": TensorSpec((rows,), torch.int32),
            }
            return DeltaSpec(TokenRows, tensors)

        return [DeltaPlan(layer, {0: spec()}, make=make) for layer in layers]

    # --- experts ---

    def _plan_experts(self, members: Sequence[AdapterModule]) -> DeltaPlan:
        """Of one projection of some experts of a bank."""
        place = members[0].place
        shape, part = place.shape, place.part
        assert part is not None
        outputs, inputs = shape.outputs[part], shape.inputs_of(part)
        ranks, moves = [], []
        for module in members:
            ranks.append(self._check_rank(module, "A", "B", module.name))
            self._check_shapes(module, {"A": (ranks[-1], inputs), "B": (outputs, ranks[-1])})
            expert = module.place.expert
            self._claim(module, [(place.layer, part, expert)])
            scale = self._config.scale_of(module.name)
            moves += _moves(
                module,
                Move("A", part, "a", expert=expert),
                Move("B", part, "b", scale, turned=True, expert=expert),
            )
        spec = DeltaSpec(ExpertsDelta, {
            "a": self._spec(shape.experts, max(ranks), inputs),
            "b": self._spec(shape.experts, max(ranks), outputs),
        })  # fmt: skip
        cleared = len(members) < shape.experts or min(ranks) < max(ranks)
        return DeltaPlan(place.layer, {part: spec}, moves, cleared=cleared)

    def _plan_bank(self, module: AdapterModule) -> list[DeltaPlan]:
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
            return []
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
        own = self._spec(shape.experts, rank, shape.inputs_of(parts[0]))
        specs = {
            part: DeltaSpec(
                ExpertsDelta, {"a": own, "b": self._spec(shape.experts, rank, shape.outputs[part])}
            )
            for part in parts
        }

        def make() -> Parts:
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

        return [DeltaPlan(place.layer, specs, make=make)]

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

    def _spec(self, *shape: int) -> TensorSpec:
        return TensorSpec(shape, self._dtype)

    # --- tensors ---

    def _read(
        self,
        module: AdapterModule,
        slot: Slot,
        scale: float | None = None,
    ) -> Tensor:
        """Read, scale in float32, convert. Raises WeightError for NaN and infinity."""
        name = module.tensors[slot]
        tensor, dtype = self._source.read(name), _FIELDS.get(slot, self._dtype)
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
        self, module: AdapterModule, slot: Slot, scale: float | None = None
    ) -> Tensor | None:
        return self._read(module, slot, scale) if slot in module.tensors else None


def _moves(module: AdapterModule, *wanted: Move) -> list[Move]:
    """Return moves of the tensors that a module has. wanted: each with a slot for a name."""
    slots = {str(slot): name for slot, name in module.tensors.items()}
    return [one._replace(name=slots[one.name]) for one in wanted if one.name in slots]


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
