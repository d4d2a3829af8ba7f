"""Text generation: turns the updates of prepared requests into RequestOutputs.

quire.text.input_processor prepares the requests. Each output comes with the index of its prompt.
A sequence ends once its text is complete. Routes of the server use quire.server.generation.events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from quire.core.types import Update
from quire.engine.client.engine_pool import EnginePool
from quire.engine.client.stream import RequestStream, StreamGroup
from quire.outputs import RequestOutput
from quire.text.input_processor import PreparedRequest
from quire.text.output.output_processor import Clock, RequestOutputProcessor
from quire.text.tokenizing.tokenizer import Tokenizer


class IndexedOutput(NamedTuple):
    """An output, and the index of its prompt."""

    prompt_index: int
    output: RequestOutput


class OutputGeneration:
    """Iterator over new outputs, in batches. The caller must call close()."""

    def __init__(
        self,
        stream: RequestStream | StreamGroup,
        prepared: Sequence[PreparedRequest],
        tokenizer: Tokenizer | None,
        clock: Clock | None = None,
        lora_request: object | None = None,
    ) -> None:
        self._stream = stream
        self.request_ids = stream.request_ids
        self._prompt_indexes = {p.request.id: index for index, p in enumerate(prepared)}
        self._output_processors = [
            RequestOutputProcessor(p, tokenizer, clock=clock, lora_request=lora_request)
            for p in prepared
        ]

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def close(self) -> None:
        """Abort what has not ended. Harmless when called again."""
        self._stream.close()

    async def __aiter__(self) -> AsyncIterator[list[IndexedOutput]]:
        async for updates in self._stream:
            outputs = [one for update in updates if (one := self._read(update)) is not None]
            if outputs:
                yield outputs

    def _read(self, update: Update) -> IndexedOutput | None:
        if update.finish == "error":
            raise update.to_exception()
        prompt_index = self._prompt_indexes[update.request_id]
        processor = self._output_processors[prompt_index]
        output = processor.push(update)
        for index in processor.aborts:
            self._stream.end_sequence(update.request_id, index)
        return None if output is None else IndexedOutput(prompt_index, output)


async def start_output_generation(
    engine: EnginePool,
    prepared: Sequence[PreparedRequest],
    tokenizer: Tokenizer | None,
    *,
    clock: Clock | None = None,
    lora_request: object | None = None,
    rank: int | None = None,
) -> OutputGeneration:
    """Submit the requests. Raises RequestError if the engine refuses one: then none runs.

    lora_request: what their outputs show. rank: of the engine that runs them; None: any.
    """
    stream = await engine.generate([p.request for p in prepared], rank)
    return OutputGeneration(stream, prepared, tokenizer, clock, lora_request)
