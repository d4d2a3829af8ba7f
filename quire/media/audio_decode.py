"""Audio files decoded to mono at one sampling rate, in blocks, so that a small file stays small.

soundfile reads WAV, FLAC, Ogg and MP3; PyAV reads MP4, WebM, AAC and AMR. Both are of the extra
"audio". A decoder gets only files whose first bytes name a format of this list: FFmpeg would
follow the addresses in a playlist.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError, Unsupported
from quire.media.audio_ops import MAX_RATE, MIN_RATE, Audio, Resampler
from quire.media.processor import DecodedAudio

if TYPE_CHECKING:
    from av.container import InputContainer

INSTALL = "pip install 'quire-llm[audio]'"
MAX_CHANNELS = 32
BLOCK_NUMBERS = 1 << 18
"""Of all channels, decoded at once: a block takes a megabyte."""
ESTIMATED = ("aac", "amr")
"""Formats whose length FFmpeg estimates: their headers have none."""
UNKNOWN_FRAMES = 1 << 40
"""What a header without a length is read as is more than this."""

SOUNDFILE_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "MPEG", "AIFF")
"""Formats of libsndfile that are read."""
NAMES = "WAV, FLAC, Ogg (Vorbis, Opus), MP3, AIFF, MP4 (M4A), WebM, AAC, AMR"


def decode_audio(data: bytes, rate: int, max_seconds: float) -> DecodedAudio:
    """Decode a file to mono at `rate` Hz: the mean of its channels.

    Raises RequestError for what is no audio file of NAMES, is damaged, empty or longer than
    max_seconds (by its header, or before the excess is decoded), and Unsupported if no decoder is
    installed.
    """
    kind = _sniff(data)
    if kind is None:
        blocks = _soundfile_blocks(data, max_seconds)
    else:
        blocks = _av_blocks(data, kind, max_seconds)
    found = _join(blocks, rate, max_seconds)
    if found is None:
        raise _invalid("has no samples")
    return found


def decode_sound(data: bytes, kind: str, rate: int, max_seconds: float) -> DecodedAudio | None:
    """Decode the first sound of a video, as decode_audio. None: it has none.

    kind: FFmpeg's name of the format. Raises RequestError.
    """
    return _join(_av_blocks(data, kind, max_seconds, silent=True), rate, max_seconds)


def _join(
    blocks: Iterator[tuple[int, Audio]], rate: int, max_seconds: float
) -> DecodedAudio | None:
    """Return all blocks in one array. None: there are none."""
    parts: list[Audio] = []
    resampler, seconds = None, 0.0
    for source, block in blocks:
        if resampler is None:
            resampler = Resampler(source, rate)
        seconds += len(block) / source
        if seconds > max_seconds:
            raise _too_long(max_seconds)
        if not np.isfinite(block).all():
            raise _invalid("has samples that are not finite")
        parts.append(resampler.push(block))
    if resampler is None or not seconds:
        return None
    parts.append(resampler.finish())
    return DecodedAudio(np.concatenate(parts), rate)


def mix_down(array: object, rate: int, target: int) -> Audio:
    """Return samples that a caller has, mono at rate `target`.

    array: [n] or, in either order, [channels, n]; integers are scaled by the largest of their type.
    Raises RequestError.
    """
    try:
        samples = np.asarray(array)
    except ValueError as error:
        raise _invalid(f"is no array: {error}") from None
    if samples.dtype.kind not in "iuf" or samples.ndim not in (1, 2) or not samples.size:
        raise _invalid(
            "must be numbers in one axis, or two with channels, and not empty; got an array of "
            f"{samples.dtype} with the shape {list(samples.shape)}"
        )
    if samples.dtype.kind == "u":
        raise _invalid(f"is of unsigned integers ({samples.dtype}); send floats or signed ones")
    if samples.dtype.kind == "i":
        samples = samples / np.float32(np.iinfo(samples.dtype).max + 1)
    if samples.ndim == 2:
        channels = int(np.argmin(samples.shape))
        if samples.shape[channels] > MAX_CHANNELS:
            raise _invalid(f"has {samples.shape[channels]} channels; at most {MAX_CHANNELS}")
        samples = samples.mean(axis=channels)
    if not np.isfinite(samples).all():
        raise _invalid("has samples that are not finite")
    resampler = Resampler(rate, target)
    first = resampler.push(np.ascontiguousarray(samples, np.float32))
    return np.concatenate((first, resampler.finish()))


def _invalid(problem: str) -> RequestError:
    return RequestError(f"the audio {problem}", param="audio")


def _too_long(seconds: float) -> RequestError:
    return _invalid(f"is longer than {seconds:g} seconds")


def _unreadable() -> RequestError:
    return _invalid(f"cannot be decoded: it is damaged, or none of {NAMES}")


def _sniff(data: bytes) -> str | None:
    """Return FFmpeg's name of the format. None: soundfile reads it."""
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if data[:6] == b"#!AMR\n" or data[:9] == b"#!AMR-WB\n":
        return "amr"
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xF6 == 0xF0:  # layer 0: ADTS, not MPEG
        return "aac"
    known = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"FORM", b"ID3")
    if data.startswith(known) or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0):
        return None
    raise _unreadable()


