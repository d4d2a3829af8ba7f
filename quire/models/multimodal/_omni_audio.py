"""Audio tower of Qwen2.5-Omni: Whisper's layers, in windows that see nothing of each other.

Each window of a recording has convolutions and positions of its own; pairs of positions are pooled.

Source: transformers modeling_qwen2_5_omni.py
Axes:   M mel bins, L frames of a recording, T positions of all windows, E hidden of the tower
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import Activation, AddLayerNorm, Conv1d, Linear, add
from quire.models._whisper_encoder import EPS, KERNEL, EncoderSizes, WhisperEncoderLayer
from quire.models.base import EncoderInput
from quire.models.multimodal._vit import Packing
from quire.sampling.h2d import move_tensor

MOST_POSITIONS = 7500
"""Of a recording of five minutes."""
TIMESCALE = 10_000.0


def sinusoids(positions: int, size: int) -> Tensor:
    """Sines and cosines of positions: float32 [positions, size], on the CPU."""
    with torch.device("cpu"):
        step = np.log(TIMESCALE) / (size // 2 - 1)
        rates = torch.exp(-step * torch.arange(size // 2).float())
        angles = torch.arange(positions)[:, None] * rates[None]
        return torch.cat((angles.sin(), angles.cos()), dim=1)


class OmniAudioTower(nn.Module):
    max_rows = MOST_POSITIONS

    def __init__(self, c: EncoderSizes, window: int, outputs: int) -> None:
        """window: positions of one."""
        super().__init__()
        if window < 1 or window > c.positions or c.hidden % 2 or c.hidden < 4:
            raise ConfigError(
                f"config.json: audio_config.n_window is {window} and d_model {c.hidden}; windows "
                f"must have 1 to {c.positions} positions, and vectors an even size from 4 on"
            )
        self.window = window
        self.conv1 = Conv1d(c.mel_bins, c.hidden, KERNEL)
        self.conv2 = Conv1d(c.hidden, c.hidden, KERNEL, stride=2)
        self.act = Activation("gelu")
        self.layers = nn.ModuleList(WhisperEncoderLayer(c) for _ in range(c.layers))
        self.norm = AddLayerNorm(c.hidden, EPS)
        self.projector = Linear(c.hidden, outputs, bias=True)
        self._positions = sinusoids(window, c.hidden)

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """input_features [M, L] of each item, of its audio alone -> rows."""
        windows = [self._windows(one.tensors["input_features"]) for one in items]
        x = torch.cat([one for own in windows for one in own])
        packed = Packing.of([len(one) for own in windows for one in own], x.device)
        res = None
        for layer in self.layers:
            x, res = layer(x, res, packed)
        x = x if res is None else add(x, res)
        lazy_fusion.flush()
        lengths = [sum(map(len, own)) for own in windows]
        pairs = [one[: len(one) // 2 * 2].unflatten(0, (-1, 2)) for one in x.split(lengths)]
        pooled = torch.cat([one.mean(1) for one in pairs])
        rows = self.projector(self.norm(pooled, None)[0])
        lazy_fusion.flush()
        return list(rows.split([length // 2 for length in lengths]))

    def _windows(self, features: Tensor) -> list[Tensor]:
        """Vectors of each window of a recording: [n, E]."""
        self._positions = move_tensor(self._positions, features.device)  # once
        found = []
        for one in features.to(self.conv1.weight.dtype).split(2 * self.window, dim=1):
            x = self.act(self.conv2(self.act(self.conv1(one))))
            lazy_fusion.flush()
            found.append(x.t() + self._positions[: x.shape[1]].to(x.dtype))
        return found
