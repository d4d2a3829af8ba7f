"""Builds a head from a config and a checkpoint, as quire.models.build does models.

Heads are on no pipeline stage, and their layers come after the target's in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quire.config.engine_config import ExpertPlacement
from quire.config.json_file import raise_as_config_error
from quire.config.memory.kv_layout import KVCacheGroup
from quire.config.quant.read import read_quantization
from quire.distributed.collectives import Collectives, connect
from quire.distributed.mesh import Mesh
from quire.models._quant_methods import set_quant_methods
from quire.models.base import Hf, ModelConfig
from quire.models.build import (
    assign_kv_tensors,
    checkpoint_headers,
    load_weights,
    shard_model,
)
from quire.models.drafters._base import DraftHead, HeadConfig
from quire.registry import PluginRegistry

HEADS = PluginRegistry("quire.models.drafters")


def read_head_config(kind: str, hf: Hf, target: ModelConfig) -> HeadConfig:
    """Return the config of a head. Raises ConfigError.

    kind: a file of this folder. hf: its config.json; of heads in the target's checkpoint, the
    target's.
    """
    with raise_as_config_error("config.json"):
        found: HeadConfig = HEADS.load(kind).read_config(hf, target)
        return replace(found, layer=replace(found.layer, quantized=read_quantization(hf)))


def describe_head(kind: str, config: HeadConfig, names: Sequence[str]) -> DraftHead:
    """Return a head whose parameters have shapes only. names: of its checkpoint's tensors; none: of
    dummy weights."""
    with torch.device("meta"):
        return cast(DraftHead, HEADS.load(kind).Head(config, names))


def head_headers(folder: Path | None, load_format: str) -> Mapping[str, Any]:
    """Return the tensors of a checkpoint by name; none of dummy weights."""
    if folder is None or load_format == "dummy":
        return {}
    return checkpoint_headers(folder, load_format)


def build_head(
    kind: str,
    config: HeadConfig,
    target: nn.Module,
    *,
    folder: Path | None,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    groups: Sequence[KVCacheGroup],
    mesh: Mesh = Mesh(),  # noqa: B008 - an immutable value
    comm: Collectives | None = None,
    experts: ExpertPlacement | None = None,
    progress: bool = True,
    seed: int = 0,
) -> DraftHead:
    """Build a head of a target and fill it. folder: of its checkpoint.

    groups: the KV layout, in which its layers come after the target's. Raises WeightError if
    checkpoint and head differ in any tensor.
    """
    headers = head_headers(folder, load_format)
    head = describe_head(kind, config, list(headers))
    head.attach(target)
    if max(mesh.tp, mesh.ep) > 1:
        shard_model(head, mesh, comm or connect(mesh), experts)
    with torch.device("meta"):
        set_quant_methods(head, config.layer.quantized, headers)
    assign_kv_tensors(head, groups, first=len(config.target.attention_layers()))
    head.prepare(dtype, device)
    layer = replace(config.layer, tied=False)
    load_weights(head, layer, folder, load_format, dtype, device, progress=progress, seed=seed)
    return head.eval()
