"""One answer and its speed. Imports no engine, because commands for a remote server use it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GenerationStats:
    """Statistics of one answer. Seconds since the request was made."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    finish_reason: str | None = None

    def format_line(self) -> str:
        """Format one line for a person."""
        decode_s = self.total_s - self.first_s
        rate = (self.output_tokens - 1) / decode_s if decode_s > 0 else 0.0
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        return (
            f"[{self.prompt_tokens} prompt tokens{cached}, first token after "
            f"{self.first_s * 1000:.0f} ms; {self.output_tokens} tokens in {self.total_s:.2f} s, "
            f"{rate:.1f} tok/s; {self.finish_reason}]"
        )


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The generated text with its statistics."""

    text: str
    stats: GenerationStats
