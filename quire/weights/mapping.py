"""Mapping of checkpoint tensors to parameters, as data. Reads no file.

`Weights` of a model holds how its names differ from the checkpoint's; `WeightShard`s of a layer
hold how tensors fill a parameter. `assign_tensors` matches both with the headers, strictly:

    every tensor is used once or is named in `ignore`; every parameter is filled exactly once;
    every shape agrees. Otherwise one WeightError lists all that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.config.model_identity import is_tower_tensor, wrapper_prefixes
from quire.errors import WeightError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MEDIA_PREFIX = "media_encoder."
"""Of the paths of the media encoder's modules in the model of a wrapper."""
MAX_LISTED = 12
"""Names listed per kind of problems; a wrong model class would list thousands."""

OTHER_NAMES = {
    "weight_scale_inv": "weight_scale",
    "activation_scale": "input_scale",
    "gamma": "weight",
    "beta": "bias",
    "original": "weight",
}
"""Other names of parameters: of scales of whole tensors, as transformers writes them; of norms, as
checkpoints that were converted from TensorFlow have them; of weights with adapters beside them."""


class InitSpec(NamedTuple):
    """Return the distribution of random values of a parameter."""

    mean: float
    std: float


RANDOM_BITS = InitSpec(0.0, float("inf"))
"""Every bit of a parameter is random: of words that hold several codes."""


