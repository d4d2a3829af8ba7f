"""Rank sizes: bytes of the weights of each rank of a model, counted on tensors without memory.

Layers cut themselves, so this follows heads, vocabularies and experts that ranks do not divide,
where the arithmetic of the memory plan takes equal shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quire.config.memory.kv_layout import stage_ranges
from quire.config.memory.memory_plan import EngineShape
from quire.config.options import Options
from quire.distributed.collectives import ProcessGroupCollectives
from quire.distributed.mesh import Mesh
from quire.engine.startup.executor_setup import DTYPES
from quire.errors import QuireError
from quire.kernels.framework.meta_device import MetaGroup
from quire.models._weight_report import model_bytes
from quire.models.base import HeadKind
from quire.models.build import build_model, read_model_config

META = torch.device("meta")


def count_rank_weights(
    options: Options,
    shape: EngineShape,
    hf: Mapping[str, Any],
    code: Path,
    head: HeadKind,
    labels: int,
) -> list[int] | None:
    """Return the bytes of weights of each rank, in rank order; None: the model is quantized, or its
    ranks cannot be counted so.

    hf: a parsed config.json. code: its folder, as in read_model_config().
    """
    if shape.quantization is not None:
        return None
    section = options.model
    trusted = code if section.trust_remote_code else None
    try:
        model_type, config = read_model_config(
            dict(hf), section.model_impl, trusted, head=head, labels=labels
        )
        return [_count(model_type, config, options, shape, rank) for rank in range(shape.ranks)]
    except (QuireError, NotImplementedError):
        return None


def _count(model_type: str, config: Any, options: Options, shape: EngineShape, rank: int) -> int:
    section = options.parallel
    ep = shape.tensor * shape.data if section.enable_expert_parallel else 1
    mesh = Mesh(tp=shape.tensor, pp=shape.stages, dp=shape.data, ep=ep, rank=rank)
    comm = ProcessGroupCollectives(MetaGroup(mesh.tp)) if mesh.size > 1 else None
    stages = stage_ranges(shape.stage_layers)
    model = build_model(
        model_type,
        config,
        load_format="dummy",
        dtype=DTYPES[shape.dtype],
        device=META,
        mesh=mesh,
        comm=comm,
        experts=section.expert_placement_strategy if ep > 1 else None,
        redundant_experts=shape.redundant_experts or None,
        stage=stages[mesh.pp_rank] if stages else None,
        progress=False,
    )
    assert isinstance(model, torch.nn.Module)
    return model_bytes(model)
