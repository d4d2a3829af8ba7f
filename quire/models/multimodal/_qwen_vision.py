"""Vision towers of Qwen and GLM: any size of image, rotary positions of rows and columns.

Frames are taken in pairs. Patches come in the order of the cells that they are merged in: merge x
merge neighbours make one row of the text model. Each pair of frames attends to itself only.

Axes: F frames, H x W pixels, C channels, P patches of all items, E width of the tower, n rows
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import (
    ACTIVATION_KINDS,
    Activation,
    AddLayerNorm,
    AddRMSNorm,
    EncoderAttention,
    LayerNorm,
    Linear,
    PatchLinear,
    PositionEmbedding,
    QKVLinear,
    RMSNorm,
    Rope,
    RopeConfig,
    add,
)
from quire.layers.rope import TokenAngles
from quire.layers.rope_scaling import AxialRope
from quire.models.base import run_to_end
from quire.models.multimodal._base import (
    GRAPH_TOKENS,
    EncoderInput,
    Hf,
    MediaEncoder,
    field_of,
    normalized_patches,
)
from quire.models.multimodal._resize import resized
from quire.sampling.h2d import to_device

MAX_SIDE = 16384
"""Patches along the longer side of an image: more than processors let an image have."""
GRAPH_SEGMENT, MORE_SEGMENTS = 16, 64
"""A graph has space for a segment for so many of its patches, and for more: of edges of items."""
MAX_ROWS = 16384
"""Rows of the largest image or video, as the processors' files on the hub limit them."""
Ints = npt.NDArray[np.int32]


