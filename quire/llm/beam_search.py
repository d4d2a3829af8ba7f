"""Runs beam searches over an engine, several prompts at once, and adds their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.params import BeamSearchParams, SamplingParams
from quire.core.types import AdapterRef, TokenLogprobs
from quire.engine.client.beam_search import Beam, BeamSearch
from quire.errors import Unsupported
from quire.llm.engine import LLMEngine
from quire.llm.progress import InterruptHandler, ProcessedBar, UseTqdm
from quire.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestOutput,
)
from quire.text.prompts import Prompt


@dataclass(frozen=True, slots=True)
class FinishedBeamSearch:
    """A finished search, and its prompt."""

    engine: LLMEngine
    prompt: Prompt
    params: BeamSearchParams
    search: BeamSearch
    beams: list[Beam]
    lora_request: object | None = None

    def as_beams(self) -> BeamSearchOutput:
        """What LLM.beam_search returns: whole sequences, the prompt included."""
        return BeamSearchOutput([self._sequence(beam) for beam in self.beams])

    def as_request_output(self) -> RequestOutput:
        """The result of generate() with BeamSearchParams: a beam is an answer."""
        prompt = list(self.search.prompt)
        source = list(self.search.encoder_prompt)
        given = self.prompt if isinstance(self.prompt, str) else None
        answers = [self._completion_output(i, beam) for i, beam in enumerate(self.beams)]
        return RequestOutput(
            self.search.name,
            self._text(prompt) if source or given is None else given,
            prompt,
            None,
            answers,
            True,
            encoder_prompt=(given or self._text(source)) if source else None,
            encoder_prompt_token_ids=source or None,
            lora_request=self.lora_request,
        )

    def _sequence(self, beam: Beam) -> BeamSearchSequence:
        tokens = [*self.search.prompt, *beam.tokens]
        return BeamSearchSequence(
            orig_prompt=self.prompt,
            tokens=tokens,
            logprobs=[self._logprob_entry(one) for one in beam.logprobs],
            cum_logprob=beam.logprob_sum,
            text=self._text(tokens),
            finish_reason=beam.finish_reason,
            stop_reason=beam.stop_reason,
            lora_request=self.lora_request,
        )

    def _completion_output(self, index: int, beam: Beam) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=self._text(list(beam.tokens)) or "",
            token_ids=list(beam.tokens),
            cumulative_logprob=beam.logprob_sum,
            logprobs=None,
            finish_reason=beam.finish_reason,
            lora_request=self.lora_request,
        )

    def _text(self, tokens: list[int]) -> str | None:
        tokenizer = self.engine.tokenizer
        return tokenizer.decode(tokens, self.params.skip_special_tokens) if tokenizer else None

    def _logprob_entry(self, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        tokenizer = self.engine.tokenizer
        return {
            token: Logprob(value, rank, tokenizer.decode_token(token) if tokenizer else None)
            for token, value, rank in zip(logprobs.ids, logprobs.values, logprobs.ranks)
        }


def run_beam_searches(
    engine: LLMEngine,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    *,
    adapters: Sequence[AdapterRef | None],
    lora_requests: Sequence[object],
    priorities: Sequence[int],
    names: Sequence[str],
    at_once: int,
    use_tqdm: UseTqdm,
) -> list[FinishedBeamSearch]:
    """Search for every prompt, at most `at_once` of them together. In order.

    lora_requests: what the outputs show.
    """
    searches = [
        _build_search(engine, prompt, params, adapter, priority, name)
        for prompt, adapter, priority, name in zip(prompts, adapters, priorities, names)
    ]
    bar = ProcessedBar(len(searches), use_tqdm)
    found = []
    try:
        with InterruptHandler() as interrupt:
            for first in range(0, len(searches), at_once):
                together = searches[first : first + at_once]
                _run_together(engine, together, interrupt)
                for search, prompt, shown in zip(together, prompts[first:], lora_requests[first:]):
                    beams = search.best_beams()
                    found.append(FinishedBeamSearch(engine, prompt, params, search, beams, shown))
                    bar.count_finished(found[-1].as_request_output())
    finally:
        bar.close()
    return found


def _build_search(
    engine: LLMEngine,
    prompt: Prompt,
    params: BeamSearchParams,
    adapter: AdapterRef | None,
    priority: int,
    name: str,
) -> BeamSearch:
    """Check a prompt by the same rules as any request."""
    allowed = params.allowed_token_ids
    sampling = SamplingParams(
        max_tokens=params.max_tokens,
        temperature=0.0,
        allowed_token_ids=allowed,
        ignore_eos=params.ignore_eos,
    )
    request = engine.inputs.process(
        prompt, sampling, request_id=name, priority=priority, adapter=adapter
    ).request
    if request.prompt_embeds:  # each beam of each round would bring them again
        message = "prompt_embeds cannot be combined with beam search: sample, or give token ids"
        raise Unsupported(message, param="prompt_embeds")
    return BeamSearch(
        request,
        params,
        eos_ids=engine.inputs.eos_ids,
        max_new_tokens=engine.inputs.room_behind(request),
        vocab=engine.inputs.vocab_size,
    )


def _run_together(
    engine: LLMEngine, searches: Sequence[BeamSearch], interrupt: InterruptHandler
) -> None:
    """Run round after round, all searches in the same steps."""
    try:
        while live := [search for search in searches if not search.is_finished]:
            for search in live:
                _submit_round(engine, search)
            while any(search.is_waiting for search in live):
                interrupt.check()
                engine.step_keeping_outputs()
                for search in live:
                    search.raise_error()
    finally:
        for search in searches:
            for request_id in search.requests_to_end():
                engine.subscribe(request_id, None)
                engine.engine.abort(request_id)
                engine.engine.release(request_id)


def _submit_round(engine: LLMEngine, search: BeamSearch) -> None:
    for request in search.next_requests():
        engine.engine.add(request)
        engine.subscribe(request.id, search.add_update)
    for request_id in search.take_releasable():
        engine.subscribe(request_id, None)
        engine.engine.release(request_id)