def _check_format(rate: int, channels: int) -> None:
    if not 1 <= channels <= MAX_CHANNELS:
        raise _invalid(f"has {channels} channels; at most {MAX_CHANNELS} are allowed")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise _invalid(f"has a sampling rate of {rate} Hz; {MIN_RATE} to {MAX_RATE} are allowed")


def _soundfile_blocks(data: bytes, max_seconds: float) -> Iterator[tuple[int, Audio]]:
    """(rate, [n] mono) of each block. A header of more than max_seconds is not followed."""
    try:
        import soundfile
    except ImportError:
        raise Unsupported(f"audio files need soundfile: {INSTALL}", param="audio") from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format not in SOUNDFILE_FORMATS:
                raise _unreadable()
            rate, channels = file.samplerate, file.channels
            _check_format(rate, channels)
            if max_seconds * rate < file.frames < UNKNOWN_FRAMES:
                raise _too_long(max_seconds)
            if file.frames >= UNKNOWN_FRAMES and file.format == "FLAC":
                yield from _av_blocks(data, "flac", max_seconds)  # soundfile cannot seek to its end
                return
            size = BLOCK_NUMBERS // channels
            while len(block := file.read(size, dtype="float32", always_2d=True)):
                yield rate, _mono(block)
    except soundfile.SoundFileError:
        raise _unreadable() from None


def _mono(block: NDArray[np.float32]) -> Audio:
    return block[:, 0] if block.shape[1] == 1 else block.mean(axis=1)


def _av_blocks(
    data: bytes, kind: str, max_seconds: float, silent: bool = False
) -> Iterator[tuple[int, Audio]]:
    """(rate, [n] mono) of each frame of the first audio stream. silent: there may be none."""
    try:
        import av
    except ImportError:
        raise Unsupported(f"{kind} files need PyAV: {INSTALL}", param="audio") from None
    try:
        with av.open(io.BytesIO(data), "r", format=kind, metadata_errors="replace") as container:
            if not container.streams.audio:
                if silent:
                    return
                raise _invalid("file has no audio stream")
            if kind not in ESTIMATED and _stated_seconds(container) > max_seconds:
                raise _too_long(max_seconds)
            planar, first = av.AudioResampler(format="fltp"), None
            for frame in container.decode(container.streams.audio[0]):
                shape = frame.sample_rate, frame.layout.nb_channels
                if first is None:
                    _check_format(*shape)
                first = first or shape
                if shape != first:
                    raise _invalid("changes its sampling rate or its channels")
                for whole in planar.resample(frame):
                    yield shape[0], whole.to_ndarray().mean(axis=0, dtype=np.float32)
    except (av.error.FFmpegError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise _unreadable() from None


def _stated_seconds(container: InputContainer) -> float:
    """Return what a header tells of the length of the first audio stream; 0: nothing."""
    stream = container.streams.audio[0]
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    alone = len(container.streams) == 1  # else it may be the length of another one
    return container.duration / 1e6 if alone and container.duration is not None else 0.0
