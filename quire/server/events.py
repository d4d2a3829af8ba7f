"""What a generation says, in one form: every dialect shapes these events and nothing else.

    Opening            of each prompt, before anything of its choices
    Delta*, Finish     of each choice; the Finish comes with or after its last Delta
    Closing            once, when every choice has finished

They come in lists, one per turn of the engine: what arrived together is sent together. Streamed or
not, the same events come; unstreamed they come all at once, with one Delta for each choice.

`Splitter` is the seam for models whose text holds more than text: it tells reasoning, content and
tool calls apart. None of it is HTTP, and none of it knows a dialect. What makes these events of the
engine's updates is quire.server.telling.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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


class Delta(msgspec.Struct, frozen=True, gc=False):
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
    notes: Sequence[str] = ()
    """What was meant as markup and made no sense: it is in the text."""


class Usage(msgspec.Struct):
    """Tokens of one response so far. A prompt counts once, whatever n."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    """Of the prompt, out of the prefix cache."""
    reasoning: int | None = None
    """Of the completion, tokens of reasoning; None where nothing tells them apart."""

    def shown(self, *, details: bool) -> dict[str, object]:
        """As OpenAI's routes show it."""
        body: dict[str, object] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        if details:
            body["prompt_tokens_details"] = {"cached_tokens": self.cached}
        if self.reasoning is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return body


class Closing(msgspec.Struct, frozen=True):
    """Nothing more will come."""

    usage: Usage
    timing: Mapping[str, object] | None = None
    """Where the time went, ready to be shown; None unless asked for (`x_timing`)."""
    metrics: Mapping[str, object] | None = None
    """Rates and times of a response of one sequence; None unless the server offers them."""


Event = Opening | Delta | Finish | Closing


def paired(events: Sequence[Event]) -> Iterator[tuple[Event, Finish | None]]:
    """Each event, a choice's Finish together with the Delta before it, if there is one."""
    told: Event | None = None
    for place, one in enumerate(events):
        if one is told:
            continue
        after = events[place + 1] if place + 1 < len(events) else None
        if isinstance(one, Delta) and isinstance(after, Finish) and after.index == one.index:
            told = after
            yield one, after
        else:
            yield one, None


class Said(msgspec.Struct, frozen=True):
    """A piece of text that a Splitter has understood."""

    text: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


class Splitter(Protocol):
    """Reads the text of one choice as it comes. Any cut of the text gives the same pieces."""

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far; None where nothing tells them apart."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Diagnostics so far: markup that made no sense."""
        ...

    def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> Sequence[Said]:
        """What `text` adds, as far as it is certain; `last`: give out what was held back."""
        ...

    def finish(self, reason: str) -> str:
        """The finish reason to tell: "tool_calls" in place of "stop" if it ended in calls."""
        ...


class Plain:
    """Text is content."""

    reasoning_tokens = None
    notes: Sequence[str] = ()

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
    notes: Sequence[str] = ()

    def add(self, delta: Delta) -> None:
        """Put the next Delta behind what is there."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        if delta.token_ids:
            self.token_ids = [*self.token_ids, *delta.token_ids]
        if delta.logprobs is not None:
            self.logprobs = delta.logprobs if self.logprobs is None else self._joined(delta)
        if delta.tool_call is not None:
            self._add_call(delta.tool_call)

    def _joined(self, delta: Delta) -> SampleLogprobs:
        assert self.logprobs is not None
        assert delta.logprobs is not None
        self.logprobs.extend(delta.logprobs)  # type: ignore[arg-type]  # both of one kind
        return self.logprobs

    def _add_call(self, news: ToolCall) -> None:
        for i, call in enumerate(self.tool_calls):
            if call.place == news.place:
                arguments = call.arguments + news.arguments
                self.tool_calls[i] = msgspec.structs.replace(call, arguments=arguments)
                return
        self.tool_calls.append(news)


class Whole(msgspec.Struct):
    """A whole response: openings by place, choices by index."""

    openings: list[Opening]
    choices: list[Choice]
    closing: Closing


def gather(events: Iterable[Event]) -> Whole:
    """All events of a response -> the response."""
    openings: dict[int, Opening] = {}
    choices: dict[int, Choice] = {}
    closing = Closing(Usage())
    for event in events:
        if isinstance(event, Opening):
            openings[event.place] = event
        elif isinstance(event, Closing):
            closing = event
        else:
            choice = choices.setdefault(event.index, Choice(event.index))
            if isinstance(event, Delta):
                choice.add(event)
            else:
                choice.reason, choice.stop_reason = event.reason, event.stop_reason
                choice.notes = event.notes
    return Whole(
        [openings[place] for place in sorted(openings)],
        [choices[index] for index in sorted(choices)],
        closing,
    )
