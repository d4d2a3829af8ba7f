"""Media pipeline: from the parts of a request to items that are ready to be placed in its prompt.

    parts ── limits ── fetch ── digest ── cache? ── worker: decode, process ── tokens of each item

One pipeline serves all requests of a process; equal items that are requested at once are processed
once.
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from quire.core.types import MediaTensor
from quire.errors import EngineError, RequestError, Unsupported, context_overflow
from quire.media.expand import PlacedMedia, ReadyItem, place_items
from quire.media.fetch import FetchRules, MediaFetcher, fetch_all
from quire.media.held_bytes import Grow, HeldBytes
from quire.media.items import MediaSource, invalid_part, with_sounds
from quire.media.limits import MediaLimits
from quire.media.media_worker import (
    MEDIA_DECODER,
    MediaJob,
    MediaMessage,
    MediaResult,
    StartMediaWorker,
    pack_files,
    to_processed,
)
from quire.media.native.library import find_library
from quire.media.processor import (
    DecodedAudio,
    DecodedImage,
    DecodedVideo,
    KwargRange,
    MediaProcessor,
    Pixels,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
    processor_type,
    reads_sound,
)
from quire.media.processor_cache import ProcessorCache, framed_digest
from quire.sandbox.tenant_turns import NO_TENANT, TenantShare
from quire.sandbox.worker_handle import StartWorker
from quire.sandbox.worker_pool import PoolNames, SandboxPool

MAX_WAITING = 1024
"""Items of one tenant that wait for a worker."""
HELD_BYTES = 2 << 30
"""Of files of requests over HTTP that wait or are processed: eight of the largest prompts."""
WALL_LIMIT_S = 120.0
"""By the clock, for one item: workers have a low priority."""
CPU_LIMIT_S = {"image": 20.0, "audio": 60.0, "video": 60.0}
"""Of processor time, for one item."""
MEMORY_LIMIT = 2 << 30
"""Bytes of a worker, for one item."""
LARGE_BYTES = 1 << 20
"""A digest of more takes milliseconds, and is computed in a thread."""
NAMES = PoolNames(
    threads="quire-media",
    process="process for images, video and audio",
    task="the image, video or recording",
    action="processing an image, video or recording",
)
IO_KWARGS: Mapping[str, Mapping[str, KwargRange]] = {
    "image": {},
    "video": {
        "num_frames": KwargRange(int, -1, 1 << 16),
        "fps": KwargRange(float, -1, 1000),
    },
    "audio": {},
}
"""Options of media_io_kwargs by modality."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """What the operator sets. kwargs, io_kwargs: defaults of all requests."""

    limits: MediaLimits = field(default_factory=MediaLimits)
    kwargs: Settings = field(default_factory=dict)
    io_kwargs: Mapping[str, Settings] = field(default_factory=dict)
    cache_bytes: int = 4 << 30
    workers: int = 1
    folder: Path | None = None  # of file:// URLs
    domains: tuple[str, ...] | None = None  # of http(s) URLs; None: all
    takes_embeds: bool = False
    interleaves: bool = False  # placeholders stay at their place in the text of a message
    trusts_kwargs: bool = False  # requests over HTTP may have mm_processor_kwargs


class MediaPipeline:
    """Prepares and places the media of requests."""

    def __init__(
        self, family: str, files: ProcessorFiles, settings: PipelineSettings, launch: StartWorker
    ) -> None:
        """family: a model_type with a processor. launch: starts a worker process.

        Raises RequestError for kwargs of the settings that the processor does not take.
        """
        kind = processor_type(family)
        assert kind is not None, family
        self.processor: MediaProcessor = kind(files)
        self.settings = settings
        self._root = framed_digest(family.encode(), packed := pack_files(files))
        reads_pixels = kind.modalities != ("audio",)
        self._pool: SandboxPool[MediaMessage] = SandboxPool(
            launch,
            MEDIA_DECODER,
            NAMES,
            size=settings.workers,
            max_waiting=MAX_WAITING,
            wall_limit_s=WALL_LIMIT_S,
            first=lambda: StartMediaWorker(family, packed, find_library() if reads_pixels else ""),
        )
        weakref.finalize(self, self._pool.close)
        self.cache = ProcessorCache(settings.cache_bytes)
        rules = FetchRules(settings.domains, settings.folder)
        self._fetcher = MediaFetcher(rules, dict(settings.limits.item_bytes))
        self._held = HeldBytes(HELD_BYTES)
        self._running: dict[bytes, _SharedRun] = {}
        self._loop: LoopThread | None = None
        self._merge_kwargs(None, None)

    def prepare_workers(self) -> None:
        """Start a worker in the background: otherwise the first item waits for it."""
        self._pool.prepare()

    def close(self) -> None:
        """End the workers, and what they run."""
        self._pool.close()

    # -- preparing ----------------------------------------------------------------------------

    async def prepare(
        self,
        parts: Sequence[MediaSource],
        *,
        max_tokens: int,
        root: bytes = b"",
        names: bytes = b"",
        share: TenantShare | None = None,
        kwargs: object = None,
        io_kwargs: object = None,
    ) -> list[ReadyItem]:
        """Return the items of one prompt, in the order of `parts`.

        max_tokens: of all together. root: what separates the caches of tenants. names: what
        separates the uuids of callers of one tenant. share: of the tenant; None: of this process,
        whose waiting bytes have no bound. kwargs, io_kwargs: mm_processor_kwargs and
        media_io_kwargs of the request.
        Raises RequestError, MediaUnavailable, Overloaded, EngineError.
        """
        if not parts:
            return []
        self.check_counts(parts)
        options, io_options = self._merge_kwargs(kwargs, io_kwargs)
        options = {**self.processor.prompt_kwargs([one.modality for one in parts]), **options}
        if reads_sound(options):
            parts = with_sounds(parts)
        slots = asyncio.Semaphore(self.settings.workers)

        async def process(part: MediaSource, file: bytes | None) -> tuple[bytes, ProcessedMedia]:
            async with slots:
                io_option = io_options.get(part.modality, {})
                scope = _Scope(root, names, share or NO_TENANT)
                return await self._process(part, file, scope, options, io_option)

        with self._hold(share, parts[0].param) as grow:
            most = self.settings.limits.prompt_bytes
            files = await fetch_all(self._fetcher, parts, most, grow)
            tasks = [asyncio.ensure_future(process(*one)) for one in zip(parts, files)]
            try:
                return [one async for one in self._expanded(parts, tasks, max_tokens)]
            finally:
                for task in tasks:
                    task.cancel()

    def _hold(self, share: TenantShare | None, param: str) -> AbstractContextManager[Grow]:
        if share is None:
            return nullcontext(lambda size: None)
        return self._held.hold(share.tenant, param)

    async def _expanded(
        self,
        parts: Sequence[MediaSource],
        tasks: Sequence[asyncio.Task[tuple[bytes, ProcessedMedia]]],
        max_tokens: int,
    ) -> AsyncIterator[ReadyItem]:
        """Yield each item with its tokens as it is processed, while they fit in the context."""
        total = 0
        numbers: dict[str, int] = {}
        for part, task in zip(parts, tasks):
            digest, media = await task
            number = numbers[part.modality] = numbers.get(part.modality, 0) + 1
            expansion = self.processor.expand(media, number)
            if part.embeds is not None and expansion.rows != media.sizes["rows"]:
                message = f"has {media.sizes['rows']} rows; the item takes {expansion.rows}"
                raise invalid_part(part.where, message)
            total += len(expansion.token_ids)
            if total >= max_tokens:
                problem = f"the media of the prompt take {total} tokens or more"
                raise context_overflow(
                    max_tokens, problem, param=part.param, remedy="send fewer or smaller ones"
                )
            yield ReadyItem(part.modality, number, digest, media, expansion)

    def check_counts(self, parts: Sequence[MediaSource]) -> None:
        """Raise RequestError for a modality that is not read, or too many items of one."""
        modalities = [part.modality for part in parts]
        supported = self.processor.modalities
        param = parts[0].param if parts else "prompt"
        self.settings.limits.check_counts(modalities, supported, param)
        most = self.processor.most_items
        if most is not None and len(parts) > most:
            message = f"this model reads at most {most} {supported[0]} of a prompt"
            raise RequestError(f"{message}; got {len(parts)}", param=param)

    def prepare_blocking(self, parts: Sequence[MediaSource], **options: Any) -> list[ReadyItem]:
        """As prepare(), for a thread without an event loop."""
        return self.start(parts, **options).result()

    def start(self, parts: Sequence[MediaSource], **options: Any) -> Future[list[ReadyItem]]:
        """Begin prepare() in the background; return its future."""
        return self._submit(self.prepare(parts, **options))

    def start_reading(
        self, read: Callable[[], Sequence[MediaSource]], **options: Any
    ) -> Future[list[ReadyItem]]:
        """Begin prepare() of what read() returns, which a thread calls: it may decode images."""

        async def read_and_prepare() -> list[ReadyItem]:
            return await self.prepare(await asyncio.to_thread(read), **options)

        return self._submit(read_and_prepare())

    def _submit(self, work: Coroutine[Any, Any, list[ReadyItem]]) -> Future[list[ReadyItem]]:
        if self._loop is None:
            self._loop = LoopThread()
            weakref.finalize(self, self._loop.close)
        return self._loop.submit(work)

    async def _process(
        self,
        part: MediaSource,
        file: bytes | None,
        scope: _Scope,
        options: Settings,
        io_options: Settings,
    ) -> tuple[bytes, ProcessedMedia]:
        """Return digest and tensors of an item."""
        settings = json.dumps([dict(options), dict(io_options)], sort_keys=True).encode()
        base = (self._root, scope.root, part.modality.encode(), settings)
        name = None
        if part.uuid is not None:
            name = framed_digest(*base, b"name", scope.names, part.uuid.encode())
        if part.embeds is not None:
            media = self._given_rows(part)
            tensor = media.tensors[0]
            return framed_digest(*base, b"rows", repr(media.sizes).encode(), tensor.data), media
        if part.arrays is not None:
            media = self.processor.read_arrays(part.arrays, partial(invalid_part, part.where))
            read = await asyncio.to_thread(_tensors_digest, base, media)
            self.cache.put(read, media, name)
            return read, media
        content = _content_of(part, file)
        if content is None:
            digest = self.cache.named(cast(bytes, name))
            media_found = None if digest is None else self.cache.find(digest)
            if digest is None or media_found is None:
                message = f"has no content, and no item with the uuid {part.uuid!r:.80} is cached"
                raise invalid_part(part.where, f"{message}: send its content")
            return digest, media_found
        fields = (*base, b"content", repr(content.shape).encode(), content.details, content.data)
        if len(content.data) > LARGE_BYTES:
            digest = await asyncio.to_thread(framed_digest, *fields)
        else:
            digest = framed_digest(*fields)
        found = self.cache.find(digest)
        if found is None:
            found = await self._shared(
                digest, lambda: self._run(part, content, scope.share, options, io_options)
            )
        self.cache.put(digest, found, name)
        return digest, found

    async def _shared(
        self, digest: bytes, begin: Callable[[], Coroutine[Any, Any, ProcessedMedia]]
    ) -> ProcessedMedia:
        """Await the one run for a digest. It ends when all who await it are cancelled."""
        run = self._running.get(digest)
        if run is None:
            run = self._running[digest] = _SharedRun(asyncio.ensure_future(begin()))
        run.awaiting += 1
        try:
            return await asyncio.shield(run.task)
        finally:
            run.awaiting -= 1
            if not run.awaiting:
                run.task.cancel()  # nothing if it has ended
                del self._running[digest]

    async def _run(
        self,
        part: MediaSource,
        content: _Content,
        share: TenantShare,
        options: Settings,
        io_options: Settings,
    ) -> ProcessedMedia:
        def make_job() -> MediaJob:
            return MediaJob(
                part.modality,
                part.where,
                content.data,
                content.shape,
                content.details,
                json.dumps(dict(options)).encode(),
                json.dumps(dict(io_options)).encode(),
                self.settings.limits,
                CPU_LIMIT_S[part.modality],
                MEMORY_LIMIT,
            )

        given = part.decoded
        try:
            if isinstance(given, DecodedImage) and self.processor.passes_pixels(given, options):
                pixels = np.frombuffer(content.data, np.uint8).reshape(given.pixels.shape)
                return self.processor.process(DecodedImage(pixels), options)
            answer = await self._pool.run(make_job, param=part.param, share=share)
        except RequestError as error:
            if part.where in str(error):
                raise
            raise RequestError(f"{part.where}: {error}", param=error.param) from None
        if not isinstance(answer, MediaResult):
            raise EngineError(f"a process that reads media sent {type(answer).__name__}")
        return to_processed(part.modality, answer)

    def _given_rows(self, part: MediaSource) -> ProcessedMedia:
        """Check embeddings that a caller gives. Raises RequestError, Unsupported."""
        assert part.embeds is not None
        if not self.settings.takes_embeds:
            message = f"{part.where}: embeddings are off: start with --enable-mm-embeds"
            raise Unsupported(f"{message} (enable_mm_embeds=True)", param=part.param)
        if not self.processor.takes_embeds:
            message = f"{part.where}: this model takes no embeddings in place of media"
            raise Unsupported(message, param=part.param)
        rows = np.asarray(part.embeds["embeds"])
        if rows.ndim == 3 and len(rows) == 1:
            rows = rows[0]
        width = self.processor.row_width
        if rows.ndim != 2 or rows.shape[1] != width or rows.dtype.kind != "f":
            shape = f"{rows.dtype} of shape {list(rows.shape)}"
            raise invalid_part(part.where, f"must be floats of shape [rows, {width}], got {shape}")
        rows = np.ascontiguousarray(rows, dtype="<f4")
        if not np.isfinite(rows).all():
            raise invalid_part(part.where, "has numbers that are not finite")
        sizes: dict[str, Any] = {"rows": len(rows)}
        for key, value in part.embeds.items():
            if key != "embeds":
                if key not in self.processor.embed_sizes:
                    known = ", ".join(self.processor.embed_sizes) or "no sizes"
                    message = f"has {key!r:.40} beside embeddings; this model reads {known}"
                    raise invalid_part(part.where, message)
                numbers = np.asarray(value)
                if numbers.dtype.kind not in "iu" or numbers.size > 16:
                    raise invalid_part(part.where, f"has {key!r:.40}, which must be a few integers")
                sizes[key] = tuple(int(one) for one in numbers.reshape(-1))
        tensor = MediaTensor("embeds", "float32", rows.shape, rows.tobytes())
        return ProcessedMedia(part.modality, (tensor,), sizes)

    def _merge_kwargs(
        self, kwargs: object, io_kwargs: object
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return the options of a request over those of the operator. Raises RequestError."""
        given = _as_options(kwargs, "mm_processor_kwargs")
        merged = {**self.settings.kwargs, **given}
        _check_options(merged, self.processor.allowed_kwargs, "mm_processor_kwargs")
        io_given = _as_options(io_kwargs, "media_io_kwargs")
        io_merged: dict[str, dict[str, Any]] = {}
        for modality in {**self.settings.io_kwargs, **io_given}:
            if modality not in IO_KWARGS:
                message = f"media_io_kwargs has {modality!r:.40}; known are {', '.join(IO_KWARGS)}"
                raise RequestError(message, param="media_io_kwargs")
            own = self.settings.io_kwargs.get(modality, {})
            more = _as_options(io_given.get(modality), "media_io_kwargs")
            io_merged[modality] = {**own, **more}
            name = f"media_io_kwargs.{modality}"
            _check_options(io_merged[modality], IO_KWARGS[modality], name)
        return merged, io_merged

    # -- placing ------------------------------------------------------------------------------

    def placeholders(self, parts: Sequence[MediaSource]) -> dict[str, list[str]]:
        """Return what prompts hold for the parts: by modality, in order. Raises RequestError."""
        self.check_counts(parts)
        made: dict[str, list[str]] = {}
        for part in parts:
            texts = made.setdefault(part.modality, [])
            texts.append(self.processor.placeholder(part.modality, len(texts) + 1))
        return made

    def place(
        self,
        ids: Sequence[int],
        items: Sequence[ReadyItem],
        *,
        may_be_expanded: bool = False,
    ) -> PlacedMedia:
        """Put the tokens of items into a prompt. Raises RequestError."""
        return place_items(ids, items, self.processor, may_be_expanded=may_be_expanded)