@dataclass(frozen=True, slots=True)
class WeightShard:
    """One checkpoint tensor's place in a parameter: its [cut] fills rows [start, start + ...)."""

    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    ranges: tuple[range, ...]  # what this process keeps of it, per axis
    start: int = 0
    broadcastable: bool = False  # also in a shape with axes of one; or one number for all
    transposed: bool = False  # the checkpoint has the axes in the opposite order

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of the cut."""
        return tuple(len(axis) for axis in self.ranges)


def unsharded_layout(shape: Sequence[int]) -> tuple[WeightShard, ...]:
    """The layout of a parameter that is one checkpoint tensor, uncut."""
    return (WeightShard(tuple(shape), tuple(range(n) for n in shape)),)


def stored_shape(parts: Sequence[WeightShard]) -> tuple[int, ...]:
    """The shape of a parameter with this layout."""
    rows = sum(part.shard_shape[0] for part in parts)
    return (rows, *parts[0].shard_shape[1:])


class ParamOwner(Protocol):
    """A layer that owns parameters."""

    def param_names(self) -> tuple[str, ...]:
        """Names of the parameters a checkpoint must fill."""
        ...

    def layout(self, param: str) -> tuple[WeightShard, ...]: ...

    def local_part(self, param: str, part: int) -> int | None:
        """Return this rank's number of a part of a checkpoint's parameter; None: others have it."""
        ...

    def owner_of(self, param: str, part: int) -> tuple[str, int]:
        """Return the parameter, and the part of it, that a part of a checkpoint's parameter
        fills."""
        ...

    def stored_as(self, param: str, part: int) -> tuple[str, int]:
        """Return what a checkpoint calls a part: the inverse of local_part and owner_of."""
        ...

    def init_spec(self, param: str) -> InitSpec: ...

    def dtype(self, param: str) -> torch.dtype | None:
        """Return the stored dtype of a parameter. None: the model's."""
        ...

    def fused_shape(self, param: str) -> tuple[int, ...]:
        """The shape of one checkpoint tensor that is all parts of a parameter at once."""
        ...

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[Tensor]:
        """Such a tensor as views, one per part of the layout."""
        ...

    def set_param(self, param: str, value: object) -> None:
        """Replace a parameter's value."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """Differences between a checkpoint's names and tensors and the model's."""

    strip: tuple[str, ...] = ()  # prefixes; the first that a name has is cut off
    paths: Mapping[str, str] = field(default_factory=dict)  # runs of components: theirs -> ours,
    # in order and before `rename`: "attention.output.dense": "self_attn.out_proj"; "": none
    rename: Mapping[str, str] = field(default_factory=dict)  # components of a path: theirs -> ours;
    # "attn.c_proj": "out_proj" is about c_proj in attn only
    alias: Mapping[str, str] = field(default_factory=dict)  # whole names: theirs -> ours
    fuse: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ours <- theirs, in order. "cross.kv" is the layer kv of modules named cross, where other
    entries do not apply."""
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # one tensor per expert:
    # "gate_up_proj": ("gate_proj", "up_proj") takes bank.experts.7.up_proj.weight as part 15
    heads: tuple[str, ...] = ()  # one tensor per head: "norms" takes norms.3.weight as part 3
    transpose: tuple[str, ...] = ()  # layers with a weight stored [I, O]
    ignore: tuple[str, ...] = ()  # patterns of checkpoint names that carry nothing we need
    absent: tuple[str, ...] = ()  # prefixes of our paths that this model or its stage leaves out
    tie: Mapping[str, str] = field(default_factory=dict)  # layer <- layer, if tied
    tie_if_missing: bool = False  # a layer that the checkpoint has is not tied
    zero_bias: tuple[str, ...] = ()  # parts of layers with biases that have none in checkpoints

    wrapped: bool = False  # the checkpoint has towers beside this model

    media: Weights | None = None  # of the media encoder beside this model

    def in_wrapper(self, media: Weights | None = None) -> Weights:
        """Return the mapping for a multimodal checkpoint with this model as its text half.

        media: of the media encoder, if the model has one.
        """
        return replace(self, strip=wrapper_prefixes(self.strip), wrapped=True, media=media)

    def module_path(self, path: str) -> str:
        """Return the model's name of a module that the checkpoint calls `path`, fused layers
        aside."""
        prefix = next((p for p in self.strip if f"{path}.".startswith(p)), "")
        path = path[len(prefix) :]
        for theirs, ours in self.paths.items():
            path = _replace_run(path, theirs, ours)
        return _rename(path, self.rename)

    def target(self, name: str) -> ParamTarget:
        """Return the target of a checkpoint tensor, by its name alone."""
        if self.media is not None and is_tower_tensor(name):
            found = self.media.target(name)
            return found._replace(layer=f"{MEDIA_PREFIX}{found.layer}")
        path, _, param = self.alias.get(name, name).rpartition(".")
        path = self.module_path(path)
        parent, _, leaf = path.rpartition(".")
        bank, _, number = parent.rpartition(".")
        if number.isdecimal() and bank.endswith("experts"):
            for stacked, parts in self.experts.items():
                if leaf in parts:
                    part = int(number) * len(parts) + parts.index(leaf)
                    return ParamTarget(bank, _stacked_name(stacked, param), part, False)
        if leaf.isdecimal() and number in self.heads:
            return ParamTarget(bank, param, int(leaf), False)
        if parent.rpartition(".")[2] == "experts" and leaf in self.experts and param == "weight":
            return ParamTarget(parent, leaf, None, False)  # of all experts, as if it were a layer's
        turn = param == "weight" and leaf in self.transpose
        for fused, parts in self.fuse_in(parent).items():
            if leaf in parts:
                path = f"{parent}.{fused}" if parent else fused
                return ParamTarget(path, param, parts.index(leaf), turn)
        return ParamTarget(path, param, None, turn)

    def fuse_in(self, parent: str) -> Mapping[str, tuple[str, ...]]:
        """Return the fused layers of a module: name -> parts."""
        named: dict[str, dict[str, tuple[str, ...]]] = {}
        for fused, parts in self.fuse.items():
            owner, _, name = fused.rpartition(".")
            named.setdefault(owner, {})[name] = parts
        return named.get(parent.rpartition(".")[2]) or named.get("", {})

    def sources(self, layer: str) -> tuple[tuple[str, ...], ...]:
        """Per part of a layer, the names a checkpoint may give it."""
        if self.media is not None and layer.startswith(MEDIA_PREFIX):
            return self.media.sources(layer.removeprefix(MEDIA_PREFIX))
        return tuple(
            tuple(f"{prefix}{path}" for prefix in ("", *self.strip))
            for path in self.checkpoint_paths(layer)
        )

    def bank_sources(self, layer: str, matrix: str) -> tuple[tuple[str, ...], ...]:
        """Per projection of a matrix of a bank, the names that a checkpoint may give it.

        Those of the first expert count for all.
        """
        (banks,) = self.sources(layer)
        return tuple(
            tuple(name for bank in banks for name in (bank, f"{bank}.{leaf}", f"{bank}.0.{leaf}"))
            for leaf in self.experts.get(matrix, (matrix,))
        )

    def checkpoint_paths(self, layer: str) -> tuple[str, ...]:
        """Per part of a layer, what a checkpoint calls it after the prefix."""
        if self.media is not None and layer.startswith(MEDIA_PREFIX):
            return self.media.checkpoint_paths(layer.removeprefix(MEDIA_PREFIX))
        parent, _, leaf = layer.rpartition(".")
        theirs = {_beside(name, ours): _last(name) for name, ours in self.rename.items()}
        at = f"{parent}." if parent else ""
        parts = self.fuse_in(parent).get(leaf, (leaf,))
        found = [_rename(f"{at}{part}", theirs) for part in parts]
        for run, ours in reversed(list(self.paths.items())):
            found = [_replace_run(path, ours, run) for path in found] if ours else found
        return tuple(found)

    def converted_shapes(
        self, shapes: Iterable[tuple[str, Sequence[int]]]
    ) -> list[tuple[str, Sequence[int]]]:
        """Return (name, shape) of the tensors that the model is given: here those of the files,
        and zero biases."""
        found: list[tuple[str, Sequence[int]]] = []
        for name, shape in shapes:
            found.append((name, shape))
            if (bias := self._zero_bias_of(name)) is not None:
                found.append((bias, shape[:1]))
        return found

    def converted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the model is given. converted_shapes() comes first."""
        for name, tensor in tensors:
            yield name, tensor
            if (bias := self._zero_bias_of(name)) is not None:
                yield bias, tensor.new_zeros(tensor.shape[0])

    def _zero_bias_of(self, name: str) -> str | None:
        """Return the name of the bias that a weight lacks; None: it lacks none."""
        if self.media is not None and is_tower_tensor(name):
            return self.media._zero_bias_of(name)
        path, _, param = name.rpartition(".")
        return f"{path}.bias" if param == "weight" and _last(path) in self.zero_bias else None

    def ignores(self, name: str, layer: str) -> bool:
        """Whether a checkpoint tensor of `layer` carries nothing that this model needs."""
        absent = f"{layer}.".startswith(self.absent)
        if self.wrapped and is_tower_tensor(name):
            own = layer.removeprefix(MEDIA_PREFIX)
            return absent or self.media is None or self.media.ignores(name, own)
        return absent or any(fnmatchcase(name, pattern) for pattern in self.ignore)


class ParamTarget(NamedTuple):
    """A place in the model. part None: the whole parameter, all parts in one tensor."""

    layer: str
    param: str
    shard: int | None
    transpose: bool


@dataclass(slots=True)
class MappingErrors:
    """Tensors and parameters that do not fit, by kind."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)

    def raise_if_any(self) -> None:
        """Raise a WeightError that lists every kind of problems, if there is any."""
        kinds = [
            ("missing in the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("of the wrong shape", self.misshaped),
            ("given more than once", self.duplicated),
        ]
        lines = [_format_names(kind, names) for kind, names in kinds if names]
        if lines:
            raise WeightError("the checkpoint does not fit the model:\n" + "\n".join(lines))


def assign_tensors(
    holders: Mapping[str, ParamOwner],
    weights: Weights,
    shapes: Iterable[tuple[str, Sequence[int]]],
    *,
    tied: bool,
) -> dict[str, ParamTarget]:
    """Checkpoint name -> its place, for every tensor that is used.

    shapes: (name, shape) of every tensor in the checkpoint.
    tied: layers in `weights.tie` have no tensor of their own; copies in the checkpoint are skipped.
    """
    problems, targets = MappingErrors(), {}
    skipped = frozenset(weights.tie) if tied else frozenset()
    filled: set[tuple[str, str, int]] = set()
    for name, shape in shapes:
        target = weights.target(name)
        holder = holders.get(target.layer)
        if holder is not None:
            local = local_target(holder, target)
            if local is None:
                continue
            target = _find_param(holder, local)
        if target.layer in skipped or weights.ignores(name, target.layer):
            continue
        if holder is None or target.param not in holder.param_names():
            problems.unexpected.append(name)
            continue
        layout = holder.layout(target.param)
        if target.shard is not None and target.shard >= len(layout):
            problems.unexpected.append(name)  # an expert the config does not count
            continue
        which = range(len(layout)) if target.shard is None else (target.shard,)
        slots = {(target.layer, target.param, part) for part in which}
        wanted = checkpoint_shape(holder, target)
        if not _shape_matches(tuple(shape), wanted, layout[0].broadcastable):
            problems.misshaped.append(f"{name} is {list(shape)}, the model has {list(wanted)}")
        elif name in targets or filled & slots:
            problems.duplicated.append(name)
        targets[name] = target
        filled |= slots
    slots_of = _required_slots(holders, weights, skipped)
    problems.missing = list(dict.fromkeys(name for name, slot in slots_of if slot not in filled))
    problems.raise_if_any()
    return targets


def local_target(holder: ParamOwner, target: ParamTarget) -> ParamTarget | None:
    """Return the target with this rank's number of the part; None: another rank has it."""
    if target.shard is None:
        return target
    part = holder.local_part(target.param, target.shard)
    return None if part is None else target._replace(shard=part)


def _find_param(holder: ParamOwner, target: ParamTarget) -> ParamTarget:
    """The target with the layer's own name of the parameter, if it has that parameter."""
    for name in (target.param, OTHER_NAMES.get(target.param, target.param)):
        param, part = name, target.shard
        if part is not None:
            param, part = holder.owner_of(name, part)
        if param in holder.param_names():
            return target._replace(param=param, shard=part)
    return target


def checkpoint_shape(holder: ParamOwner, target: ParamTarget) -> tuple[int, ...]:
    """The shape the checkpoint's tensor must have to go there."""
    layout = holder.layout(target.param)
    if target.shard is not None:
        shape = layout[target.shard].shape
    else:
        shape = holder.fused_shape(target.param)
    return shape[::-1] if target.transpose or layout[0].transposed else shape


def _shape_matches(shape: tuple[int, ...], wanted: tuple[int, ...], loose: bool) -> bool:
    """Whether a tensor of this shape fills the wanted one."""
    return shape == wanted or (loose and _without_ones(shape) in ((), _without_ones(wanted)))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _required_slots(
    holders: Mapping[str, ParamOwner], weights: Weights, skipped: frozenset[str]
) -> Iterable[tuple[str, tuple[str, str, int]]]:
    """Everything that must be filled, under the name a checkpoint would give it."""
    for layer, holder in holders.items():
        if layer in skipped:
            continue
        paths = weights.checkpoint_paths(layer)
        for param in holder.param_names():
            for part in range(len(holder.layout(param))):
                slot = (layer, param, part)
                theirs, number = holder.stored_as(param, part)
                if stacked := _expert_name(weights, theirs, number):
                    yield f"{paths[0]}.{stacked}", slot
                else:
                    yield f"{paths[number if len(paths) > 1 else 0]}.{theirs}", slot


def _rename(path: str, names: Mapping[str, str]) -> str:
    """The path with each component that has another name under that name."""
    if not names:
        return path
    parts = path.split(".")
    pairs = (f"{parent}.{part}" for parent, part in zip(["", *parts], parts, strict=False))
    return ".".join(
        names.get(pair) or names.get(part, part) for pair, part in zip(pairs, parts, strict=True)
    )


def _replace_run(path: str, old: str, new: str) -> str:
    """The path with a run of components replaced by another, or by none."""
    return f".{path}.".replace(f".{old}.", f".{new}." if new else ".").strip(".")


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _beside(path: str, name: str) -> str:
    """The path with its last component replaced."""
    parent, dot, _ = path.rpartition(".")
    return f"{parent}{dot}{name}"


def _stacked_name(name: str, param: str) -> str:
    """The parameter of a bank that one expert's tensor is part of."""
    return name if param == "weight" else f"{name}_{param}"


def _expert_name(weights: Weights, param: str, part: int) -> str | None:
    """Return a checkpoint's name of a part of a bank's parameter; None if it is not a bank's."""
    for stacked, names in weights.experts.items():
        if param == stacked or param.startswith(f"{stacked}_"):
            tail = param[len(stacked) + 1 :] or "weight"
            return f"{part // len(names)}.{names[part % len(names)]}.{tail}"
    return None


def _format_names(kind: str, names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"  {len(names)} {kind}: {', '.join(names[:MAX_LISTED])}{more}"
