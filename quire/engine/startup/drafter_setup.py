"""Drafter set-up: reads and loads what drafts with weights, and builds its drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quire.attention.base import Backend
from quire.config.drafters import DrafterFacts
from quire.config.engine_config import EngineConfig, SpeculationSection
from quire.config.facts import (
    count_weights_in_headers,
    read_hf_config,
    read_model_facts,
)
from quire.config.json_file import MAX_CONFIG_BYTES, check_sizes, read_json_object
from quire.config.memory.part_facts import DrafterMemory
from quire.config.memory.weight_facts import WeightFacts, count_tensors
from quire.config.options import Options
from quire.config.speculation import wanted_drafter
from quire.distributed.collectives import Collectives
from quire.distributed.mesh import Mesh
from quire.errors import ConfigError
from quire.models.base import Hf, LanguageModel, ModelConfig
from quire.models.build import assign_kv_tensors, build_model, read_model_config
from quire.models.drafters._base import HeadConfig
from quire.models.drafters.build import (
    HEADS,
    build_head,
    describe_head,
    head_headers,
    read_head_config,
)
from quire.registry import PluginRegistry
from quire.runner.drafters._passes import PassLimits
from quire.runner.drafters.base import ModelDrafter

DRAFTERS = PluginRegistry("quire.runner.drafters", kind="drafter")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class DrafterDescription:
    """A drafter with weights that was found, as its small files describe it."""

    method: str  # a file of quire.runner.drafters
    kind: str  # a file of quire.models, or of quire.models.drafters
    folder: Path
    config: ModelConfig | HeadConfig
    memory: DrafterMemory


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter's weights on the device."""

    method: str
    model: nn.Module
    max_len: int  # positions that it has


def drafts_with_weights(section: SpeculationSection) -> bool:
    """Whether a model on the device makes the drafts."""
    return section.method in DRAFTERS.names()


def plan_drafter(options: Options, facts: DrafterFacts, hf: Hf, folder: Path) -> DrafterFacts:
    """Return a drafter's facts with what it takes of the memory. hf, folder: of its target."""
    code = folder if options.model.trust_remote_code else None
    target_type, target = read_model_config(hf, options.model.model_impl, code)
    found = find_drafter(options, facts, target_type, target, hf, folder)
    return facts if found is None else replace(facts, memory=found.memory)


def find_drafter(
    options: Options,
    facts: DrafterFacts | None,
    target_type: str,
    target: ModelConfig,
    target_hf: Hf,
    target_folder: Path,
) -> DrafterDescription | None:
    """Read the small files of the drafter that the options name; None: it has no weights, or is of
    a method that the config refuses. Raises ConfigError."""
    if facts is None:
        return None
    method = wanted_drafter(options.speculation)[0] or facts.method
    if method not in DRAFTERS.names():
        return None
    folder = Path(facts.folder) if facts.folder else target_folder
    load_format = options.load.load_format
    return describe_drafter(method, folder, target_type, target, target_hf, load_format)


def describe_drafter(
    method: str,
    folder: Path,
    target_type: str,
    target: ModelConfig,
    target_hf: Hf,
    load_format: str = "auto",
) -> DrafterDescription:
    """Read the small files of a drafter. Raises ConfigError.

    folder: its own, or the target's if the target's checkpoint has it. target_hf: the target's
    config.json.
    """
    found = _describe(method, folder, target_type, target, target_hf, load_format)
    own, given = (
        {bool(one.latent) for one in layers}
        for layers in (found.memory.layers, target.attention_layers())
    )
    if target.states and not given:
        raise ConfigError(
            f"speculative_config: method {method!r} is for models with attention layers, whose "
            "blocks its keys and values share, and this model has none: use ngram or suffix"
        )
    if not given or any(layer.cross for layer in target.attention_layers()):
        raise ConfigError(
            f"speculative_config: method {method!r} is for models that generate text without an "
            "encoder: use ngram or suffix, or leave it out"
        )
    if own and own != given:
        raise ConfigError(
            "speculative_config: the attention layers of drafter and model must both have latents "
            "(MLA) or both have none, as their keys and values share blocks: use another drafter"
        )
    return found


