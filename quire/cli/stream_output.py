"""Prints one answer as it is generated, and its speed."""

from __future__ import annotations

import time

from quire.cli.generation_result import AnswerPrinter, GenerationResult, GenerationStats
from quire.core.params import RequestOutputKind, SamplingParams
from quire.errors import EngineError
from quire.llm.engine import LLMEngine
from quire.llm.progress import InterruptHandler
from quire.text.output.answer_parser import AnswerParser
from quire.text.prompts import Prompt


def stream_to_stdout(
    engine: LLMEngine,
    prompt: Prompt,
    params: SamplingParams,
    *,
    request_id: str,
    add_special_tokens: bool = True,
    prefix: str = "",
    parser: AnswerParser | None = None,
) -> GenerationResult:
    """Generate one answer and print it piece by piece. Ctrl-C ends it early, as "abort".

    prefix: text to print before it. parser: separates its reasoning. Raises RequestError if the
    request is refused, EngineError if the answer ends with an error.
    """
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    began = time.perf_counter()
    engine.add_request(
        request_id,
        prompt,
        params,
        tokenization_kwargs={"add_special_tokens": add_special_tokens},
    )
    stats, printer, error = GenerationStats(), AnswerPrinter(prefix), None
    with InterruptHandler() as interrupt:
        while engine.has_unfinished_requests():
            if interrupt.is_requested:
                engine.abort_request(request_id)
                stats.finish_reason = "abort"
                break
            for output in engine.step():
                piece = output.outputs[0]
                if not stats.output_tokens:
                    stats.first_s = time.perf_counter() - began
                stats.output_tokens += len(piece.token_ids)
                stats.prompt_tokens = len(output.prompt_token_ids or ())
                stats.cached_tokens = output.num_cached_tokens or 0
                stats.finish_reason, error = piece.finish_reason, output.error
                if parser is None:
                    printer.write(piece.text)
                    continue
                for part in parser.push(piece.text, piece.token_ids, last=output.finished):
                    printer.write(part.text, part.reasoning)
    stats.total_s = time.perf_counter() - began
    text = printer.finish()
    if error is not None:
        raise EngineError(error)
    return GenerationResult(text, stats)
