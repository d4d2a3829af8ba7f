"""Names of a checkpoint's tensors, and their conversion to the form that the skeleton has.

transformers has a table of names that differ from its modules', and of tensors that are stacked or
cut on loading; checkpoints of the hub and those that it saved itself differ. Tensors are renamed
and converted on the way from the files, so the strict loader sees the skeleton's names only.
Tensors of a media encoder beside the skeleton keep theirs, behind a prefix.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quire.config.model_identity import LANGUAGE_PREFIXES, is_tower_tensor
from quire.errors import WeightError
from quire.weights.mapping import MEDIA_PREFIX, ParamTarget, Weights

NOT_WEIGHTS = (
    r"rotary_emb\.inv_freq$",
    r"\.attn\.(masked_)?bias$",
    r"\.attention\.(masked_)?bias$",
)
"""Buffers that older versions stored: they are computed."""
WRAPPED = sorted(LANGUAGE_PREFIXES, key=len, reverse=True)


@dataclass(frozen=True, slots=True)
class SkeletonWeights(Weights):
    """Names are those of the skeleton: the path of a module there -> its owner here."""

    owners: Mapping[str, ModuleTarget] = field(default_factory=dict)
    conversion: Conversion | None = None

    def in_wrapper(self, media: Weights | None = None) -> SkeletonWeights:
        """Return the mapping for a multimodal checkpoint with this model as its text half."""
        if self.conversion is not None:
            self.conversion.wrapped, self.conversion.keeps_towers = True, media is not None
        return replace(self, wrapped=True, media=media)

    def target(self, name: str) -> ParamTarget:
        if self.media is not None and name.startswith(MEDIA_PREFIX):
            found = self.media.target(name.removeprefix(MEDIA_PREFIX))
            return found._replace(layer=f"{MEDIA_PREFIX}{found.layer}")
        path, _, param = name.rpartition(".")
        owner = self.owners.get(path)
        if owner is None:
            return ParamTarget(path, param, None, False)
        return ParamTarget(owner.layer, param, owner.part, owner.transpose and param == "weight")

    def module_path(self, path: str) -> str:
        """Of the block around an attention layer, for the scales of a cache in 8 bits."""
        renamed = path if self.conversion is None else self.conversion.rename(f"{path}.x")[0][:-2]
        return f"skeleton.{renamed}.quire_attention"

    def checkpoint_paths(self, layer: str) -> tuple[str, ...]:
        found = [(one.part or 0, path) for path, one in self.owners.items() if one.layer == layer]
        return tuple(path for _, path in sorted(found)) or (layer,)

    def sources(self, layer: str) -> tuple[tuple[str, ...], ...]:
        if self.media is not None and layer.startswith(MEDIA_PREFIX):
            return self.media.sources(layer.removeprefix(MEDIA_PREFIX))
        prefix = "" if self.conversion is None else self.conversion.prefix
        return tuple((path, path.removeprefix(prefix)) for path in self.checkpoint_paths(layer))

    def ignores(self, name: str, layer: str) -> bool:
        if self.media is not None and name.startswith(MEDIA_PREFIX):
            return self.media.ignores(*(one.removeprefix(MEDIA_PREFIX) for one in (name, layer)))
        patterns = (*self.ignore, *NOT_WEIGHTS)
        if f"{layer}.".startswith(self.absent):
            return True
        return layer not in {one.layer for one in self.owners.values()} and any(
            re.search(pattern, name) for pattern in patterns
        )

    def converted_shapes(
        self, shapes: Iterable[tuple[str, Sequence[int]]]
    ) -> list[tuple[str, Sequence[int]]]:
        return list(shapes) if self.conversion is None else self.conversion.shapes(shapes)

    def converted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return iter(tensors) if self.conversion is None else self.conversion.tensors(tensors)


@dataclass(frozen=True, slots=True)
class ModuleTarget:
    """The owner of a module's parameters: its name here, and which part of it they fill."""

    layer: str
    part: int | None = None
    transpose: bool = False


