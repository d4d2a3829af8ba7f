"""Placement of requests on engines of one model: where they are computed soonest.

    cost = prompt tokens that wait there + those of the request that it has not cached
           + SEQUENCE_COST * sequences there

An engine is taken to have cached what was sent to it last, up to the size of its cache. No engine
is called for a placement: each reports its load with its outputs, and what it has not answered yet
is added here. Pure: no clock, no event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, takewhile
from typing import NamedTuple

from quire.core.scheduler_stats import EngineLoad
from quire.core.types import Request

CHUNK_TOKENS = 64
"""Prompts are compared in chunks of so many tokens."""
SEQUENCE_COST = 128
"""Prompt tokens whose computation delays others about as much as a sequence does by its steps."""


class Sent(NamedTuple):
    """Requests that an engine was sent and has not answered: its load does not contain them."""

    engine: int
    tokens: int
    sequences: int


class Placement:
    """The loads of some engines, and the prompts that each has been sent."""

    def __init__(self, engines: int, cache_tokens: int) -> None:
        """cache_tokens: of one engine's KV cache."""
        self._prompts = [_SentPrompts(max(1, cache_tokens // CHUNK_TOKENS)) for _ in range(engines)]
        self._loads = [EngineLoad()] * engines
        self._sent: list[dict[int, Sent]] = [{} for _ in range(engines)]  # by id()
        self._last = engines - 1

    def place(self, requests: Sequence[Request], candidates: Iterable[int]) -> Sent:
        """Choose the engine of least cost for requests that go together, as begin() with it."""
        keys = [chunk_keys(one) for one in requests]
        turns = len(self._loads)  # engines of one cost take turns
        self._last = min(
            candidates,
            key=lambda engine: (
                self._waiting(engine) - self._prompts[engine].num_cached(keys),
                (engine - self._last - 1) % turns,
            ),
        )
        return self._begin(requests, keys, self._last)

    def begin(self, requests: Sequence[Request], engine: int) -> Sent:
        """Count requests that are being sent to an engine. end() must follow."""
        return self._begin(requests, [chunk_keys(one) for one in requests], engine)

    def _begin(
        self, requests: Sequence[Request], keys: Sequence[Sequence[int]], engine: int
    ) -> Sent:
        prompts = self._prompts[engine]
        tokens = sum(one.num_prompt_tokens for one in requests) - prompts.num_cached(keys)
        sent = Sent(engine, tokens, sum(one.num_answers for one in requests))
        self._sent[engine][id(sent)] = sent
        prompts.add(keys)
        return sent

    def end(self, sent: Sent) -> None:
        """The engine has answered: its load contains what it has accepted."""
        self._sent[sent.engine].pop(id(sent), None)

    def report(self, engine: int, load: EngineLoad) -> None:
        """Take the load that an engine reports."""
        self._loads[engine] = load

    def clear(self, engine: int) -> None:
        """Another engine takes its place: it has neither load nor cache."""
        self._prompts[engine].clear()
        self._sent[engine].clear()
        self._loads[engine] = EngineLoad()

    def _waiting(self, engine: int) -> int:
        """Return the cost of what an engine has to do, in prompt tokens."""
        load, sent = self._loads[engine], self._sent[engine].values()
        tokens = load.queued_tokens + sum(one.tokens for one in sent)
        return tokens + SEQUENCE_COST * (load.sequences + sum(one.sequences for one in sent))


class _SentPrompts:
    """Chunks of the prompts that were sent to one engine, the least recently sent first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: OrderedDict[int, None] = OrderedDict()

    def num_cached(self, prompts: Iterable[Sequence[int]]) -> int:
        """Return how many tokens of these prompts, from their first on, are here."""
        known = self._keys
        return CHUNK_TOKENS * sum(
            sum(1 for _ in takewhile(known.__contains__, keys)) for keys in prompts
        )

    def add(self, prompts: Iterable[Sequence[int]]) -> None:
        for key in chain.from_iterable(prompts):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()


def chunk_keys(request: Request) -> list[int]:
    """Return a key of each whole chunk of the prompt, with all that comes before it.

    Not keys of the cache: a collision costs time and nothing else.
    """
    prompt, keys = request.prompt, []
    key = hash((request.cache_root, request.extra_content))
    for start in range(0, len(prompt) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        key = hash((key, prompt[start : start + CHUNK_TOKENS]))
        keys.append(key)
    return keys
