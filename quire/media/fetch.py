"""Fetches encoded files by URL: http and https, data, and files below a folder of the operator.

Everything that leaves this machine goes through quire.http_fetch: addresses are resolved once and
checked, also after redirects, and sizes and times are bounded.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from quire.errors import MediaUnavailable, RequestError
from quire.http_fetch.fetch import FetchFailed, FetchPolicy, HttpFetcher
from quire.media.held_bytes import Grow
from quire.media.items import MediaSource, decode_base64, invalid_part, param_of
from quire.media.processor import Modality

ATTEMPTS = 3
RETRY_WAIT_S = 0.1
TIMEOUTS_S = {"image": 5.0, "audio": 10.0, "video": 30.0}
"""Of one attempt."""
MAX_FETCHES = 32
"""Fetches of one process that run at once."""
PROMPT_FETCHES = 8
"""Of one prompt that run at once: others must not wait for an address that answers slowly."""
PROMPT_TIMEOUT_S = 60.0
"""Of all fetches of one prompt."""
_DATA = re.compile(
    r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*);base64,", re.ASCII | re.IGNORECASE
)
MAX_DATA_HEAD = 256
"""Characters of a data URL before its content."""


@dataclass(frozen=True, slots=True)
class FetchRules:
    """What the operator allows. Sizes in bytes.

    domains: hosts; None: any public one. The ones that are listed may have private addresses.
    folder: of file:// URLs; None: there are none.
    """

    domains: tuple[str, ...] | None = None
    folder: Path | None = None


class MediaFetcher:
    """Fetches files of media parts. Used by several event loops, one after another."""

    def __init__(self, rules: FetchRules, item_bytes: dict[str, int]) -> None:
        self._item_bytes = item_bytes
        self._folder = None if rules.folder is None else rules.folder.resolve()
        self._http = {
            modality: HttpFetcher(
                FetchPolicy(
                    hosts=rules.domains,
                    private_hosts=rules.domains or (),
                    max_bytes=size,
                    total_timeout_s=TIMEOUTS_S[modality],
                    idle_timeout_s=TIMEOUTS_S[modality],
                )
            )
            for modality, size in item_bytes.items()
        }
        self._running = 0

    async def fetch(self, part: MediaSource) -> bytes:
        """Return the file of a part with a URL. Raises RequestError, MediaUnavailable."""
        assert part.url is not None
        url, where, most = part.url, part.where, self._item_bytes[part.modality]
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return await _off_loop(len(url), lambda: _read_data(url, where, most))
        if scheme == "file":
            return await asyncio.to_thread(lambda: self._read_file(url, where, most))
        if scheme in ("http", "https"):
            return await self._get(url, where, part.modality)
        raise invalid_part(
            where,
            "has a URL that is none of http://, https://, file:// and data:<type>;base64,<content>",
        )

    async def _get(self, url: str, where: str, modality: Modality) -> bytes:
        while self._running >= MAX_FETCHES:
            await asyncio.sleep(0.01)
        self._running += 1
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    return (await self._http[modality].get(url)).data
                except FetchFailed as error:
                    if attempt == ATTEMPTS or not error.may_retry:
                        raise
                await asyncio.sleep(RETRY_WAIT_S * attempt)
            raise AssertionError
        except RequestError as error:
            raise MediaUnavailable(f"{where}: {error}", param=param_of(where)) from None
        finally:
            self._running -= 1

    def _read_file(self, url: str, where: str, most: int) -> bytes:
        """Errors are the same for what is outside of the folder and for what is not there."""
        if self._folder is None:
            message = "is a file:// URL; the server needs --allowed-local-media-path for those"
            raise invalid_part(where, message)
        refused = invalid_part(where, "is no file below the folder of --allowed-local-media-path")
        parts = urlsplit(url)
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or "\0" in path or parts.query or parts.fragment:
            raise refused
        try:
            real = Path(path).resolve(strict=True)
            if not real.is_relative_to(self._folder) or not real.is_file():
                raise refused
            descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                data = file.read(most + 1)
        except (OSError, ValueError, RuntimeError) as error:
            raise (error if error is refused else refused) from None
        if len(data) > most:
            raise _too_large(where, most)
        return data


async def fetch_all(
    fetcher: MediaFetcher, parts: Sequence[MediaSource], prompt_bytes: int, grow: Grow
) -> list[bytes | None]:
    """Return the file of each part that has one, in order. Raises RequestError, Overloaded.

    prompt_bytes: of all together. grow: called with the bytes that are held from now on.
    """
    total = sum(len(part.data) for part in parts if part.data is not None)
    grow(total)
    slots = asyncio.Semaphore(PROMPT_FETCHES)
    until = time.monotonic() + PROMPT_TIMEOUT_S

    async def load(part: MediaSource) -> bytes | None:
        nonlocal total
        if part.url is None:
            return part.data
        async with slots:
            left = until - time.monotonic()
            try:
                data = await asyncio.wait_for(fetcher.fetch(part), left)
            except asyncio.TimeoutError:
                message = f"{part.where}: fetching the media of the prompt takes too long"
                raise MediaUnavailable(message, param=param_of(part.where)) from None
        total += len(data)
        if total > prompt_bytes:
            message = f"the media of one prompt have more than {prompt_bytes >> 20} MiB"
            raise RequestError(message, param=param_of(part.where))
        grow(len(data))
        return data

    tasks = [asyncio.ensure_future(load(part)) for part in parts]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


async def _off_loop(size: int, work: Callable[[], bytes]) -> bytes:
    """Do the work: in a thread, if it takes long."""
    return await asyncio.to_thread(work) if size > 1 << 20 else work()


def _read_data(url: str, where: str, most: int) -> bytes:
    head = _DATA.match(url[:MAX_DATA_HEAD])
    if head is None:
        raise invalid_part(where, "has a data URL that is not data:<type>;base64,<content>")
    if (len(url) - head.end()) * 3 // 4 > most + 2:
        raise _too_large(where, most)
    return decode_base64(url[head.end() :], where)


def _too_large(where: str, most: int) -> RequestError:
    return invalid_part(where, f"has more than {most} bytes")
