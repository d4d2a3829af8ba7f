"""Reads audio files of any length for models that transcribe: the features of each piece.

Files are decoded in worker processes with bounded memory and time: they come from strangers.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from quire.core.types import MediaTensor
from quire.errors import EngineError
from quire.media.held_bytes import HeldBytes
from quire.media.limits import MediaLimits
from quire.media.media_worker import (
    MEDIA_DECODER,
    MediaJob,
    MediaMessage,
    MediaResult,
    StartMediaWorker,
    pack_files,
    read_sizes,
)
from quire.media.processor import ProcessorFiles
from quire.sandbox.tenant_turns import TenantShare
from quire.sandbox.worker_handle import StartWorker
from quire.sandbox.worker_pool import PoolNames, SandboxPool

CPU_LIMIT_S = 240.0
"""Of processor time, for one file."""
WALL_LIMIT_S = 600.0
MEMORY_LIMIT = 3 << 30
"""Bytes of a worker: samples and features of the longest recording take 1 GB."""
MAX_WORKERS = 2
MAX_WAITING = 256
HELD_BYTES = 8 << 30
"""Of files and features of all requests until their answers are there: 1 MB for 30 s."""
NAMES = PoolNames(
    threads="quire-audio",
    process="process for recordings",
    task="the recording",
    action="reading a recording",
)


@dataclass(frozen=True, slots=True)
class RecordingPieces:
    """The features of the pieces, in order. borders: samples where they begin, and the end."""

    features: tuple[MediaTensor, ...]
    borders: tuple[int, ...]


class RecordingReader:
    """One serves all requests of a process. Workers start when they are needed."""

    def __init__(self, family: str, files: ProcessorFiles, launch: StartWorker) -> None:
        """family: a model_type whose processor cuts recordings. launch: starts a worker."""
        start = StartMediaWorker(family, pack_files(files))
        self._pool: SandboxPool[MediaMessage] = SandboxPool(
            launch,
            MEDIA_DECODER,
            NAMES,
            size=MAX_WORKERS,
            max_waiting=MAX_WAITING,
            wall_limit_s=WALL_LIMIT_S,
            first=lambda: start,
        )
        weakref.finalize(self, self._pool.close)
        self.held = HeldBytes(HELD_BYTES)

    async def read(self, file: bytes, seconds: float, share: TenantShare) -> RecordingPieces:
        """Decode and cut a file of at most so many seconds.

        Raises RequestError, Unsupported, Overloaded, EngineError.
        """
        limits = MediaLimits(audio_seconds=seconds)

        def make_job() -> MediaJob:
            options = b'{"pieces": true}'
            return MediaJob(
                "audio", "file", file, None, b"", options, b"{}", limits, CPU_LIMIT_S, MEMORY_LIMIT
            )

        answer = await self._pool.run(make_job, param="file", share=share)
        if not isinstance(answer, MediaResult):
            raise EngineError(f"a process that reads recordings sent {type(answer).__name__}")
        return RecordingPieces(answer.tensors, read_sizes(answer.sizes)["borders"])

    def close(self) -> None:
        """End the workers, and what they run."""
        self._pool.close()
