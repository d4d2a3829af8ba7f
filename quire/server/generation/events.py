"""Generation events: the form of an answer that all APIs format.

    PromptEvent                  of each prompt, before any event of its choices
    ChoiceDelta*, ChoiceFinish   of each choice; the finish comes with or after its last delta
    FinalEvent                   once, when every choice has finished

They come in lists, one per turn of the engine: what arrived together is sent together. Streamed or
not, the same events come; unstreamed they come all at once, with one delta for each choice.

`OutputParser` is the seam for models whose text holds more than content: it separates reasoning,
content and tool calls. Events depend on neither HTTP nor an API.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from quire.outputs import PromptLogprobs, SampleLogprobs


class DeltaToolCall(msgspec.Struct, frozen=True):
    """News of one tool call: `id` and `name` come once, at its beginning; arguments in pieces."""

    tool_index: int
    """Which of the choice's tool calls."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class PromptEvent(msgspec.Struct, frozen=True):
    """A prompt as the engine took it."""

    prompt_index: int
    """Of the prompt in the body."""
    prompt_ids: Sequence[int]
    cached_tokens: int
    """Leading tokens of it whose KV was found in the prefix cache."""
    prompt_text: str | None = None
    """None if it came as ids."""
    prompt_logprobs: PromptLogprobs | None = None
    """By position; None where nothing is known."""
    encoder_tokens: int = 0
    """Tokens that an encoder reads besides; they count as tokens of the prompt."""
    media_tokens: int = 0
    """Tokens of the prompt that images, video and audio take."""


class ChoiceDelta(msgspec.Struct, frozen=True, gc=False):
    """The new part of one choice. Its text may be empty: a character may not be complete yet."""

    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: SampleLogprobs | None = None
    """One step for each of token_ids, if the request has logprobs."""
    reasoning: str = ""
    tool_call: DeltaToolCall | None = None


class ChoiceFinish(msgspec.Struct, frozen=True):
    """A choice is complete."""

    index: int
    finish_reason: str
    """stop, length, abort, repetition or tool_calls."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it."""
    notes: Sequence[str] = ()
    """What was meant as markup and made no sense: it is in the text."""


class PredictionUsage(msgspec.Struct):
    """Tokens of a prediction that were drafted, by whether the model generated them too."""

    accepted: int = 0
    rejected: int = 0

    def as_dict(self) -> dict[str, int]:
        """As OpenAI's routes show it."""
        return {
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": self.rejected,
        }


class TokenUsage(msgspec.Struct):
    """Tokens of one response so far. A prompt counts once, whatever n."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, out of the prefix cache."""
    media_tokens: int = 0
    """Of the prompt, tokens of images, video and audio."""
    reasoning_tokens: int | None = None
    """Of the completion, tokens of reasoning; None without a reasoning parser."""
    prediction: PredictionUsage | None = None
    """None: the request predicted nothing."""

    def as_dict(self, *, details: bool) -> dict[str, object]:
        """As OpenAI's routes show it."""
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if details:
            body["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
            if self.media_tokens:
                body["prompt_tokens_details"] |= {"multimodal_tokens": self.media_tokens}
        completion: dict[str, int] = {}
        if self.reasoning_tokens is not None:
            completion["reasoning_tokens"] = self.reasoning_tokens
        if self.prediction is not None:
            completion |= self.prediction.as_dict()
        if completion:
            body["completion_tokens_details"] = completion
        return body


class FinalEvent(msgspec.Struct, frozen=True):
    """The last event."""

    usage: TokenUsage
    timing: Mapping[str, object] | None = None
    """Times of the parts of the request; None without `x_timing`."""
    metrics: Mapping[str, object] | None = None
    """Rates and times of a response of one sequence; None unless the server offers them."""


GenerationEvent = PromptEvent | ChoiceDelta | ChoiceFinish | FinalEvent


def pair_with_finish(
    events: Sequence[GenerationEvent],
) -> Iterator[tuple[GenerationEvent, ChoiceFinish | None]]:
    """Each event, a choice's Finish together with the Delta before it, if there is one."""
    paired: GenerationEvent | None = None
    for place, one in enumerate(events):
        if one is paired:
            continue
        after = events[place + 1] if place + 1 < len(events) else None
        if (
            isinstance(one, ChoiceDelta)
            and isinstance(after, ChoiceFinish)
            and after.index == one.index
        ):
            paired = after
            yield one, after
        else:
            yield one, None


class ParsedDelta(msgspec.Struct, frozen=True):
    """A piece of text that an OutputParser has parsed."""

    text: str = ""
    reasoning: str = ""
    tool_call: DeltaToolCall | None = None


class OutputParser(Protocol):
    """Reads the text of one choice as it comes. Any cut of the text gives the same pieces."""

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far; None without a reasoning parser."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Diagnostics so far: markup that made no sense."""
        ...

    def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> Sequence[ParsedDelta]:
        """Return the deltas that `text` adds, as far as certain; `last`: hold nothing back."""
        ...

    def finish(self, reason: str) -> str:
        """The finish reason to report: "tool_calls" in place of "stop" if it ended in calls."""
        ...


class FullChoice(msgspec.Struct):
    """All deltas of one choice put together, for an answer that is not streamed."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[DeltaToolCall] = []
    token_ids: Sequence[int] = ()
    logprobs: SampleLogprobs | None = None
    finish_reason: str = ""
    stop_reason: int | str | None = None
    notes: Sequence[str] = ()

    def add(self, delta: ChoiceDelta) -> None:
        """Put the next Delta behind what is there."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        if delta.token_ids:
            self.token_ids = [*self.token_ids, *delta.token_ids]
        if delta.logprobs is not None:
            self.logprobs = delta.logprobs if self.logprobs is None else self._merge_logprobs(delta)
        if delta.tool_call is not None:
            self._add_tool_call(delta.tool_call)

    def _merge_logprobs(self, delta: ChoiceDelta) -> SampleLogprobs:
        assert self.logprobs is not None
        assert delta.logprobs is not None
        self.logprobs.extend(delta.logprobs)  # type: ignore[arg-type]  # both of one kind
        return self.logprobs

    def _add_tool_call(self, news: DeltaToolCall) -> None:
        for i, call in enumerate(self.tool_calls):
            if call.tool_index == news.tool_index:
                arguments = call.arguments + news.arguments
                self.tool_calls[i] = msgspec.structs.replace(call, arguments=arguments)
                return
        self.tool_calls.append(news)


class FullResponse(msgspec.Struct):
    """A whole response: openings by place, choices by index."""

    prompts: list[PromptEvent]
    choices: list[FullChoice]
    final: FinalEvent


def collect_response(events: Iterable[GenerationEvent]) -> FullResponse:
    """All events of a response -> the response."""
    openings: dict[int, PromptEvent] = {}
    choices: dict[int, FullChoice] = {}
    closing = FinalEvent(TokenUsage())
    for event in events:
        if isinstance(event, PromptEvent):
            openings[event.prompt_index] = event
        elif isinstance(event, FinalEvent):
            closing = event
        else:
            choice = choices.setdefault(event.index, FullChoice(event.index))
            if isinstance(event, ChoiceDelta):
                choice.add(event)
            else:
                choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason
                choice.notes = event.notes
    return FullResponse(
        [openings[place] for place in sorted(openings)],
        [choices[index] for index in sorted(choices)],
        closing,
    )
