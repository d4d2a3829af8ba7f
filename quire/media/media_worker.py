"""Worker process that decodes media and makes an encoder's tensors of them, and its messages.

    API process (quire.media.pipeline)                 worker
    StartMediaWorker, once           ──▶
                                     ◀──     MediaWorkerReady
    MediaJob                         ──▶
                                     ◀──     MediaResult, JobRefused, JobOutOfMemory, JobFailed, or
                                             its end: over a limit

The worker has the files of a processor and nothing else: no key in its environment, no file, no
socket but this one (quire.sandbox.landlock).
"""

from __future__ import annotations

import ctypes
import io
import itertools
import json
import math
import os
import socket
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
from PIL import Image

from quire.core.media.item_tensors import attach_data, detach_data
from quire.core.types import MediaTensor
from quire.errors import QuireError, RequestError
from quire.media import decode
from quire.media.audio_decode import decode_audio, decode_sound, mix_down
from quire.media.limits import MediaLimits
from quire.media.native.library import load_library
from quire.media.processor import (
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    DecodedVideo,
    MediaProcessor,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
    VideoInfo,
    processor_type,
    reads_sound,
)
from quire.sandbox.heap import keep_freed_memory
from quire.sandbox.landlock import restrict_process
from quire.sandbox.limits import setup_worker_process
from quire.sandbox.pipe import WorkerPipe
from quire.sandbox.worker_loop import JobFailed, JobOutOfMemory, JobRefused, WorkerLoop

MAX_MEMORY_GROWTH = 1 << 28
"""Bytes that jobs may leave behind, all together: then the worker ends."""
NICENESS = 5
"""Lower priority than engines and API processes."""


class StartMediaWorker(msgspec.Struct, frozen=True, tag=True):
    """The first message to a worker. files: JSON of config, preprocessors and processor.

    library: see quire.media.native.library.find_library(); "" for recordings.
    """

    family: str
    files: bytes
    library: str = ""


class MediaWorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The worker takes jobs."""


class MediaJob(msgspec.Struct, frozen=True, tag=True):
    """Decode and process one item."""

    modality: Modality
    where: str
    """Its place in the request, for errors."""
    content: bytes
    """An encoded file; with `shape` the numbers of an array, or a memoryview of them."""
    shape: tuple[int, ...] | None
    """Of decoded pixels (uint8) or samples (float32)."""
    details: bytes
    """JSON of what belongs to an array: the sampling rate; or of a video its VideoInfo, and the
    shape and rate of its sound, whose samples are behind the pixels."""
    kwargs: bytes
    """JSON of mm_processor_kwargs."""
    io_kwargs: bytes
    """JSON of media_io_kwargs of this modality."""
    limits: MediaLimits
    seconds: float
    """Of processor time."""
    memory: int
    """Bytes beyond what the worker has."""

    def detached(self) -> tuple[MediaJob, list[bytes]]:
        """As quire.sandbox.pipe.HasArrays: the numbers of an array travel behind it."""
        if self.shape is None:
            return self, []
        return msgspec.structs.replace(self, content=b""), [self.content]

    def attached(self, arrays: Iterator[Any]) -> MediaJob:
        """As quire.sandbox.pipe.HasArrays."""
        if self.shape is None:
            return self
        return msgspec.structs.replace(self, content=next(arrays, b""))


class MediaResult(msgspec.Struct, frozen=True, tag=True):
    """The tensors of an item. sizes: JSON."""

    tensors: tuple[MediaTensor, ...]
    sizes: bytes

    def detached(self) -> tuple[MediaResult, list[bytes]]:
        """As quire.sandbox.pipe.HasArrays."""
        arrays: list[bytes] = []
        return MediaResult(detach_data(self.tensors, arrays), self.sizes), arrays

    def attached(self, arrays: Iterator[Any]) -> MediaResult:
        """As quire.sandbox.pipe.HasArrays."""
        return MediaResult(attach_data(self.tensors, arrays), self.sizes)


MediaMessage = (
    StartMediaWorker
    | MediaWorkerReady
    | MediaJob
    | MediaResult
    | JobRefused
    | JobOutOfMemory
    | JobFailed
)
MEDIA_DECODER: msgspec.msgpack.Decoder[MediaMessage] = msgspec.msgpack.Decoder(MediaMessage)


def pack_files(files: ProcessorFiles) -> bytes:
    """Return the files of a processor for a worker, without the tokenizer."""
    return json.dumps([files.config, files.preprocessors, files.processor]).encode()


def read_sizes(sizes: bytes) -> dict[str, Any]:
    """Return `sizes` of a result, with tuples for lists."""
    found = json.loads(sizes)
    return {name: _as_tuples(value) for name, value in found.items()}


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def main(fd: int) -> int:
    """Run jobs until the other end closes. Returns the exit status."""
    setup_worker_process("quire-media")
    Image.MAX_IMAGE_PIXELS = None  # decode.check_size is stricter, and refuses in place of warning
    with suppress(OSError):
        os.nice(NICENESS)
    keep_freed_memory()
    pipe = WorkerPipe(socket.socket(fileno=fd), MEDIA_DECODER)
    start = pipe.receive()
    if not isinstance(start, StartMediaWorker):
        return 1
    try:
        kind = processor_type(start.family)
        assert kind is not None, start.family
        config, preprocessors, settings = json.loads(start.files)
        processor = kind(ProcessorFiles(config, preprocessors, settings))
        load_library(start.library)
    except Exception as error:  # noqa: BLE001 - the boundary: sent to the parent
        with suppress(OSError):
            pipe.send(JobFailed(f"{type(error).__name__}: {error}", ""))
        return 1
    loop = WorkerLoop(MediaJob, lambda job: carry_out(processor, job), growth=MAX_MEMORY_GROWTH)
    _preload(processor)
    restrict_process()
    return loop.serve(pipe, MediaWorkerReady())


def carry_out(processor: MediaProcessor, job: MediaJob) -> MediaResult:
    """Return the tensors of an item. Raises RequestError."""
    options = json.loads(job.io_kwargs)
    media = _decode(processor, job, options)
    made = processor.process(media, json.loads(job.kwargs))
    return MediaResult(made.tensors, json.dumps(dict(made.sizes)).encode())


def _decode(processor: MediaProcessor, job: MediaJob, options: Settings) -> DecodedMedia:
    if job.shape is not None:
        return _from_array(processor, job, job.shape)
    if job.modality == "image":
        return decode.decode_image(job.content, job.limits, job.where)
    if job.modality == "video":
        return _decode_video(processor, job, options)
    with _placed(job.where):
        return decode_audio(job.content, processor.sampling_rate, _most_seconds(processor, job))


def _decode_video(processor: MediaProcessor, job: MediaJob, options: Settings) -> DecodedVideo:
    video = decode.decode_video(job.content, processor, options, job.limits, job.where)
    if not reads_sound(json.loads(job.kwargs)):
        return video
    kind = cast(str, decode.video_format(job.content))
    with _placed(job.where):
        sound = decode_sound(
            job.content, kind, processor.sampling_rate, _most_seconds(processor, job)
        )
    return replace(video, sound=sound)


def _most_seconds(processor: MediaProcessor, job: MediaJob) -> float:
    """Of a recording in a file."""
    return min(job.limits.audio_seconds, processor.readable_seconds(json.loads(job.kwargs)))


@contextmanager
def _placed(where: str) -> Iterator[None]:
    """Errors of a recording name its place in the request."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None


