"""Chooses the quantization method of each layer: of the whole layer, or of its parts.

A fused layer has one method if its parts have one format. Else each run of parts with one format
has its own (quire.quant.parts); the same holds for the matrices and projections of a bank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from torch import nn

from quire.config.quant.facts import QuantFacts, WeightFormat
from quire.errors import WeightError
from quire.layers import WeightModule
from quire.layers.weight_module import PLAIN
from quire.quant.base import AdaptsToCheckpoint, Method
from quire.quant.parts import PartGroup, PartsMethod, group_parts
from quire.registry import PluginRegistry
from quire.weights import files
from quire.weights.mapping import MEDIA_PREFIX, OTHER_NAMES, Weights, local_target

log = logging.getLogger(__name__)

Stored = Mapping[str, Sequence[files.TensorHeader]]
"""The tensors that a checkpoint has, by parameter."""
StoredParts = dict[int | None, dict[str, list[files.TensorHeader]]]
"""The same of a layer, by the number of the part. None: tensors of all parts."""


def set_quant_methods(
    model: nn.Module, facts: QuantFacts | None, headers: Mapping[str, files.TensorHeader]
) -> None:
    """Set the method of linear layers and banks.

    headers: of the checkpoint's tensors; none with dummy weights. What they show to be
    unquantized is so, whatever the configuration states. quire itself quantizes no media encoder.
    """
    if facts is None:
        return
    weights = cast(Weights, model.weights)
    modules = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, WeightModule) and (facts.is_stored or not name.startswith(MEDIA_PREFIX))
    }
    found: dict[str, StoredParts] = {}
    for name, header in headers.items():
        target = weights.target(name)
        module = modules.get(target.layer)
        local = target if module is None else local_target(module, target)
        if local is None:
            continue
        own = found.setdefault(target.layer, {}).setdefault(local.shard, {})
        for param in {target.param, OTHER_NAMES.get(target.param, target.param)}:
            own.setdefault(param, []).append(header)
    methods = _MethodsOfFormats(facts)
    plain, quantized = [], 0
    for name, module in modules.items():
        stored = found.get(name, {}) if headers else None
        try:
            method = _layer_method(module, name, weights, methods, stored)
        except WeightError as error:
            raise WeightError(f"{name}: {error}") from error
        if method is not None:
            module.set_quant_method(method)
            quantized += 1
        elif module.role not in ("head", "router") and methods.are_meant_for(name, weights, module):
            plain.append(name)
    if quantized and methods.widen_inputs:
        log.info(
            "activations stay in the model's dtype: the checkpoint was made for fewer bits, which "
            "would only make them less exact"
        )
    if plain and not quantized:
        log.warning(
            "config.json describes weights quantized by %s, but the checkpoint's are not: they "
            "are used as they are; remove its quantization_config",
            facts.quant_method,
        )
    elif plain:
        log.info("%d layers are not quantized in the checkpoint, first %s", len(plain), plain[0])


class _MethodsOfFormats:
    """One method per format."""

    def __init__(self, facts: QuantFacts) -> None:
        self._facts, self._registry = (
            facts,
            PluginRegistry("quire.quant", kind="quantization method"),
        )
        self._made: dict[WeightFormat, Method] = {}

    def of(self, module: WeightModule, names: Iterable[str]) -> Method:
        """Return the method of a layer's part to which a checkpoint gives one of these names."""
        form, router = self._facts.format_of(names), module.role == "router"
        if module.role in ("head", "embedding") and not self._facts.is_stored:
            form = self._facts.head if module.multiplied else None
        if form is None or (router and (form.only_experts or not form.is_stored)):
            return PLAIN
        if form not in self._made:
            self._made[form] = cast(Method, self._registry.load(form.method).Method(form))
        method = self._made[form]
        return method if router or method.accepts(module) else PLAIN

    @property
    def widen_inputs(self) -> bool:
        """Whether any format was made for activations in fewer bits than they have here."""
        return any(form.wide_inputs for form in self._made)

    def are_meant_for(self, name: str, weights: Weights, module: WeightModule) -> bool:
        """Whether the configuration has a method for any part of a layer."""
        sources = (one for m in module.matrices for one in _sources(weights, name, module, m))
        return any(self.of(module, names) is not PLAIN for names in sources)


def _sources(
    weights: Weights, name: str, module: WeightModule, matrix: str
) -> tuple[tuple[str, ...], ...]:
    """Return the names of the parts of a matrix, which repeat for each expert of a bank."""
    if module.role == "experts":
        return weights.bank_sources(name, matrix)
    return weights.sources(name)


def _layer_method(
    module: WeightModule,
    name: str,
    weights: Weights,
    methods: _MethodsOfFormats,
    stored: StoredParts | None,
) -> Method | None:
    """Return the method of a layer. None: it is unquantized. stored: None: with dummy weights."""
    if module.role == "router" and stored is None:
        return None  # only tensors show that it is quantized
    groups: dict[str, tuple[PartGroup, ...]] = {}
    used: dict[int, Method] = {}
    for matrix in module.matrices:
        sources = [methods.of(module, one) for one in _sources(weights, name, module, matrix)]
        parts = []
        for part in range(len(module.weight_layout(matrix))):
            method = sources[part % len(sources)]
            own = None if stored is None else _tensors_of(stored, (part,))
            plain = own is not None and _is_stored_plain(module, matrix, method, own)
            parts.append(PLAIN if plain else method)
        groups[matrix] = group_parts(parts, experts=module.role == "experts")
        used |= {id(one): one for one in parts}
    if len(used) > 1:
        return PartsMethod({m: _adapted(module, own, stored) for m, own in groups.items()})
    (method,) = used.values()
    if method is PLAIN:
        return None
    if isinstance(method, AdaptsToCheckpoint) and stored:
        return method.adapted(module, _tensors_of(stored, stored))
    return method


def _adapted(
    module: WeightModule, groups: Sequence[PartGroup], stored: StoredParts | None
) -> tuple[PartGroup, ...]:
    """Return groups with methods for the tensors that the checkpoint has for them."""
    if not stored:
        return tuple(groups)
    return tuple(
        PartGroup(one.method.adapted(module, _tensors_of(stored, one.parts)), one.parts)
        if isinstance(one.method, AdaptsToCheckpoint)
        else one
        for one in groups
    )


def _tensors_of(stored: StoredParts, parts: Iterable[int | None]) -> Stored:
    """Return the tensors of some parts, and those of all parts at once."""
    found: dict[str, list[files.TensorHeader]] = {}
    for part in dict.fromkeys((*parts, None)):
        for param, headers in stored.get(part, {}).items():
            found.setdefault(param, []).extend(headers)
    return found


def _is_stored_plain(module: WeightModule, matrix: str, method: Method, stored: Stored) -> bool:
    """Whether a checkpoint has a part of a matrix unquantized.

    So it has if nothing but a weight in 16 or more bits is there. stored: of the part.
    """
    if method is PLAIN or not method.is_stored:
        return False
    plain = module.param_name(matrix, "weight")
    params = {module.param_name(matrix, one) for one in method.params(module, matrix)}
    if params.difference((plain,)) & stored.keys():
        return False
    weights = stored.get(plain, ())
    if not weights:  # a head without tensors shares the embedding's
        return module.role == "head" or (bool(stored) and not params & stored.keys())
    return all(header.dtype in files.PLAIN_DTYPES for header in weights)
