"""One sequence over a paged cache, without an engine: enough to step a built model anywhere.

Blocks are handed out in a shuffled order; those that a window has passed are given back and
poisoned, so a model that reads them shows NaN.
"""

import torch

from quire.attention import mla, paged
from quire.attention.base import AttentionMetadata
from quire.config.memory.kv_layout import group_layers
from quire.kernels.framework import lazy_fusion
from quire.layers import Attention
from quire.models.base import StepInputs

BLOCK = 16
NO_BLOCK = -1


class Stepper:
    """Feeds tokens to a model, any number at a time, and keeps the cache."""

    def __init__(
        self,
        model,
        config,
        *,
        dtype=torch.float32,
        max_tokens=700,
        seed=0,
        device="cpu",
        layers=None,
    ):
        self.model, self.length, self.device = model, 0, device
        layers = layers or config.attention_layers()
        self.groups = group_layers(layers)
        width = -(-max_tokens // BLOCK)
        pool = width * len(self.groups)
        own = next(module for module in model.modules() if isinstance(module, Attention))
        shape = (pool, layers[0].planes, own.kv_heads, BLOCK, own.head_dim)
        places = max(len(group.layers) for group in self.groups)
        self.cache = [
            torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(places)
        ]
        order = torch.randperm(pool, generator=torch.Generator().manual_seed(seed))
        self.tables = order.view(len(self.groups), width).int()
        self.backend = (mla if layers[0].latent else paged).Backend(self.cache)

    @torch.inference_mode()
    def hidden(self, ids):
        """Hidden states [n, E] of the next n tokens."""
        start, end = self.length, self.length + len(ids)
        self._give_back(start)
        positions = torch.arange(start, end)
        batch = AttentionMetadata(
            q_starts=self._there([0, len(ids)]),
            contexts=self._there([end]),
            tables=tuple(table[None].clone().to(self.device) for table in self.tables),
            slots=tuple(
                (table[positions // BLOCK].long() * BLOCK + positions % BLOCK).to(self.device)
                for table in self.tables
            ),
            max_query=len(ids),
            max_context=end,
            decodes=int(len(ids) == 1),
            past=start,
        )
        self.length = end
        positions = positions.int().to(self.device)
        hidden = self.model(StepInputs(self._there(ids), positions, self.backend.plan(batch)))
        lazy_fusion.flush()
        return hidden

    @torch.inference_mode()
    def logits(self, ids):
        """Logits [n, V] of the next n tokens."""
        logits = self.model.logits(self.hidden(ids))
        lazy_fusion.flush()
        return logits.float().cpu()

    def greedy(self, prompt, count):
        """The `count` best next tokens, one at a time."""
        logits, out = self.logits(prompt), []
        for _ in range(count):
            out.append(int(logits[-1].argmax()))
            logits = self.logits(out[-1:])
        return out

    def _there(self, ints):
        return torch.tensor(ints, dtype=torch.int32, device=self.device)

    def _give_back(self, start):
        """Blocks wholly before the window of the token at `start` are gone."""
        for group, table in zip(self.groups, self.tables, strict=True):
            gone = max(0, start - group.window + 1) // BLOCK if group.window else 0
            for at in range(gone):
                if int(table[at]) != NO_BLOCK:
                    table[at] = NO_BLOCK
