"""Log-mel features of Phi-4-multimodal: high frequencies are emphasized first, no silence is added.

y[i] = 32768 * (x[i] - emphasis * x[i - 1])          in each window by itself
feature = ln(max(|rfft(hamming * y)|^2 @ filters, 1))
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LOUDEST = 32768.0
WINDOWS_PER_BLOCK = 1024
"""Windows that are transformed together."""


class EmphasizedMel:
    def __init__(
        self, bins: int, *, rate: int, n_fft: int, width: int, hop: int, emphasis: float, top: float
    ) -> None:
        """width, hop: samples of a window, and from one to the next. top: in Hz, of the filters."""
        self.width, self.hop, self._n_fft, self._emphasis = width, hop, n_fft, emphasis
        angles = 2 * np.pi * np.arange(width) / (width - 1)
        self._window = 0.54 - 0.46 * np.cos(angles)
        self._filters = mel_space_filters(n_fft // 2 + 1, bins, rate, top)

    def __call__(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """[n] -> [frames, bins]."""
        windows = np.lib.stride_tricks.sliding_window_view(samples, self.width)[:: self.hop]
        made = np.empty((len(windows), self._filters.shape[1]), np.float32)
        for low in range(0, len(windows), WINDOWS_PER_BLOCK):
            now = windows[low : low + WINDOWS_PER_BLOCK].astype(np.float32)
            before = np.concatenate((now[:, :1], now[:, :-1]), axis=1)
            loud = (now - np.float32(self._emphasis) * before) * np.float32(LOUDEST)
            spectrum = np.fft.rfft(self._window * loud, self._n_fft, axis=1)
            power = np.abs(spectrum.astype(np.complex64)) ** 2
            made[low : low + WINDOWS_PER_BLOCK] = np.log(np.maximum(power @ self._filters, 1.0))
        return made


def mel_space_filters(
    frequencies: int, bins: int, rate: int, top: float
) -> npt.NDArray[np.float32]:
    """Filters that are triangles over mels, as Kaldi has them: [frequencies, bins]."""

    def mels(hertz: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return 1127.0 * np.log(1.0 + np.asarray(hertz) / 700.0)

    edges = np.linspace(mels(0.0), mels(top), bins + 2)
    at = mels(rate / (2 * (frequencies - 1)) * np.arange(frequencies))[:, None]
    widths = np.diff(edges)
    rising, falling = (at - edges[:-2]) / widths[:-1], (edges[2:] - at) / widths[1:]
    return np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32)