def _from_array(processor: MediaProcessor, job: MediaJob, shape: tuple[int, ...]) -> DecodedMedia:
    content, details = memoryview(job.content), json.loads(job.details)
    if job.modality == "audio":
        return _from_samples(processor, job, content, shape, details)
    pixels = np.frombuffer(content[: math.prod(shape)], np.uint8).reshape(shape)
    if job.modality == "image":
        return DecodedImage(pixels)
    info, heard = details["info"], details["sound"]
    info["frames_indices"] = tuple(info["frames_indices"])
    sound = None
    if heard is not None:
        sound = _from_samples(processor, job, content[pixels.size :], **heard)
    return DecodedVideo(pixels, VideoInfo(**info), sound)


def _from_samples(
    processor: MediaProcessor, job: MediaJob, content: memoryview, shape: Sequence[int], rate: int
) -> DecodedAudio:
    """rate: 0: the processor's."""
    samples = np.frombuffer(content, np.float32).reshape(shape)
    rate = rate or processor.sampling_rate
    if max(shape) / rate > job.limits.audio_seconds:
        message = f"is longer than {job.limits.audio_seconds:g} seconds"
        raise RequestError(f"{job.where} {message}")
    target = processor.sampling_rate
    return DecodedAudio(mix_down(samples, rate, target), target)


def _preload(processor: MediaProcessor) -> None:
    """Import what decoders and processors import when they first need it."""
    for name in decode.IMAGE_FORMATS:
        file = io.BytesIO()
        Image.new("P", (32, 32)).convert("RGB").save(file, name)
        decode.decode_image(file.getvalue(), MediaLimits(), "")
    for modality, example in (("video", _example_video), ("audio", _example_recording)):
        if modality in processor.modalities:
            with suppress(ImportError, QuireError, OSError, ValueError):  # a codec may be missing
                example(processor)
    for modality in processor.modalities:
        with suppress(QuireError, ValueError, NotImplementedError):
            processor.process(_example(modality, processor), {})
    with suppress(OSError):
        ctypes.CDLL("libgcc_s.so.1")  # a thread's end would look for it


def _example_video(processor: MediaProcessor) -> None:
    """Decode a video of two frames."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        frames = [np.zeros((64, 64, 3), np.uint8)] * 2
        packets = [stream.encode(av.VideoFrame.from_ndarray(one)) for one in frames]
        for packet in itertools.chain(*packets, stream.encode()):
            container.mux(packet)
    decode.decode_video(file.getvalue(), processor, {}, MediaLimits(), "")


def _example_recording(processor: MediaProcessor) -> None:
    """Decode a recording of a moment."""
    file = io.BytesIO()
    with wave.open(file, "wb") as recording:
        recording.setparams((1, 2, 16000, 0, "NONE", ""))
        recording.writeframes(bytes(3200))
    decode_audio(file.getvalue(), processor.sampling_rate, 1.0)


def _example(modality: str, processor: MediaProcessor) -> DecodedMedia:
    if modality == "audio":
        rate = processor.sampling_rate
        return DecodedAudio(np.zeros(rate, np.float32), rate)
    frames = np.zeros((4, 64, 96, 3), np.uint8)
    if modality == "image":
        return DecodedImage(frames[0])
    return DecodedVideo(frames, VideoInfo(4.0, (0, 1, 2, 3), 4, 1.0))


def to_processed(modality: Modality, result: MediaResult) -> ProcessedMedia:
    """Return what a worker made."""
    return ProcessedMedia(modality, result.tensors, read_sizes(result.sizes))
