"""Requests under way: tokens become text, and a sequence whose text is complete is ended.

In go requests that quire.text.input_processor prepared; what comes out are RequestOutputs, each
with the
place of its prompt among them. The server's routes have a leaner way
(quire.server.generation.events).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from quire.core.types import Update
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.stream import RequestStream
from quire.outputs import RequestOutput
from quire.text.input_processor import PreparedRequest
from quire.text.output.output_processor import Clock, RequestOutputProcessor
from quire.text.tokenizing.tokenizer import Tokenizer


class IndexedOutput(NamedTuple):
    """An output of the prompt at `place`."""

    prompt_index: int
    output: RequestOutput


class OutputGeneration:
    """An iterator of what is new, in batches. Whoever began it calls close()."""

    def __init__(
        self,
        stream: RequestStream,
        prepared: Sequence[PreparedRequest],
        tokenizer: Tokenizer | None,
        clock: Clock | None = None,
    ) -> None:
        self._stream = stream
        self.request_ids = stream.request_ids
        self._prompt_indexes = {p.request.id: place for place, p in enumerate(prepared)}
        self._output_processors = [
            RequestOutputProcessor(p, tokenizer, clock=clock) for p in prepared
        ]

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def close(self) -> None:
        """Abort what has not ended. Harmless when called again."""
        self._stream.close()

    async def __aiter__(self) -> AsyncIterator[list[IndexedOutput]]:
        async for updates in self._stream:
            news = [one for update in updates if (one := self._read(update)) is not None]
            if news:
                yield news

    def _read(self, update: Update) -> IndexedOutput | None:
        if update.finish == "error":
            raise update.to_exception()
        place = self._prompt_indexes[update.request_id]
        assembler = self._output_processors[place]
        output = assembler.push(update)
        for index in assembler.aborts:
            self._stream.end_sequence(update.request_id, index)
        return None if output is None else IndexedOutput(place, output)


async def start_output_generation(
    engine: EngineClient,
    prepared: Sequence[PreparedRequest],
    tokenizer: Tokenizer | None,
    *,
    clock: Clock | None = None,
) -> OutputGeneration:
    """Hand the requests to the engine. Raises RequestError if it refuses one: none is run then."""
    stream = await engine.generate([p.request for p in prepared])
    return OutputGeneration(stream, prepared, tokenizer, clock)
