"""Prints one answer as it is made, and says how fast it was made."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from quire.core.params import RequestOutputKind, SamplingParams
from quire.llm.engine import LLMEngine
from quire.llm.progress import Interruptible
from quire.text.prompts import Prompt


@dataclass(slots=True)
class Stats:
    """Of one answer. Seconds since the request was made."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    finish: str | None = None

    def line(self) -> str:
        """One line for a person."""
        decode_s = self.total_s - self.first_s
        rate = (self.output_tokens - 1) / decode_s if decode_s > 0 else 0.0
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        return (
            f"[{self.prompt_tokens} prompt tokens{cached}, first token after "
            f"{self.first_s * 1000:.0f} ms; {self.output_tokens} tokens in {self.total_s:.2f} s, "
            f"{rate:.1f} tok/s; {self.finish}]"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said, and how."""

    text: str
    stats: Stats


def stream(
    engine: LLMEngine,
    prompt: Prompt,
    params: SamplingParams,
    *,
    request_id: str,
    add_special_tokens: bool = True,
) -> Answer:
    """Generate one answer and print it piece by piece. Ctrl-C ends it early, as "abort"."""
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    began = time.perf_counter()
    engine.add_request(
        request_id,
        prompt,
        params,
        tokenization_kwargs={"add_special_tokens": add_special_tokens},
    )
    stats, pieces = Stats(), list[str]()
    with Interruptible() as interrupt:
        while engine.has_unfinished_requests():
            if interrupt.asked:
                engine.abort_request(request_id)
                stats.finish = "abort"
                break
            for output in engine.step():
                piece = output.outputs[0]
                if not stats.output_tokens:
                    stats.first_s = time.perf_counter() - began
                stats.output_tokens += len(piece.token_ids)
                stats.prompt_tokens = len(output.prompt_token_ids or ())
                stats.cached_tokens = output.num_cached_tokens or 0
                stats.finish = output.error or piece.finish_reason
                pieces.append(piece.text)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    stats.total_s = time.perf_counter() - began
    print()
    return Answer("".join(pieces), stats)
