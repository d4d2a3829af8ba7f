"""Beam search: runs rounds of one-token requests over an engine. Makes no engine calls itself.

Each round requests one token per live beam with the 2 * beam_width best logprobs, and keeps the
best beam_width continuations. A child has the request of its beam as parent. The KV of a
parent is held until then, so no token is computed twice.

    round 0      prompt ──┬─ a ──┬─ aa
    round 1               └─ b   ├─ ab      requests "name/0/0", "name/1/0", "name/1/1", ...
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from quire.core.params import BeamSearchParams, SamplingParams
from quire.core.types import Request, StopConditions, TokenLogprobs, Update
from quire.errors import EngineError


@dataclass(slots=True, eq=False)
class Beam:
    """One candidate: its generated tokens and their logprobs."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    logprob_sum: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | None = None
    scored_tokens: int = 0  # tokens that count for the length penalty: all but EOS
    request_id: str | None = field(default=None, repr=False)  # holds the KV of all but the last

    def score(self, length_penalty: float) -> float:
        """Returns the sum of logprobs divided by a power of the length."""
        length: float = max(self.scored_tokens, 1) ** length_penalty
        return self.logprob_sum / length


class BeamSearch:
    """The search for one prompt: submit next_requests(), pass their updates to add_update(), until
    is_finished.

    request: with the prompt, and with all that the search's requests have in common. eos_ids:
    tokens that complete a beam. max_new_tokens: what the context has left.
    """

    def __init__(
        self,
        request: Request,
        params: BeamSearchParams,
        *,
        eos_ids: Iterable[int] = (),
        max_new_tokens: int,
        vocab: int,
    ) -> None:
        self.name = request.id
        self.prompt, self.encoder_prompt = request.prompt, request.source_tokens
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._rounds = min(params.max_tokens, max_new_tokens)
        self._round = 0
        self._live = [Beam()]
        self._completed: list[Beam] = []
        self._pending: dict[str, Beam] = {}
        self._children: dict[str, list[Beam]] = {}
        self._held: list[str] = []  # requests of the round before
        self._error: str | None = None
        self._allowed = frozenset(params.allowed_token_ids or ())
        self._forced = request.forced
        banned = 0
        if self._forced is not None:
            banned = len(self._forced.banned) + len(self._forced.banned_first)
        best = vocab if self._allowed else min(2 * params.beam_width + banned, vocab)
        self._first_request = replace(
            request,
            stop=StopConditions(max_tokens=1),
            params=SamplingParams(max_tokens=1, temperature=0.0, logprobs=best),
            n=1,
            hold=True,
            constraint=None,
            thinking=None,
            forced=None,
            num_beams=params.beam_width,
        )

    @property
    def is_finished(self) -> bool:
        """Whether no round is left."""
        return not self._pending and (self._round >= self._rounds or not self._live)

    @property
    def is_waiting(self) -> bool:
        """Whether results of this round are missing."""
        return bool(self._pending)

    def next_requests(self) -> list[Request]:
        """The requests of the next round, one per live beam. Then release take_releasable()."""
        requests = [self._request(i, beam) for i, beam in enumerate(self._live)]
        self._pending = {request.id: beam for request, beam in zip(requests, self._live)}
        return requests

    def take_releasable(self) -> list[str]:
        """Return requests of the last round, which the engine need not hold any longer."""
        done, self._held = self._held, []
        return done

    def add_update(self, update: Update) -> None:
        """Add the result of one request; the last ends the round. Errors: see raise_error()."""
        if update.finish is None:
            return
        beam = self._pending.pop(update.request_id)
        if not update.logprobs:
            self._held.append(update.request_id)
            self._error = f"beam search {self.name} ended: {update.error or update.finish}"
            return
        self._children[update.request_id] = list(self._expand(beam, update))
        if not self._pending:
            self._finish_round()

    def raise_error(self) -> None:
        """Raise EngineError if a request failed. To be called between steps."""
        if self._error is not None:
            raise EngineError(self._error)

    def best_beams(self) -> list[Beam]:
        """The beam_width best, best first."""
        found = self._completed + self._live
        return self._best(found)

    def requests_to_end(self) -> list[str]:
        """Requests to abort or release when the search ends or is aborted."""
        return list(dict.fromkeys([*self._held, *self._children, *self._pending]))

    def _request(self, index: int, beam: Beam) -> Request:
        request = replace(self._first_request, id=f"{self.name}/{self._round}/{index}")
        if beam.request_id is None:
            return request
        prompt = self.prompt + beam.tokens
        return replace(
            request,
            prompt=prompt,
            parent=beam.request_id,
            num_beams=1,
            deadline_at=None,
            rope_positions=self._rope_positions(len(beam.tokens)),
        )

    def _rope_positions(self, tokens: int) -> bytes:
        """Rotary positions of the prompt and so many tokens behind it; b"": 0, 1, 2, ..."""
        given, start = self._first_request.rope_positions, len(self.prompt)
        if not given:
            return given
        first = start + self._first_request.rope_delta
        tail = struct.pack(f"<{tokens}i", *range(first, first + tokens))
        size = 4 * start
        return b"".join(given[at : at + size] + tail for at in range(0, len(given), size))

    def _expand(self, beam: Beam, update: Update) -> Iterable[Beam]:
        assert update.logprobs is not None
        logprobs = update.logprobs[0]
        best = list(zip(logprobs.ids, logprobs.values))[1:]  # the first is the chosen token
        if self._allowed:
            best = [pair for pair in best if pair[0] in self._allowed]
        best = self._apply_forced(best)
        for token, value in best[: 2 * self._params.beam_width]:
            ended = token in self._eos
            shown = not ended or self._params.include_stop_str_in_output
            yield Beam(
                tokens=(*beam.tokens, token) if shown else beam.tokens,
                logprobs=(*beam.logprobs, logprobs),
                logprob_sum=beam.logprob_sum + value,
                finish_reason="stop" if ended else None,
                stop_reason=token if ended else None,
                scored_tokens=beam.scored_tokens + (not ended),
                request_id=update.request_id,
            )

    def _apply_forced(self, best: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """Return what the model's config allows as the next token, with logprobs.

        A forced token costs nothing, as in transformers' search.
        """
        if self._forced is None:
            return best
        index = len(self.prompt) + self._round
        allowed = self._forced.allowed_at(index)
        if allowed is not None:
            return [(token, 0.0) for token in sorted(allowed)]
        banned = frozenset(self._forced.banned_at(index))
        return [pair for pair in best if pair[0] not in banned]

    def _finish_round(self) -> None:
        """End the round: keep completed beams, and the best of the others."""
        grown = [beam for children in self._children.values() for beam in children]
        self._completed += [beam for beam in grown if beam.finish_reason is not None]
        self._live = self._best([beam for beam in grown if beam.finish_reason is None])
        self._held, self._children = list(self._children), {}
        self._round += 1
        if self._round >= self._rounds:
            for beam in self._live:
                beam.finish_reason = "length"

    def _best(self, beams: list[Beam]) -> list[Beam]:
        penalty = self._params.length_penalty
        ranked = sorted(beams, key=lambda beam: beam.score(penalty), reverse=True)
        return ranked[: self._params.beam_width]
