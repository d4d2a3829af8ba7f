"""Counts the numbers that slots of adapters have, on a model of shapes, for the memory plan."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.config.adapters import ADAPTER_RANK_STEP, is_on
from quire.config.memory.part_facts import AdapterNumbers
from quire.config.options import Options
from quire.distributed.mesh import Mesh
from quire.layers import ClassifierLinear
from quire.models._adapter_targets import adapted_layers, restrict_targets
from quire.models.base import HeadKind, Hf, ModelConfig
from quire.models.build import describe_adaptable, read_model_config
from quire.runner.adapters.adapted_layer import SlotSizes
from quire.runner.adapters.banks import AdapterBanks


def plan_adapter_numbers(
    options: Options, hf: Hf, code: Path, head: HeadKind, labels: int
) -> AdapterNumbers:
    """Return what one slot takes on a rank, of a config.json. code: as in read_model_config()."""
    found = read_model_config(
        hf,
        options.model.model_impl,
        code if options.model.trust_remote_code else None,
        head=head,
        labels=labels,
    )
    return count_adapter_numbers(options, *found)


def count_adapter_numbers(
    options: Options, model_type: str, config: ModelConfig, folder: Path | None = None
) -> AdapterNumbers:
    """Return what one slot takes on a rank. Raises ConfigError if adapters can change nothing.

    folder: of the checkpoint.
    """
    if not is_on(options.lora):
        return AdapterNumbers()
    form, parallel = options.load.load_format, options.parallel
    ranks = parallel.tensor_parallel_size
    mesh = Mesh(tp=ranks, ep=ranks if parallel.enable_expert_parallel else 1)
    experts = parallel.expert_placement_strategy
    model, modules = describe_adaptable(model_type, config, folder, form, mesh, experts)
    modules = restrict_targets(modules, options.lora.lora_target_modules, experts=True)
    names, kinds = adapted_layers(modules), dict(model.named_modules())
    banks = [name for name in names if modules.layers[name].kind == "experts"]
    heads = [name for name in names if isinstance(kinds[name], ClassifierLinear)]
    others = [name for name in names if name not in {*banks, *heads}]

    def banks_of(names: list[str], tokens: int = 0) -> AdapterBanks:
        sizes = SlotSizes(1, ADAPTER_RANK_STEP, tokens, torch.float32, torch.device("meta"))
        return AdapterBanks(model, names, sizes=sizes, max_tokens=1, max_seqs=1)

    each = banks_of(others)
    return AdapterNumbers(
        layers=each.numel // ADAPTER_RANK_STEP,
        experts=banks_of(banks).numel // ADAPTER_RANK_STEP,
        token=banks_of(others, tokens=1).numel - each.numel,
        classifiers=banks_of(heads).numel,
        scales=each.scales,
    )
