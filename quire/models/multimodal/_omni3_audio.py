"""Audio tower of Qwen3-Omni: convolutions over chunks of a recording, and layers over windows.

A chunk is a map of mel bins and frames, which three convolutions halve on both axes; the numbers of
all bins at a time are the vector of a position. The last chunk of a recording is filled up with
zeros, unless it is the only one. Positions attend to those of the same window of chunks.

Each recording is computed by itself. In transformers the only chunk of a short one is filled up
too, beside a longer recording in the same call, which changes its last positions a little.

Source: transformers modeling_qwen3_omni_moe.py
Axes:   M mel bins, L frames of a recording, N chunks, F frames of a chunk, C channels, T positions
        of a chunk, E hidden of the tower
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import Activation, AddLayerNorm, Conv2d, Linear
from quire.models._whisper_encoder import EPS, EncoderSizes, WhisperEncoderLayer
from quire.models.base import EncoderInput, Hf, field_of
from quire.models.multimodal._omni_audio import sinusoids
from quire.models.multimodal._vit import Packing
from quire.sampling.h2d import move_tensor

MOST_SECONDS, FRAMES_PER_SECOND = 1200, 100
"""Of a recording; quire.media.processors.qwen3_omni_moe makes no more."""
KERNEL, STRIDE, PADDING = 3, 2, 1
CHUNKS_AT_ONCE = 32
"""Whose maps are in memory together: 32 of the released model take 100 MB."""


def halved(size: int) -> int:
    """What the three convolutions leave of an axis."""
    for _ in range(3):
        size = (size - 1) // 2 + 1
    return size


class ChunkedAudioTower(nn.Module):
    def __init__(self, c: EncoderSizes, hf: Hf, outputs: int) -> None:
        """hf: audio_config. Raises ConfigError."""
        super().__init__()
        window = field_of(hf, "n_window", int, default=50)
        reach = field_of(hf, "n_window_infer", int, default=800)
        if window < 1 or reach < 2 * window or c.hidden % 2 or c.hidden < 4:
            raise ConfigError(
                f"config.json: audio_config.n_window is {window}, n_window_infer {reach} and "
                f"d_model {c.hidden}; n_window must be positive, n_window_infer at least twice as "
                "much, and d_model even and at least 4"
            )
        channels = field_of(hf, "downsample_hidden_size", int, default=480)
        self.chunk, self.chunks_of_window = 2 * window, reach // (2 * window)
        self.conv2d1 = Conv2d(1, channels, KERNEL, STRIDE, PADDING)
        self.conv2d2 = Conv2d(channels, channels, KERNEL, STRIDE, PADDING)
        self.conv2d3 = Conv2d(channels, channels, KERNEL, STRIDE, PADDING)
        self.gelu = Activation("gelu")
        self.conv_out = Linear(channels * halved(c.mel_bins), c.hidden)
        self.layers = nn.ModuleList(WhisperEncoderLayer(c) for _ in range(c.layers))
        self.ln_post = AddLayerNorm(c.hidden, EPS)
        self.proj1 = Linear(c.hidden, c.hidden, bias=True)
        self.act = Activation(c.act)
        self.proj2 = Linear(c.hidden, outputs, bias=True)
        self._positions = sinusoids(halved(self.chunk), c.hidden)

    @property
    def max_rows(self) -> int:
        """Rows of the longest recording."""
        return -(-MOST_SECONDS * FRAMES_PER_SECOND // self.chunk) * halved(self.chunk)

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """input_features [M, L] of each item, of its audio alone -> rows."""
        embedded = [self._embed(one.tensors["input_features"]) for one in items]
        lengths = [len(one) for one in embedded]
        window = halved(self.chunk) * self.chunks_of_window
        windows = [
            min(window, length - at) for length in lengths for at in range(0, length, window)
        ]
        x, res = torch.cat(embedded), None
        packed = Packing.of(windows, x.device)
        for layer in self.layers:
            x, res = layer(x, res, packed)
        rows = self.proj2(self.act(self.proj1(self.ln_post(x, res)[0])))
        lazy_fusion.flush()
        return list(rows.split(lengths))

    def _embed(self, features: Tensor) -> Tensor:
        """Vectors of the positions of a recording: [M, L] -> [n, E]."""
        self._positions = move_tensor(self._positions, features.device)  # once
        bins, frames = features.shape
        size = min(frames, self.chunk)
        last = (frames - 1) % size + 1
        filled = functional.pad(features, (0, size - last)).to(self.conv2d1.weight.dtype)
        chunks = filled.view(bins, -1, size).transpose(0, 1)  # [N, M, F]
        found = torch.cat([self._convolve(some) for some in chunks.split(CHUNKS_AT_ONCE)])
        x = found + self._positions[: found.shape[1]].to(found.dtype)
        return x.flatten(0, 1)[: len(x) * x.shape[1] - halved(size) + halved(last)]

    def _convolve(self, chunks: Tensor) -> Tensor:
        """[N, M, F] -> [N, T, E]."""
        x = chunks.unsqueeze(-1)
        for conv in (self.conv2d1, self.conv2d2, self.conv2d3):
            x = self.gelu(conv(x))
        lazy_fusion.flush()
        x = x.permute(0, 2, 3, 1)  # [N, T, C, M']
        y: Tensor = self.conv_out(x.reshape(-1, self.conv_out.inputs))
        lazy_fusion.flush()
        return y.view(len(x), x.shape[1], -1)
