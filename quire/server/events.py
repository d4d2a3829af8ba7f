"""What a generation says, in one form: every dialect shapes these events and nothing else.

    Opening            of each prompt, before anything of its choices
    Delta*, Finish     of each choice; the Finish comes with or after its last Delta
    Closing            once, when every choice has finished

They come in lists, one per turn of the engine: what arrived together is sent together. Streamed or
not, the same events come; unstreamed they come all at once, with one Delta for each choice.

`Splitter` is the seam for models whose text holds more than text: it tells reasoning, content and
tool calls apart. None of it is HTTP, and none of it knows a dialect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from quire.outputs import PromptLogprobs, SampleLogprobs


class ToolCall(msgspec.Struct, frozen=True):
    """News of one tool call: `id` and `name` come once, at its beginning; arguments in pieces."""

    place: int
    """Which of the choice's tool calls."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Opening(msgspec.Struct, frozen=True):
    """A prompt as the engine took it."""

    place: int
    """Of the prompt in the body."""
    prompt_ids: Sequence[int]
    cached: int
    """Leading tokens of it whose KV was found in the prefix cache."""
    prompt_text: str | None = None
    """None if it came as ids."""
    prompt_logprobs: PromptLogprobs | None = None
    """By position; None where nothing is known."""


class Delta(msgspec.Struct, frozen=True):
    """What is new of one choice. Its text may be empty: a character may not be whole yet."""

    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: SampleLogprobs | None = None
    """One step for each of token_ids, if asked for."""
    reasoning: str = ""
    tool_call: ToolCall | None = None


class Finish(msgspec.Struct, frozen=True):
    """A choice is complete."""

    index: int
    reason: str
    """stop, length, abort, repetition or tool_calls."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it."""


class Usage(msgspec.Struct):
    """Tokens of one response so far. A prompt counts once, whatever n."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    """Of the prompt, out of the prefix cache."""


class Closing(msgspec.Struct, frozen=True):
    """Nothing more will come."""

    usage: Usage
    timing: dict[str, object] | None = None
    """Where the time went, ready to be shown; None unless asked for (`x_timing`)."""
    metrics: dict[str, object] | None = None
    """Rates and times of a response of one sequence; None unless the server offers them."""


Event = Opening | Delta | Finish | Closing


class Said(msgspec.Struct, frozen=True):
    """A piece of text that a Splitter has understood."""

    text: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


class Splitter(Protocol):
    """Reads the text of one choice as it comes. Any cut of the text gives the same pieces."""

    def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> Sequence[Said]:
        """What `text` adds, as far as it is certain; `last`: give out what was held back."""
        ...

    def finish(self, reason: str) -> str:
        """The finish reason to tell: "tool_calls" in place of "stop" if it ended in calls."""
        ...


class Plain:
    """Text is content."""

    def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> Sequence[Said]:
        return (Said(text),)

    def finish(self, reason: str) -> str:
        return reason


class Choice(msgspec.Struct):
    """All Deltas of one choice put together, for an answer that is not streamed."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    token_ids: Sequence[int] = ()
    logprobs: SampleLogprobs | None = None
    reason: str = ""
    stop_reason: int | str | None = None


class Whole(msgspec.Struct):
    """A whole response: openings by place, choices by index."""

    openings: list[Opening]
    choices: list[Choice]
    closing: Closing
