"""Contract of an attention backend. A backend owns no memory: it is given the KV cache and a batch.

`plan` runs once per step, `run` once per layer. The step is an argument of the model's forward
pass; nothing is looked up globally.

Axes: T tokens in the step, S sequences, H query heads, K kv heads, D head size, W table width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.formats.shared_prefixes import SharedPrefixes


@dataclass(frozen=True, slots=True)
class BackendCapabilities:
    """What a backend can do, as data that `select_backend` compares with the needs of a model."""

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    sliding_window: bool = True
    softcap: bool = True
    max_head_dim: int | None = None
    sinks: bool = False
    alibi: bool = False
    spans: bool = False  # tokens that see others after them
    encoder: bool = False  # cross attention, and a bias by distance
    coded_cache: bool = False  # keys and values in codes of 8 bits
    latent: bool = False  # one latent per token instead of keys and values, and nothing else
    packed: bool = False  # tokens of a step attend to each other, without a cache, and nothing else


@dataclass(frozen=True, slots=True)
class CrossMetadata:
    """The source of each query token: cross attention sees all of it, whatever the position."""

    table: Tensor  # [T, W] int32 blocks; [M, W] with `rows`
    lengths: Tensor  # [T] int32 tokens; 0: nothing is seen
    starts: Tensor  # [T + 1] int32: 0, 1, 2, ...
    rows: Tensor | None = None  # [T] int32: token t has table[rows[t]]; None: table[t]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The sequences of one step, as tensors on the device.

    Sequence s owns the query rows [q_starts[s], q_starts[s+1]), the last of its contexts[s]
    tokens. `tables` and `slots` have one entry per layer group. A padding row has context 0 and
    slot -1. The host's bounds may be far above the tensors' values when a captured step replays.
    """

    q_starts: Tensor  # [S+1] int32
    contexts: Tensor  # [S] int32, the step's tokens included
    tables: tuple[Tensor, ...]  # each [S, W] int32; [M, W] with `rows`
    slots: tuple[Tensor, ...]  # each [T] int64
    max_query: int
    max_context: int
    rows: Tensor | None = None  # [S] int32: sequence s has tables[g][rows[s]]; None: tables[g][s]
    decodes: int = 0  # leading sequences that have one query token each
    past: int | None = None  # most tokens another sequence has before this step's. None: unknown
    cross: CrossMetadata | None = None  # of a model with an encoder
    spans: Tensor | None = None  # [T, 2] int32: positions that a token sees besides; None: no token
    shared: SharedPrefixes | None = None  # of the `decodes` sequences; None: each reads all keys
    prompts: Sequence[tuple[int, int]] = ()
    """Queries and contexts, as the host has them, of the sequences after `decodes`; (): unknown."""
    balanced: bool = False
    """Whether the keys of the `decodes` sequences are divided evenly, because some context is
    long."""
    drafts: bool = False
    """Whether all rows decode, and may be of one sequence, one after the other: each sees the keys
    that those before it write in this step."""


class AttentionLayer(Protocol):
    """The facts of a layer that a backend needs: quire.layers.attention.Attention has them."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    alibi: Tensor | None
    spans: bool  # whether those of a step count
    k_scale: float
    v_scale: float
    head_scales: Tensor | None  # [2, K] float32 of a cache of 8 bits, in place of both
    group: int
    place: int

    @property
    def position_bias(self) -> Tensor | None:
        """[H, 2 R + 1] float32: added to a score by the key's distance. None: nothing is."""
        ...


class AttentionStep(Protocol):
    """One step's attention, for every layer in turn."""

    def run(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> Tensor:
        """Write k, v [T, K, D] to the cache, then attend q [T, H, D]. Returns [T, H, D].

        Without k and v, an earlier layer of the step has written them: their place is its own.
        q, k and v are used up: fused with what made them, they may never have been written.
        """
        ...


class SpanAttentionStep(AttentionStep, Protocol):
    """One step's attention in which tokens of an image see each other in both directions."""

    def with_spans(self, spans: Tensor) -> AttentionStep:
        """The step in which token t also sees positions [spans[t, 0], spans[t, 1]), int32."""
        ...


class SharedAttentionStep(AttentionStep, Protocol):
    """One step's attention in which leading keys that sequences share are read once."""

    def with_shared(self, shared: SharedPrefixes) -> AttentionStep:
        """The step with these groups of its sequences, all of one query."""
        ...


class BalancedAttentionStep(AttentionStep, Protocol):
    """One step's attention in which the keys of decoding sequences can be divided evenly."""

    def with_balance(self) -> AttentionStep:
        """The step in which one long context is read by many programs, whatever the others are."""
        ...


class CrossAttentionStep(AttentionStep, Protocol):
    """One step's attention of a model with an encoder."""

    def run_cross(self, q: Tensor, layer: AttentionLayer) -> Tensor:
        """Attend q [T, H, D] to the sources of its tokens. Returns [T, H, D]."""
        ...

    def write_cross(self, k: Tensor, v: Tensor, slots: Tensor, layer: AttentionLayer) -> None:
        """Write k, v [T, K, D] of sources to their slots [T]: block * block size + offset."""
        ...

    def with_sources(self, cross: CrossMetadata) -> AttentionStep:
        """The step whose tokens see other sources."""
        ...

    @property
    def source_lengths(self) -> Tensor:
        """[T] int32: tokens of its source that each token sees."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a block of the cache."""
        ...


class Backend(Protocol):
    """A way to attend over the paged cache."""

    supports_prefill_graphs: bool
    """Whether a step with prompts can be captured: no layer depends on values of the host."""

    def __init__(self, cache: list[Tensor]) -> None:
        """cache: one [N, 2, K, B, D] per layer place.

        One with coded_cache takes a second argument: scales [N, 2, K, B] of each place.
        """
        ...

    def plan(self, batch: AttentionMetadata) -> AttentionStep:
        """Do what all layers share. The batch's tensors are read when a layer runs, not copied."""
        ...
