"""Counts the numbers that slots of adapters have, on a model of shapes, for the memory plan."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.config.adapters import ADAPTER_RANK_STEP, is_on
from quire.config.facts import AdapterNumbers
from quire.config.options import Options
from quire.models._adapter_modules import adapter_modules
from quire.models._adapter_targets import adapted_layers, restrict_targets
from quire.models.base import HeadKind, Hf, ModelConfig
from quire.models.build import describe_adaptable, read_model_config
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


def count_adapter_numbers(options: Options, model_type: str, config: ModelConfig) -> AdapterNumbers:
    """Return what one slot takes on a rank. Raises ConfigError if adapters can change nothing."""
    if not is_on(options.lora):
        return AdapterNumbers()
    model = describe_adaptable(model_type, config, options.parallel.tensor_parallel_size)
    modules = adapter_modules(model, config.tied)
    modules = restrict_targets(modules, options.lora.lora_target_modules, experts=True)
    names = adapted_layers(modules)
    experts = {name for name in names if modules.layers[name].kind == "experts"}

    def per_rank(names: set[str]) -> int:
        meta = torch.device("meta")
        banks = AdapterBanks(
            model,
            names,
            slots=1,
            max_rank=1,
            max_tokens=1,
            max_seqs=1,
            dtype=torch.float32,
            device=meta,
        )
        return banks.numel // ADAPTER_RANK_STEP

    return AdapterNumbers(per_rank(set(names) - experts), per_rank(experts))