class Taps(Hashable, Protocol):
    """How a square table of learned positions is stretched over a grid."""

    @property
    def side(self) -> int:
        """Positions along each side of the table."""
        ...

    def along(self, at: Ints, size: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        """(numbers, weights) of the learned positions around places of an axis, tap by tap."""
        ...


class Grid(NamedTuple):
    """Patches of an item along its axes."""

    pairs: int  # of frames
    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.pairs * self.rows * self.columns


MERGER_2_PATHS = {
    "patch_embed.proj": "patch_embed",
    "merger.ln_q": "merger.norm",
    "merger.mlp.0": "merger.fc1",
    "merger.mlp.2": "merger.fc2",
}
"""Names of Qwen2-VL and Qwen2.5-VL -> ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """Sizes that the towers share."""

    hidden: int
    layers: int
    heads: int
    mlp: int
    act: str
    outputs: int  # numbers of a row, of one level
    patch: int
    depth: int  # frames that a patch spans
    merge: int
    channels: int
    theta: float
    eps: float = 1e-6  # of norms
    qkv_bias: bool = True
    proj_bias: bool = True
    head_norms: bool = False  # of queries and keys


def tower_sizes(
    hf: Hf, *, hidden: str, act: str, outputs: str, mlp: int | None = None
) -> TowerConfig:
    """Read vision_config. hidden, outputs: names of fields. mlp: None: intermediate_size."""
    vision = field_of(hf, "vision_config", dict)
    width, heads = field_of(vision, hidden, int), field_of(vision, "num_heads", int)
    if heads < 1 or width % (4 * heads):
        raise ConfigError(
            f"config.json: vision_config.num_heads is {heads}; a quarter of {hidden}, which is "
            f"{width}, must be a multiple of it"
        )
    rope = field_of(vision, "rope_parameters", dict, default={})
    return TowerConfig(
        hidden=width,
        layers=field_of(vision, "depth", int),
        heads=heads,
        mlp=mlp or field_of(vision, "intermediate_size", int),
        act=field_of(vision, "hidden_act", str, default=act, one_of=ACTIVATION_KINDS),
        outputs=field_of(vision, outputs, int),
        patch=field_of(vision, "patch_size", int),
        depth=field_of(vision, "temporal_patch_size", int, default=2),
        merge=field_of(vision, "spatial_merge_size", int, default=2),
        channels=field_of(vision, "in_channels", int, default=3),
        theta=field_of(rope, "rope_theta", float, default=10000.0),
    )


@dataclass(frozen=True, slots=True)
class Segments:
    """Patches that attend to each other: [starts[i], starts[i + 1])."""

    starts: Tensor  # [S + 1] int32
    longest: int


class TowerAttention(nn.Module):
    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        head_dim = c.hidden // c.heads
        self.qkv = QKVLinear(c.hidden, c.heads, c.heads, head_dim, c.qkv_bias)
        self.proj = Linear(c.hidden, c.hidden, c.proj_bias)
        self.q_norm = RMSNorm(head_dim, c.eps) if c.head_norms else None
        self.k_norm = RMSNorm(head_dim, c.eps) if c.head_norms else None
        axes = (0,) * (head_dim // 4) + (1,) * (head_dim // 4)
        self.rope = Rope(RopeConfig(c.theta, head_dim, AxialRope(2), axes=axes), MAX_SIDE)
        self.attn = EncoderAttention(head_dim)

    def forward(self, x: Tensor, angles: TokenAngles, segments: Segments) -> Tensor:
        q, k, v = self.qkv(x)  # each [P, heads, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, k, angles)
        return self.proj(self.attn(q, k, v, segments.starts, segments.longest))


class TowerBlock(nn.Module):
    """A norm before attention and one before the MLP."""

    def __init__(
        self, c: TowerConfig, mlp: nn.Module, norm: type[AddLayerNorm | AddRMSNorm]
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(c.hidden, c.eps), norm(c.hidden, c.eps)
        self.attn, self.mlp = TowerAttention(c), mlp

    def forward(
        self, x: Tensor, res: Tensor | None, angles: TokenAngles, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """x [P, E] is what the block before adds to the residual; so is the first result."""
        x, res = self.norm1(x, res)
        x, res = self.norm2(self.attn(x, angles, segments), res)
        return self.mlp(x), res


class Merger(nn.Module):
    """Makes rows of the text model: a norm, and an MLP over all patches of a cell.

    norm: of the size of a patch, or of a whole cell.
    """

    def __init__(self, c: TowerConfig, norm: LayerNorm | RMSNorm) -> None:
        super().__init__()
        cell = c.hidden * c.merge**2
        self.norm = norm
        self.fc1 = Linear(cell, cell, bias=True)
        self.act = Activation("gelu")
        self.fc2 = Linear(cell, c.outputs, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, E] -> [P / merge^2, outputs]."""
        x = self.norm(x.view(-1, self.norm.size)).view(-1, self.fc1.inputs)
        return self.fc2(self.act(self.fc1(x)))


class VisionTower(MediaEncoder):
    """Base of the towers.

    An item is "pixels" uint8 [F, H, W, C], "scale_shift" float32 [2, C] of each channel, and
    "cells" uint8 [rows, columns], whose shape is that of the grid of cells to resize to.
    """

    modalities: tuple[str, ...] = ("image", "video")
    blocks: nn.ModuleList

    def __init__(self, c: TowerConfig, *, patch_bias: bool = False) -> None:
        super().__init__()
        self.config, self.width = c, c.outputs
        kernel = (c.depth, c.patch, c.patch)
        self.patch_embed = PatchLinear(c.channels, kernel, c.hidden, patch_bias)

    def max_rows(self, modality: str) -> int:
        return MAX_ROWS

    @property
    def slices(self) -> int:
        return len(self.blocks)

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        lazy_fusion.flush()
        grids = [self._grid(item) for item in items]
        rows = self.run(joined([self.patches_of(item) for item in items]), grids)
        return self._split(rows, grids)

    def encode_in_slices(
        self, items: Sequence[EncoderInput]
    ) -> Generator[None, None, list[Tensor]]:
        lazy_fusion.flush()
        grids = [self._grid(item) for item in items]
        rows = yield from self._blocks(joined([self.patches_of(item) for item in items]), grids)
        return self._split(rows, grids)

    def _split(self, rows: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        lazy_fusion.flush()
        return list(rows.split([grid.patches // self.config.merge**2 for grid in grids]))

    def run(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Rows [n, width] of patches [P, C * depth * patch * patch]."""
        size = None if self.graphs is None else self.graphs.size_for(len(patches))
        arrays = None if size is None else self._padded(grids, size)
        if self.graphs is not None and size is not None and arrays is not None:
            rows = self.graphs.run(size, patches, arrays)
            return rows[: len(patches) // self.config.merge**2]
        return run_to_end(self._blocks(patches, grids))

    def _blocks(self, patches: Tensor, grids: Sequence[Grid]) -> Generator[None, None, Tensor]:
        """compute() of grids."""
        found = self.arrays(grids)
        longest = {name: _longest(found[name]) for name in self.segments(len(patches))}
        on_device = {name: to_device(one, patches.device) for name, one in found.items()}
        return (yield from self.compute(patches, on_device, longest))

    def arrays(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        """What compute() reads of grids, and the starts of segments, "frames" among them."""
        lengths = [g.rows * g.columns for g in grids for _ in range(g.pairs)]
        return {"positions": self.positions(grids), "frames": starts_of(lengths)}

    def segments(self, patches: int) -> Mapping[str, int]:
        """Names of arrays of starts -> patches of the longest segment that they may have."""
        return {"frames": patches}

    @abstractmethod
    def compute(
        self, patches: Tensor, arrays: Mapping[str, Tensor], longest: Mapping[str, int]
    ) -> Generator[None, None, Tensor]:
        """Rows of a forward pass, which stops behind each block. arrays, longest: as arrays() and
        segments() name them."""

    def graph_sizes(self) -> Sequence[int]:
        return [size for size in GRAPH_TOKENS if size % self.config.merge**2 == 0]

    def graph_inputs(self, size: int) -> tuple[int, Mapping[str, np.ndarray]]:
        arrays = self._padded([], size)
        assert arrays is not None
        return self.patch_embed.inputs, arrays

    def graph_forward(self, size: int, patches: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        return run_to_end(self.compute(patches, arrays, self.segments(size)))

    def _padded(self, grids: Sequence[Grid], size: int) -> dict[str, np.ndarray] | None:
        """Arrays of grids and of more, that all have `size` patches. None: too many segments.

        The grids behind the others are strips of cells, no longer than the table of angles; their
        rows are dropped.
        """
        merge, missing = self.config.merge, size - sum(g.patches for g in grids)
        longest = self._rope.max_len // merge
        full, rest = divmod(missing // merge**2, longest)
        more = [Grid(full, merge, longest * merge)] if full else []
        more += [Grid(1, merge, rest * merge)] if rest else []
        arrays = self.arrays([*grids, *more])
        for name in self.segments(size):
            starts, most = arrays[name], size // GRAPH_SEGMENT + MORE_SEGMENTS
            if len(starts) > most:
                return None
            arrays[name] = np.concatenate([starts, np.full(most - len(starts), size, np.int32)])
        return arrays

    def angles(self, positions: Tensor) -> TokenAngles:
        """Rotary angles of patches at (row, column): int32 [2, P]."""
        return self._rope.gather(positions)

    @property
    def _rope(self) -> Rope:
        return self.blocks[0].attn.rope  # type: ignore[union-attr, return-value]

    def positions(self, grids: Iterable[Grid]) -> Ints:
        """(row, column) of every patch: [2, P]."""
        merge = self.config.merge
        cells = [np.tile(cell_positions(g.rows, g.columns, merge), g.pairs) for g in grids]
        return np.concatenate(cells, axis=1)

    def learned(self, grids: Sequence[Grid], taps: Taps) -> dict[str, np.ndarray]:
        """Learned positions around every patch, "places", and "shares" of them: [taps, P].

        taps: of (places along an axis, how many the axis has) -> rows or columns of the table, and
        their weights, one after another.
        """
        merge = self.config.merge
        found = [(_taps_of_cells(g.rows, g.columns, merge, taps), g.pairs) for g in grids]
        return {
            "places": np.concatenate([np.tile(one, pairs) for (one, _), pairs in found], axis=1),
            "shares": np.concatenate([np.tile(one, pairs) for (_, one), pairs in found], axis=1),
        }

    def interpolate(self, table: PositionEmbedding, arrays: Mapping[str, Tensor]) -> Tensor:
        """Learned position of every patch, made of those around it: [P, E]."""
        total = None
        for tap, share in zip(arrays["places"], arrays["shares"], strict=True):
            vectors = table(tap)
            lazy_fusion.flush()  # the vectors are read by torch
            added = vectors * share[:, None]
            total = added if total is None else total + added
        assert total is not None
        return total.to(vectors.dtype)

    def _grid(self, item: EncoderInput) -> Grid:
        c, (rows, columns) = self.config, item.tensors["cells"].shape
        pairs = -(-len(item.tensors["pixels"]) // c.depth)
        grid = Grid(pairs, rows * c.merge, columns * c.merge)
        most = self._rope.max_len
        assert max(grid.rows, grid.columns) <= most, "an image that no processor makes"
        return grid

    def patches_of(self, item: EncoderInput) -> Tensor:
        """Normalized patches of one item: [P, C * depth * patch * patch]."""
        frames = item.tensors["pixels"].split(self.config.depth)  # not all at once: floats are wide
        return joined([self._pair_patches(pair, item) for pair in frames])

    def _pair_patches(self, pixels: Tensor, item: EncoderInput) -> Tensor:
        """Normalized patches of a pair of frames; a last one without another is both."""
        c, (rows, columns) = self.config, item.tensors["cells"].shape
        cell, dtype = c.patch * c.merge, self.blocks[0].norm1.weight.dtype  # type: ignore[union-attr]
        images = resized(pixels, rows * cell, columns * cell)
        scale_shift = item.tensors["scale_shift"]
        return normalized_patches(images, scale_shift, c.patch, dtype, c.depth, c.merge)  # type: ignore[arg-type]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts; no copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def starts_of(lengths: Sequence[int]) -> Ints:
    """Starts of segments, and the end of the last."""
    return np.cumsum([0, *lengths], dtype=np.int32)


def segments_of(lengths: Sequence[int], device: torch.device) -> Segments:
    """Segments of these lengths, one after another."""
    return Segments(to_device(starts_of(lengths), device), max(lengths))


def _longest(starts: Ints) -> int:
    return int(np.diff(starts).max())


def sum_of(x: Tensor, res: Tensor | None) -> Tensor:
    """What the norm after a block would read."""
    return x if res is None else add(x, res)


@functools.lru_cache(256)
def cell_positions(rows: int, columns: int, merge: int) -> Ints:
    """(row, column) of the patches of one pair of frames, cell by cell: [2, rows * columns]."""
    at = np.indices((rows, columns), np.int32)
    cells = at.reshape(2, rows // merge, merge, columns // merge, merge)
    return cells.transpose(0, 1, 3, 2, 4).reshape(2, -1)


@functools.lru_cache(64)
def _taps_of_cells(
    rows: int, columns: int, merge: int, taps: Taps
) -> tuple[Ints, npt.NDArray[np.float32]]:
    """Numbers of the learned positions around each patch, and their weights: [n, patches]."""
    row, column = cell_positions(rows, columns, merge)
    pairs = [(a, b) for a in taps.along(row, rows) for b in taps.along(column, columns)]
    places = np.stack([a[0] * taps.side + b[0] for a, b in pairs])
    return places.astype(np.int32), np.stack([(a[1] * b[1]).astype(np.float32) for a, b in pairs])
