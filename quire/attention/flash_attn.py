"""The backend over FlashAttention 3, used only when it is requested by name and installed.

It is tested with a fake of the package: its arguments are tested, its results are not. Our own
kernels are the default; measure before you choose this one.

Source: package flash-attn-3, module flash_attn_interface, flash_attn_with_kvcache
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import (
    AttentionLayer,
    AttentionMetadata,
    AttentionStep,
    BackendCapabilities,
)
from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.kernels.kv_write import kv_write

CAPS = BackendCapabilities(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    max_head_dim=256,
)


@dataclass(frozen=True, slots=True)
class FlashAttentionStep:
    """One step. The tables are the rows' own: the package has no indirection."""

    attend: Callable[..., Tensor]
    cache: list[Tensor]
    metadata: AttentionMetadata
    block_tables: list[Tensor]

    def run(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> Tensor:
        """Write k, v [T, K, D] to the layer's place, then attend q [T, H, D]."""
        if layer.sinks is not None or layer.alibi is not None:
            raise ConfigError(
                "attention_backend 'flash_attn' has neither sinks nor ALiBi, which this model "
                "needs; leave it on 'auto'"
            )
        metadata, cache = self.metadata, self.cache[layer.place]
        if k is not None and v is not None:
            kv_write(k, v, cache, metadata.slots[layer.group])
        lazy_fusion.flush()  # the package reads results of ops, which must have been launched
        paged = cache.transpose(2, 3)  # [N, 2, B, K, D]
        return self.attend(
            q,
            paged[:, 0],
            paged[:, 1],
            cache_seqlens=metadata.contexts,
            page_table=self.block_tables[layer.group],
            cu_seqlens_q=metadata.q_starts,
            max_seqlen_q=metadata.max_query,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(-1 if layer.window is None else layer.window - 1, -1),
            softcap=layer.softcap or 0.0,
        )


class Backend:
    """FlashAttention 3 over our cache, block by block."""

    supports_prefill_graphs = False

    def __init__(self, cache: list[Tensor]) -> None:
        self.cache = cache
        self.attend = _load_package().flash_attn_with_kvcache

    def plan(self, batch: AttentionMetadata) -> AttentionStep:
        # blocks before a window have been given back (-1): any block will do, it is not read
        tables = [
            (t if batch.rows is None else t.index_select(0, batch.rows)).clamp(min=0)
            for t in batch.tables
        ]
        return FlashAttentionStep(self.attend, self.cache, batch, tables)


def _load_package() -> Any:
    try:
        return import_module("flash_attn_interface")
    except ImportError as error:
        raise ConfigError(
            "attention_backend 'flash_attn' needs the package flash-attn-3 (module "
            "flash_attn_interface), which is not installed; install it or leave the backend on "
            "'auto'"
        ) from error
