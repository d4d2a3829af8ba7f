"""One answer and its speed. Imports no engine, because commands for a remote server use it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

DIM, PLAIN = "\033[2m", "\033[0m"


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


@dataclass(slots=True)
class AnswerPrinter:
    """Prints an answer as it arrives: its content to stdout, its reasoning to stderr.

    prefix: text to print first.
    """

    prefix: str = ""
    pieces: list[str] = field(default_factory=list)
    is_reasoning: bool = False

    def write(self, content: str, reasoning: str = "") -> None:
        """Print what a piece of the answer adds."""
        dim, plain = (DIM, PLAIN) if sys.stderr.isatty() else ("", "")
        if reasoning:
            head = "" if self.is_reasoning else "Thinking:\n"
            self.is_reasoning = True
            print(f"{dim}{head}{reasoning}{plain}", end="", file=sys.stderr, flush=True)
        if content:
            self._end_reasoning()
            sys.stdout.write(content if self.pieces else self.prefix + content)
            sys.stdout.flush()
            self.pieces.append(content)

    def finish(self) -> str:
        """End the last line. Returns the content."""
        self._end_reasoning()
        print("" if self.pieces else self.prefix)
        return "".join(self.pieces)

    def _end_reasoning(self) -> None:
        if self.is_reasoning:
            print("\n", file=sys.stderr, flush=True)
        self.is_reasoning = False


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The generated text, without reasoning that was printed apart, and its statistics."""

    text: str
    stats: GenerationStats