def _describe(
    method: str,
    folder: Path,
    target_type: str,
    target: ModelConfig,
    target_hf: Hf,
    load_format: str,
) -> DrafterDescription:
    load_format = load_format if load_format == "dummy" else "auto"
    if method == "draft_model":
        return _describe_model(folder, target, load_format)
    kind, hf = method, target_hf
    if method == "mtp":
        kind = target_type
        if kind not in HEADS.names():
            known = ", ".join(sorted(set(HEADS.names()) - set(DRAFTERS.names())))
            raise ConfigError(
                f"speculative_config: method 'mtp' is for models of type {known}, not {kind}"
            )
    else:
        hf = read_json_object(folder / "config.json", MAX_CONFIG_BYTES)
        check_sizes(hf)
    config = read_head_config(kind, hf, target)
    headers = head_headers(folder, load_format)
    head = describe_head(kind, config, list(headers))
    head.check_shapes({name: tuple(header.shape) for name, header in headers.items()})
    used = {
        name: one
        for name, one in headers.items()
        if not head.weights.ignores(name, head.weights.target(name).layer)
    }
    numbers = WeightFacts(sum(one.numel() for one in head.parameters()), 0)
    layer = config.layer
    memory = DrafterMemory(
        layers=layer.attention_layers(),
        weights=count_tensors(used.items()) if used else numbers,
        quantization=layer.quantized,
        rotary=0,
        states=(1 + len(head.taps)) * target.hidden,
        widest=(5 + len(head.taps)) * layer.hidden + 3 * layer.mlp,
    )
    return DrafterDescription(method, kind, folder, config, memory)


def _describe_model(folder: Path, target: ModelConfig, load_format: str) -> DrafterDescription:
    hf = read_hf_config(folder)
    kind, config = read_model_config(hf)
    if config.vocab != target.vocab:
        raise ConfigError(
            f"speculative_config: the vocabulary of the draft model has {config.vocab} tokens, and "
            f"that of the model {target.vocab}: drafts need the same tokens"
        )
    if config.states:
        raise ConfigError(
            "speculative_config: the draft model has recurrent layers, whose states cannot go back "
            "before rejected drafts: use a model with attention in all layers, ngram or suffix"
        )
    headers = head_headers(folder, load_format)
    weights = count_weights_in_headers(headers, hf) if headers else None
    facts = read_model_facts(folder, hf=hf, weights=weights)
    memory = DrafterMemory(
        layers=config.attention_layers(),
        weights=facts.weights,
        quantization=facts.quantization,
        rotary=facts.rotary,
        states=target.hidden,
        widest=5 * facts.hidden + 3 * facts.mlp,
    )
    return DrafterDescription("draft_model", kind, folder, config, memory)


def load_drafter(
    found: DrafterDescription | None,
    target: LanguageModel,
    config: EngineConfig,
    device: torch.device,
    mesh: Mesh = Mesh(),  # noqa: B008 - an immutable value
    comm: Collectives | None = None,
) -> LoadedDrafter | None:
    """Load the drafter of a model, or one rank's share of it; None: there is none.

    Raises: ConfigError, WeightError.
    """
    if found is None:
        return None
    longest, own = config.scheduler.max_model_len, found.config
    common: dict[str, Any] = {
        "folder": found.folder,
        "load_format": "dummy" if config.load.format == "dummy" else "auto",
        "dtype": DTYPES[config.model.dtype],
        "device": device,
        "mesh": mesh,
        "comm": comm,
        "experts": config.parallel.expert_placement,
        "progress": config.load.progress and not mesh.rank,
        "seed": config.model.seed,
    }
    if isinstance(own, HeadConfig):
        own = replace(own, layer=replace(own.layer, max_len=longest))
        groups = config.cache.groups
        head = build_head(found.kind, own, cast(nn.Module, target), groups=groups, **common)
        return LoadedDrafter(found.method, head, longest)
    own = replace(own, max_len=min(own.max_len, longest))
    model = cast(nn.Module, build_model(found.kind, own, **common))
    first = len(config.cache.layers) - len(found.memory.layers)
    assign_kv_tensors(model, config.cache.groups, first=first)
    return LoadedDrafter(found.method, model, own.max_len)


def build_drafter(
    loaded: LoadedDrafter, config: EngineConfig, backend: Backend, device: torch.device
) -> ModelDrafter:
    """Build what a worker calls. backend: over the cache that has the drafter's layers too."""
    limits = PassLimits(config.cache.block_size, loaded.max_len)
    slots = config.scheduler.max_num_seqs
    made = DRAFTERS.load(loaded.method).build(loaded.model, backend, limits, device, slots)
    return cast(ModelDrafter, made)