class Conversion:
    """Renames and converts tensors as transformers does on loading."""

    def __init__(self, skeleton: Any) -> None:
        """skeleton: before any module is replaced."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        table = get_model_conversion_mapping(skeleton)
        self._renamings = [one for one in table if isinstance(one, WeightRenaming)]
        self._converters = [one for one in table if isinstance(one, WeightConverter)]
        self._names = dict.fromkeys(skeleton.state_dict(), True)
        self._base = skeleton.base_model_prefix
        self._config = skeleton.config
        self._copies: Mapping[str, str] = {}
        self._groups: dict[str, _Group] = {}
        self.wrapped = False  # in a multimodal checkpoint
        self.keeps_towers = False  # with a media encoder; else they are left out

    def set_copies(self, copies: Mapping[str, str]) -> None:
        """Yield these tensors, name -> name of what it equals, if the checkpoint lacks them."""
        self._copies = copies

    @property
    def prefix(self) -> str:
        """Of the names of the base model."""
        return f"{self._base}." if self._base else ""

    def rename(self, name: str) -> tuple[str, str | None]:
        """Return the name in the skeleton, and the pattern of the converter it goes through."""
        from transformers.core_model_loading import rename_source_key

        if self.wrapped:
            outer = next((one for one in WRAPPED if name.startswith(one)), "")
            name = name.removeprefix(outer)
        base: Any = (self._base, self._names)
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, *base)
        if renamed not in self._names and name in self._names:
            renamed, pattern = rename_source_key(name, [], [], *base)
        return renamed, pattern

    def shapes(
        self, shapes: Iterable[tuple[str, Sequence[int]]]
    ) -> list[tuple[str, Sequence[int]]]:
        """Return (name, shape) after the conversion. Raises WeightError."""
        from transformers.core_model_loading import dot_natural_key

        self._groups, found, by_name = {}, [], {}
        for name, shape in shapes:
            if not (self.wrapped and is_tower_tensor(name)):
                by_name[name] = shape
            elif self.keeps_towers:
                found.append((f"{MEDIA_PREFIX}{name}", shape))
        for name in sorted(by_name, key=dot_natural_key):
            renamed, pattern = self.rename(name)
            if pattern is None or renamed not in self._names:
                found.append((renamed, by_name[name]))
            else:
                self._groups.setdefault(renamed, _Group(renamed)).sources[name] = pattern
        for group in self._groups.values():
            stand_ins = {
                name: torch.empty(tuple(by_name[name]), device="meta") for name in group.sources
            }
            found += [
                (name, tuple(tensor.shape)) for name, tensor in self._convert(group, stand_ins)
            ]
        have = {name for name, _ in found}
        of = dict(found)
        found += [
            (name, of[source])
            for name, source in self._copies.items()
            if source in have and name not in have
        ]
        return found

    def tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors after the conversion; a group is converted when its last one has come."""
        group_of = {name: group for group in self._groups.values() for name in group.sources}
        waiting: dict[str, dict[str, Tensor]] = {}
        copies: dict[str, list[str]] = {}
        for name, source in self._copies.items():
            copies.setdefault(source, []).append(name)
        seen: set[str] = set()
        late: list[tuple[str, Tensor]] = []
        for name, tensor in tensors:
            if self.keeps_towers and is_tower_tensor(name):
                yield f"{MEDIA_PREFIX}{name}", tensor
                continue
            group = group_of.get(name)
            if group is None:
                ready = [(self.rename(name)[0], tensor)]
            else:
                parts = waiting.setdefault(group.target, {})
                parts[name] = tensor
                if len(parts) < len(group.sources):
                    continue
                ready = self._convert(group, waiting.pop(group.target))
            for renamed, value in ready:
                seen.add(renamed)
                yield renamed, value
                late += [(copy_name, value) for copy_name in copies.get(renamed, ())]
        for name, value in late:
            if name not in seen:
                yield name, value

    def _convert(self, group: _Group, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        first = next(iter(group.sources.values()))
        converter = copy.deepcopy(
            next(one for one in self._converters if first in one.source_patterns)
        )
        for name, pattern in group.sources.items():
            source: Any = tensors[name]  # a tensor in place of the future of one
            converter.add_tensor(group.target, name, pattern, source)
        try:
            made = converter.convert(group.target, model=None, config=self._config)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise WeightError(
                f"the checkpoint's tensors for {group.target} do not fit together: {reason:.300}"
            ) from error
        return [
            (name, value[0] if isinstance(value, list) else value) for name, value in made.items()
        ]


@dataclass(slots=True)
class _Group:
    """Tensors that are converted together. sources: name -> pattern, in the order they stack."""

    target: str
    sources: dict[str, str] = field(default_factory=dict)
