"""Audio operations: resampling of mono audio and log-mel features, on arrays of NumPy.

Audio is float32 in [-1, 1]. Features are those of transformers' WhisperFeatureExtractor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from quire.errors import RequestError

Audio = NDArray[np.float32]
"""[n] mono samples."""

MIN_RATE, MAX_RATE = 4000, 384_000
"""Sampling rates that are read, in Hz."""
MAX_AMPLITUDE = 1e10
"""Of a sample. Some send integers of 16 or 32 bits as floats."""

# -- resampling --------------------------------------------------------------------------------

MAX_DENOMINATOR = 1000
"""Ratios of rates that need a larger one are approximated: less than 1e-6 off, 4 ms in an hour."""
ZERO_CROSSINGS = 64
"""Of the sinc on each side, at the lower of the two rates."""
ROLLOFF = 0.9475937
"""The cut-off as a share of the lower Nyquist frequency; the stop band begins at that frequency."""
KAISER_BETA = 14.769656
MIN_OUTPUTS = 128
"""Outputs of one row of the product: few would leave most of a product of matrices unused."""
MAX_ROWS = 256
"""Rows of one product, which bounds the memory of their copies of the input."""


class Resampler:
    """Changes the sampling rate of audio that comes in blocks, with a polyphase FIR filter.

    Rows of `step` inputs become rows of `outputs` outputs by one matrix: output k of a row is the
    sinc around input k * step / outputs, with a Kaiser window.
    """

    def __init__(self, source: int, target: int) -> None:
        """Rates in Hz. Raises RequestError for a source outside of MIN_RATE to MAX_RATE."""
        if not MIN_RATE <= source <= MAX_RATE:
            raise RequestError(
                f"the sampling rate of the audio is {source} Hz; it must be {MIN_RATE} to "
                f"{MAX_RATE} Hz",
                param="audio",
            )
        self._rates = source, target
        self._is_copy = source == target
        ratio = Fraction(target, source).limit_denominator(MAX_DENOMINATOR)
        self._matrix, self._step, self._half = _polyphase_matrix(ratio)
        self._buffer = np.zeros(self._half, np.float32)
        self._inputs = self._outputs = 0

    def push(self, block: Audio) -> Audio:
        """Return the outputs that the inputs so far determine.

        Raises RequestError for samples beyond MAX_AMPLITUDE: features of such are not finite.
        """
        if block.size and max(block.max(), -block.min()) > MAX_AMPLITUDE:
            message = f"the audio has samples beyond {MAX_AMPLITUDE:g}; they are within -1 and 1"
            raise RequestError(message, param="audio")
        if self._is_copy:
            return block
        self._inputs += len(block)
        self._buffer = np.concatenate((self._buffer, block))
        return self._run()

    def finish(self) -> Audio:
        """Return the rest, as if zeros followed. There are ceil(inputs * target / source)."""
        if self._is_copy:
            return np.empty(0, np.float32)
        source, target = self._rates
        left = -(-self._inputs * target // source) - self._outputs
        rows = -(-left // self._matrix.shape[1])
        needed = rows * self._step + len(self._matrix) - len(self._buffer)
        self._buffer = np.concatenate((self._buffer, np.zeros(max(needed, 0), np.float32)))
        return self._run()[:left]

    def _run(self) -> Audio:
        taps, outputs = self._matrix.shape
        rows = max((len(self._buffer) - taps) // self._step + 1, 0)
        made = np.empty((rows, outputs), np.float32)
        stride = self._buffer.itemsize
        for low in range(0, rows, MAX_ROWS):
            high = min(low + MAX_ROWS, rows)
            view = as_strided(
                self._buffer[low * self._step :],
                (high - low, taps),
                (self._step * stride, stride),
                writeable=False,
            )
            np.matmul(np.ascontiguousarray(view), self._matrix, out=made[low:high])
        self._buffer = self._buffer[rows * self._step :]
        self._outputs += made.size
        return made.reshape(-1)


@functools.lru_cache(maxsize=8)
def _polyphase_matrix(ratio: Fraction) -> tuple[NDArray[np.float32], int, int]:
    """Return the matrix [taps, outputs] of one row, the inputs between two rows, and the inputs
    before the first output that it reads."""
    repeats = -(-MIN_OUTPUTS // ratio.numerator)
    outputs, step = ratio.numerator * repeats, ratio.denominator * repeats
    cut = ROLLOFF * min(1.0, float(ratio))  # as a share of the source's Nyquist frequency
    half = int(np.ceil(ZERO_CROSSINGS / cut))
    taps = step + 2 * half
    centres = np.arange(outputs) * (step / outputs) + half
    distance = (np.arange(taps)[:, None] - centres[None]) * cut
    inside = np.abs(distance) < ZERO_CROSSINGS
    window = np.i0(KAISER_BETA * np.sqrt(np.where(inside, 1 - (distance / ZERO_CROSSINGS) ** 2, 0)))
    weights = np.where(inside, np.sinc(distance) * window, 0.0)
    weights /= weights.sum(axis=0)  # a constant stays what it is
    return weights.astype(np.float32), step, half


def resample(audio: Audio, source: int, target: int) -> Audio:
    """[n] at rate `source` -> [ceil(n * target / source)] at rate `target`. Raises RequestError."""
    resampler = Resampler(source, target)
    first = resampler.push(audio)
    return np.concatenate((first, resampler.finish()))


# -- cutting --------------------------------------------------------------------------------------

SEARCH_SECONDS = 5.0
"""The end of a piece in which the quietest place is looked for."""
WINDOW_SECONDS = 0.1


def split_at_quiet(audio: Audio, rate: int, longest: int) -> list[range]:
    """Cut audio [n] into pieces of at most `longest` samples, at the middle of quiet windows."""
    pieces, start = [], 0
    window, search = int(WINDOW_SECONDS * rate), int(SEARCH_SECONDS * rate)
    while len(audio) - start > longest:
        low = start + longest - min(search, longest // 2)
        energies = np.cumsum(np.square(audio[low : start + longest], dtype=np.float64))
        quietest = int(np.argmin(energies[window:] - energies[:-window]))
        end = low + quietest + window // 2
        pieces.append(range(start, end))
        start = end
    return [*pieces, range(start, len(audio))]


# -- log-mel features --------------------------------------------------------------------------

MEL_FLOOR = 1e-10
DYNAMIC_RANGE = 8.0
"""Powers of ten below the loudest feature at which features are cut."""
FRAMES_PER_BLOCK = 256
"""Frames that are transformed together, so that they stay in the processor's cache."""


