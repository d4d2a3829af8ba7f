"""Adapters: decides how many the device and the host hold, and of which rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from quire.config.decisions import DecisionLog
from quire.config.engine_config import AdapterSection, StartupAdapter
from quire.config.facts import ITEMSIZE, DeviceFacts, ModelFacts
from quire.config.media import MODALITIES
from quire.config.memory.memory_plan import EngineShape, adapter_bytes, gib
from quire.config.memory.part_facts import AdapterNumbers
from quire.config.options import LoRAOptions
from quire.errors import ConfigError

ADAPTER_RANK_STEP = 16
"""A slot's rank is a multiple of it: quire.kernels.formats.lora_bank."""
EXPERTS = "experts"
"""Last component of the names of banks of experts, in lora_target_modules too."""
ALL_LINEAR = "all-linear"
"""In lora_target_modules: all linear layers, except experts and the output head."""
EXPERTS_SHARE = 10
"""The part of the device's memory, one over it, that slots of experts may take by themselves."""


def resolve_adapter_slots(
    given: LoRAOptions, model: ModelFacts, shape: EngineShape, device: DeviceFacts, why: DecisionLog
) -> EngineShape:
    """Return the shape with what slots have room for. dtype and device are those of the shape."""
    if not is_on(given):
        return shape
    numbers = model.adapters
    rank = -(-given.max_lora_rank // ADAPTER_RANK_STEP) * ADAPTER_RANK_STEP
    shape = replace(shape, adapter_slots=given.max_loras, adapter_rank=rank)
    tokens, memory = 0, given.lora_modules_to_save_memory
    if memory and numbers.token:
        token = given.max_loras * numbers.token * ITEMSIZE[shape.dtype]
        tokens = int(min(memory // token, model.vocab))
        reason = f"lora_modules_to_save_memory; {token} bytes for one token in all slots"
        why.record("adapters.max_replaced_tokens", tokens, reason)
    experts = bool(numbers.experts) and _has_room_for_experts(given, numbers, shape, device, why)
    return replace(shape, adapter_tokens=tokens, adapter_experts=experts)


def _has_room_for_experts(
    given: LoRAOptions,
    numbers: AdapterNumbers,
    shape: EngineShape,
    device: DeviceFacts,
    why: DecisionLog,
) -> bool:
    """Return whether slots have room for adapters of experts, which are many times larger."""
    if (named := given.lora_target_modules) is not None:
        return bool(why.record("adapters.experts", EXPERTS in named, "lora_target_modules"))
    size = adapter_bytes(
        AdapterNumbers(experts=numbers.experts), replace(shape, adapter_experts=True)
    )
    most = device.total_bytes
    reason = f"their slots take {gib(size)} of {gib(most)}; lora_target_modules may name experts"
    return bool(why.record("adapters.experts", size * EXPERTS_SHARE <= most, reason))


def is_on(given: LoRAOptions) -> bool:
    """Return whether an engine with these options serves adapters."""
    return given.enable_lora or bool(given.lora_modules)


def resolve_adapters(
    given: LoRAOptions, shape: EngineShape, why: DecisionLog, *, served_names: Sequence[str]
) -> AdapterSection | None:
    """Resolve adapters; None: they are off. Raises ConfigError."""
    dtype = shape.dtype
    if not is_on(given):
        if given.default_mm_loras:
            raise ConfigError("default_mm_loras are adapters: give enable_lora too")
        return None
    if given.lora_dtype not in ("auto", dtype):
        raise ConfigError(
            f"lora_dtype={given.lora_dtype!r} is not the model's dtype ({dtype}), which is the "
            "only one that adapters can have: leave it out"
        )
    host = given.max_cpu_loras
    if host is not None and host < given.max_loras:
        raise ConfigError(
            f"max_cpu_loras={host} is less than max_loras={given.max_loras}: a step could not have "
            "all its adapters"
        )
    reason = "max_loras" if host is None else "requested"
    return AdapterSection(
        max_adapters=given.max_loras,
        max_rank=given.max_lora_rank,
        max_host=int(why.record("adapters.max_host", host or given.max_loras, reason)),
        target_modules=given.lora_target_modules,
        experts=shape.adapter_experts,
        max_replaced_tokens=shape.adapter_tokens,
        modules=_unique(
            (*parse_modules(given.lora_modules or ()), *_media_modules(given.default_mm_loras)),
            served_names,
        ),
        media=tuple(given.default_mm_loras),
    )


def parse_modules(given: Iterable[object]) -> Iterator[StartupAdapter]:
    """Yield the adapters of lora_modules. Raises ConfigError.

    An item is NAME=FOLDER unless it begins with { or [: folders may have commas and equals signs.
    """
    for one in given:
        if isinstance(one, str) and one.lstrip()[:1] in ("{", "["):
            try:
                one = json.loads(one)
            except ValueError as error:
                raise ConfigError(f"lora_modules: {one!r:.100} is not JSON: {error}") from None
        if isinstance(one, list):
            yield from parse_modules(one)
        elif isinstance(one, dict):
            yield _module_from(one)
        else:
            name, equals, path = str(one).partition("=")
            if not (name and equals and path):
                raise ConfigError(
                    f"lora_modules must be NAME=FOLDER or JSON with name and path, got {one!r:.100}"
                )
            yield StartupAdapter(name, path)


def _module_from(given: dict[str, object]) -> StartupAdapter:
    """is_3d_lora_weight has no effect: the files show it."""
    name, path, base = (given.get(key) for key in ("name", "path", "base_model_name"))
    unknown = given.keys() - {"name", "path", "base_model_name", "is_3d_lora_weight"}
    if not (isinstance(name, str) and name and isinstance(path, str) and path) or unknown:
        raise ConfigError(
            "lora_modules: an object must have name and path, and may have base_model_name, got "
            f"{json.dumps(given)[:200]}"
        )
    return StartupAdapter(name, path, None if base is None else str(base))


def _media_modules(given: Mapping[str, object]) -> Iterator[StartupAdapter]:
    """Yield the adapters of default_mm_loras. Raises ConfigError."""
    for kind, path in given.items():
        if kind not in MODALITIES or not isinstance(path, str) or not path:
            raise ConfigError(
                "default_mm_loras must be folders of adapters by image, video and audio, as "
                f'{{"audio": "/adapters/x"}}; got {kind!r:.80}: {path!r:.80}'
            )
        yield StartupAdapter(kind, path)


def _unique(
    modules: Iterable[StartupAdapter], served_names: Sequence[str]
) -> tuple[StartupAdapter, ...]:
    found: dict[str, StartupAdapter] = {}
    for one in modules:
        if one.name in served_names:
            raise ConfigError(f"lora_modules: {one.name!r} is a name of the model itself")
        if one.name in found:
            raise ConfigError(f"lora_modules: {one.name!r} is given twice")
        found[one.name] = one
    return tuple(found.values())
