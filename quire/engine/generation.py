"""Requests under way: tokens become text, and a sequence whose text is complete is ended.

In go requests that quire.text.inputs prepared; what comes out are RequestOutputs, each with the
place of its prompt among them. The server's routes have a leaner way (quire.server.events).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from quire.core.types import Update
from quire.engine.client import EngineClient
from quire.engine.stream import Stream
from quire.outputs import RequestOutput
from quire.text.assemble import Assembler, Clock
from quire.text.inputs import Prepared
from quire.text.tokenizer import Tokenizer


class News(NamedTuple):
    """An output of the prompt at `place`."""

    place: int
    output: RequestOutput


class Generation:
    """An iterator of what is new, in batches. Whoever began it calls close()."""

    def __init__(
        self,
        stream: Stream,
        prepared: Sequence[Prepared],
        tokenizer: Tokenizer | None,
        clock: Clock | None = None,
    ) -> None:
        self._stream = stream
        self.request_ids = stream.request_ids
        self._place = {p.request.id: place for place, p in enumerate(prepared)}
        self._assemblers = [Assembler(p, tokenizer, clock=clock) for p in prepared]

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def close(self) -> None:
        """Abort what has not ended. Harmless when called again."""
        self._stream.close()

    async def __aiter__(self) -> AsyncIterator[list[News]]:
        async for updates in self._stream:
            news = [one for update in updates if (one := self._read(update)) is not None]
            if news:
                yield news

    def _read(self, update: Update) -> News | None:
        if update.finish == "error":
            raise update.exception()
        place = self._place[update.request_id]
        assembler = self._assemblers[place]
        output = assembler.push(update)
        for index in assembler.aborts:
            self._stream.end_sequence(update.request_id, index)
        return None if output is None else News(place, output)


async def begin(
    engine: EngineClient,
    prepared: Sequence[Prepared],
    tokenizer: Tokenizer | None,
    *,
    clock: Clock | None = None,
) -> Generation:
    """Hand the requests to the engine. Raises RequestError if it refuses one: none is run then."""
    stream = await engine.generate([p.request for p in prepared])
    return Generation(stream, prepared, tokenizer, clock)