@dataclass(frozen=True, slots=True)
class _Scope:
    """What separates items of callers: root, names and share of prepare()."""

    root: bytes
    names: bytes
    share: TenantShare


@dataclass(slots=True)
class _SharedRun:
    """Work on an item. awaiting: requests that need it."""

    task: asyncio.Task[ProcessedMedia]
    awaiting: int = 0


@dataclass(frozen=True, slots=True)
class _Content:
    """The bytes of an item for a worker: of a file, or of an array."""

    data: bytes
    shape: tuple[int, ...] | None = None
    details: bytes = b"null"  # JSON


def _tensors_digest(base: Sequence[bytes], media: ProcessedMedia) -> bytes:
    fields = [(repr((one.name, one.shape)).encode(), one.data) for one in media.tensors]
    return framed_digest(*base, b"arrays", *(part for one in fields for part in one))


def _content_of(part: MediaSource, file: bytes | None) -> _Content | None:
    media = part.decoded
    if media is None:
        return None if file is None else _Content(file)
    if isinstance(media, DecodedAudio):
        rate = json.dumps(media.sampling_rate).encode()
        return _Content(media.samples.tobytes(), media.samples.shape, rate)
    if isinstance(media, DecodedVideo):
        heard = media.sound
        samples = b"" if heard is None else heard.samples.tobytes()
        sound = heard and {"shape": heard.samples.shape, "rate": heard.sampling_rate}
        details = json.dumps({"info": asdict(media.info), "sound": sound}).encode()
        return _Content(media.frames.tobytes() + samples, media.frames.shape, details)
    return _Content(_bytes_of(media.pixels), media.pixels.shape)


def _bytes_of(array: Pixels) -> bytes:
    """Return the bytes of an array; no copy if nothing can change them, as of a PIL image."""
    base = array.base
    if isinstance(base, bytes) and len(base) == array.nbytes and array.flags.c_contiguous:
        return base
    return array.tobytes()


def _as_options(given: object, param: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RequestError(f"{param} must be an object, got {given!r:.80}", param=param)
    return given


def _check_options(given: Mapping[str, Any], allowed: Mapping[str, KwargRange], param: str) -> None:
    for name, value in given.items():
        if name not in allowed:
            known = f"known are {', '.join(allowed)}" if allowed else "this model takes none"
            raise RequestError(f"{param} has {name!r:.80}; {known}", param=param.partition(".")[0])
        allowed[name].check(f"{param}.{name}", value)


class LoopThread:
    """An event loop in a thread, for callers that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="quire-media-loop", daemon=True
        )
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the loop. Its thread ends."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