class LogMel:
    """Log-mel features as WhisperFeatureExtractor computes them, padded with silence.

    They differ from its own by at most 1e-3, where they are far below the loudest: both transform
    in float32. Frames behind the audio are silent, so they are filled and not computed.
    """

    def __init__(
        self, bins: int, *, rate: int = 16_000, n_fft: int = 400, hop: int = 160, seconds: int = 30
    ) -> None:
        """bins: mel bins. seconds: of audio that features are padded to or cut at."""
        self.rate, self.hop, self.samples = rate, hop, seconds * rate
        self.frames = self.samples // hop
        self.bins, self._n_fft = bins, n_fft
        self._window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n_fft) / n_fft)).astype(np.float32)
        self._halves = _halve_filters(mel_filters(n_fft // 2 + 1, bins, rate))

    def __call__(self, audio: Audio, *, pad: bool = True) -> NDArray[np.float32]:
        """[n] -> [bins, frames]; without padding, one frame for each `hop` samples."""
        audio = audio[: self.samples]
        total = self.frames if pad else len(audio) // self.hop
        padded = self._pad(audio, self.samples if pad else len(audio))
        count = min(
            total, -(-(len(audio) + self._n_fft // 2) // self.hop)
        )  # that overlap the audio
        power = np.zeros((total, self.bins), np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(padded, self._n_fft)[:: self.hop]
        rfft = _rfft()
        for low in range(0, count, FRAMES_PER_BLOCK):
            high = min(low + FRAMES_PER_BLOCK, count)
            squares = rfft(windows[low:high] * self._window).view(np.float32)
            np.multiply(squares, squares, out=squares)
            energies = squares[:, ::2] + squares[:, 1::2]
            for frequencies, bins, filters in self._halves:
                power[low:high, bins] += energies[:, frequencies] @ filters
        np.maximum(power, MEL_FLOOR, out=power)
        np.log10(power, out=power)
        np.maximum(power, power.max(initial=-np.inf) - DYNAMIC_RANGE, out=power)
        power += 4.0
        power *= 0.25
        return np.ascontiguousarray(power.T)

    def _pad(self, audio: Audio, length: int) -> Audio:
        """Half a window of mirrored audio on each side, and silence up to `length` between."""
        half = self._n_fft // 2
        head = np.zeros(half + 1, np.float32)
        head[: min(len(audio), half + 1)] = audio[: half + 1]
        tail = np.zeros(half + 1, np.float32)
        if len(audio) > length - half - 1:
            kept = audio[max(length - half - 1, 0) :]
            tail[: len(kept)] = kept
        silence = np.zeros(length - len(audio), np.float32)
        return np.concatenate((head[:0:-1], audio, silence, tail[-2::-1]))


@functools.lru_cache(maxsize=4)
def mel_filters(frequencies: int, bins: int, rate: int) -> NDArray[np.float32]:
    """Triangular filters of Slaney's mel scale and norm, up to half the rate: [frequencies, bins].

    The scale is linear below 1 kHz and logarithmic above.
    """
    top = rate / 2
    mels = np.linspace(0.0, 15 + 27 * np.log(top / 1000) / np.log(6.4), bins + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))
    at = np.linspace(0.0, top, frequencies)[:, None]
    widths = np.diff(edges)
    rising, falling = (at - edges[:-2]) / widths[:-1], (edges[2:] - at) / widths[1:]
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))
    return filters.astype(np.float32)


def _halve_filters(
    filters: NDArray[np.float32],
) -> list[tuple[slice, slice, NDArray[np.float32]]]:
    """Return (frequencies, bins, their filters) of the lower and the upper frequencies.

    Most bins cover the lower ones only, so the two products are half of the whole one.
    """
    middle = len(filters) // 2
    halves = []
    for frequencies in (slice(middle), slice(middle, None)):
        covered = np.flatnonzero(filters[frequencies].any(axis=0))
        bins = slice(int(covered[0]), int(covered[-1]) + 1)
        halves.append((frequencies, bins, np.ascontiguousarray(filters[frequencies, bins])))
    return halves


@functools.cache
def _rfft() -> Callable[[Any], Any]:
    """Return the FFT of real rows: SciPy's transforms several at once, which takes a third."""
    try:
        from scipy.fft import rfft
    except ImportError:
        return np.fft.rfft
    return rfft  # type: ignore[no-any-return]  # SciPy has no types
