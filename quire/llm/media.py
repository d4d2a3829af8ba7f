"""Media of offline prompts: prepared ahead of their requests, while the engine runs those before.

    prompts ── MediaFeed: a few ahead, in worker processes ──▶ inputs(i) ──▶ request i

Order is kept. An item that cannot be read raises when its prompt is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from quire.errors import Unsupported
from quire.media.expand import ReadyItem
from quire.text.media_prompt import MediaConversation, MediaInputs, MediaReader
from quire.text.prompts import Prompt, PromptMedia, check_cache_salt, read_prompt_media
from quire.text.templates.chat_template import ChatTemplate

AHEAD = 16
"""Prompts whose media are prepared before the prompt is due."""
WAIT_S = 0.002
"""Seconds of one wait for media while the engine has nothing to run."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The rendered text of a conversation, and its media."""

    text: str
    conversation: MediaConversation | None = None
    literals: Sequence[tuple[int, int]] = ()


def render_chat(
    reader: MediaReader | None,
    template: ChatTemplate,
    messages: Sequence[object],
    tools: Sequence[object] | None,
    **how: object,
) -> ChatPrompt:
    """Render a conversation. how: arguments of ChatTemplate.render. Raises RequestError."""
    if reader is None:
        return ChatPrompt(template.render(messages, tools, **how))  # type: ignore[arg-type]
    found = reader.read_conversation(messages, objects=True)
    text = template.render(
        found.messages,
        found.protect(tools),
        media=found.placeholders,
        interleave_media=reader.pipeline.settings.interleaves,
        **how,  # type: ignore[arg-type]
    )
    text, literals = found.restore(text)
    return ChatPrompt(text, found, literals)


class MediaFeed:
    """The media of the prompts of one call. Its owner asks for them in order."""

    def __init__(
        self,
        reader: MediaReader | None,
        prompts: Sequence[Prompt],
        chats: Sequence[ChatPrompt] | None,
        kwargs: Mapping[str, object] | None,
        run_engine: Callable[[], bool],
    ) -> None:
        """chats: what the prompts were rendered from. kwargs: mm_processor_kwargs of the call.

        run_engine: runs a step while media are awaited; returns whether there was one.
        """
        if kwargs and reader is None:
            raise Unsupported("mm_processor_kwargs: this model reads text only")
        self._reader = reader
        self._prompts = prompts
        self._chats = chats
        self._kwargs = kwargs
        self._run_engine = run_engine
        self._futures: dict[int, Future[list[ReadyItem]] | None] = {}
        self._begun = 0

    @property
    def has_media(self) -> bool:
        """Whether any prompt has media."""
        if self._reader is None:
            return False
        if self._chats is not None:
            return any(one.conversation and one.conversation.parts for one in self._chats)
        return any(read_prompt_media(one) is not None for one in self._prompts)

    def inputs(self, i: int) -> MediaInputs | None:
        """Return the media of a prompt. None: it has none, or they are refused with the prompt.

        Raises RequestError, MediaUnavailable, EngineError.
        """
        while self._begun < min(i + AHEAD, len(self._prompts)):
            self._futures[self._begun] = self._start(self._begun)
            self._begun += 1
        future = self._futures.pop(i)
        chat = None if self._chats is None else self._chats[i]
        if future is None:
            literals = () if chat is None else chat.literals
            return MediaInputs((), literals, True) if literals else None
        while not future.done():
            if not self._run_engine():
                wait_for(future)
        items = future.result()
        return MediaInputs(items, () if chat is None else chat.literals, chat is not None)

    def _start(self, i: int) -> Future[list[ReadyItem]] | None:
        if self._reader is None:
            return None
        if self._chats is not None:
            conversation = self._chats[i].conversation
            if conversation is None or not conversation.parts:
                return None
            return self._reader.start_parts(conversation.parts, kwargs=self._kwargs)
        prompt = self._prompts[i]
        given = read_prompt_media(prompt)
        if given is None:
            return None
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        return self._reader.start(self._with_kwargs(given), check_cache_salt(salt))

    def _with_kwargs(self, given: PromptMedia) -> PromptMedia:
        if not self._kwargs:
            return given
        return replace(given, processor_kwargs={**self._kwargs, **(given.processor_kwargs or {})})


def wait_for(future: Future[list[ReadyItem]]) -> None:
    """Wait a moment for a future, so that Ctrl-C is noticed. Its error is raised later."""
    try:
        future.exception(timeout=WAIT_S)
    except TimeoutError:
        return
