"""Runs beam searches over an engine, several prompts at once, and gives them their text."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.params import BeamSearchParams, SamplingParams
from quire.core.types import TokenLogprobs
from quire.engine.beams import Beam, BeamSearch
from quire.llm.engine import LLMEngine
from quire.llm.progress import Interruptible, Processed, UseTqdm
from quire.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestOutput,
)
from quire.text.prompts import Prompt


def run(
    engine: LLMEngine,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    *,
    priorities: Sequence[int],
    names: Sequence[str],
    at_once: int,
    use_tqdm: UseTqdm,
) -> list[BeamSearchOutput]:
    """Search for every prompt, at most `at_once` of them together. Outputs in order."""
    searches = [
        _search(engine, prompt, params, priority, name)
        for prompt, priority, name in zip(prompts, priorities, names)
    ]
    bar = Processed(len(searches), use_tqdm)
    outputs = []
    try:
        with Interruptible() as interrupt:
            for first in range(0, len(searches), at_once):
                together = searches[first : first + at_once]
                _run_together(engine, together, interrupt)
                for search, prompt in zip(together, prompts[first:]):
                    outputs.append(_output(engine, search, prompt, params))
                    bar.finished(_counted(search))
    finally:
        bar.close()
    return outputs


def _search(
    engine: LLMEngine, prompt: Prompt, params: BeamSearchParams, priority: int, name: str
) -> BeamSearch:
    """Check a prompt by the same rules as any request."""
    allowed = params.allowed_token_ids
    sampling = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=allowed)
    request = engine.inputs.request(prompt, sampling, request_id=name, priority=priority).request
    return BeamSearch(
        name,
        request.prompt,
        params,
        eos_ids=engine.inputs.eos_ids,
        room=engine.inputs.max_model_len - len(request.prompt),
        vocab=engine.inputs.vocab_size,
        priority=priority,
        salt=request.salt,
    )


def _run_together(
    engine: LLMEngine, searches: Sequence[BeamSearch], interrupt: Interruptible
) -> None:
    """Round after round, all searches in the same steps."""
    try:
        while live := [search for search in searches if not search.over]:
            for search in live:
                _ask(engine, search)
            while any(search.waiting for search in live):
                interrupt.check()
                engine.step()
    finally:
        for search in searches:
            for request_id in search.held():
                engine.watch(request_id, None)
                engine.engine.abort(request_id)
                engine.engine.release(request_id)


def _ask(engine: LLMEngine, search: BeamSearch) -> None:
    for request in search.requests():
        engine.engine.add(request)
        engine.watch(request.id, search.take)
    for request_id in search.parents():
        engine.watch(request_id, None)
        engine.engine.release(request_id)


def _output(
    engine: LLMEngine, search: BeamSearch, prompt: Prompt, params: BeamSearchParams
) -> BeamSearchOutput:
    sequences = [_sequence(engine, search, beam, prompt, params) for beam in search.result()]
    return BeamSearchOutput(sequences)


def _sequence(
    engine: LLMEngine, search: BeamSearch, beam: Beam, prompt: Prompt, params: BeamSearchParams
) -> BeamSearchSequence:
    tokens = [*search.prompt, *beam.tokens]
    tokenizer = engine.tokenizer
    text = None if tokenizer is None else tokenizer.decode(tokens, params.skip_special_tokens)
    return BeamSearchSequence(
        orig_prompt=prompt,
        tokens=tokens,
        logprobs=[_entry(engine, one) for one in beam.logprobs],
        cum_logprob=beam.total,
        text=text,
        finish_reason=beam.finish,
        stop_reason=beam.stop_reason,
    )


def _entry(engine: LLMEngine, said: TokenLogprobs) -> dict[int, Logprob]:
    decoded = engine.tokenizer.decoded if engine.tokenizer is not None else None
    return {
        token: Logprob(value, rank, decoded(token) if decoded is not None else None)
        for token, value, rank in zip(said.ids, said.values, said.ranks)
    }


def _counted(search: BeamSearch) -> RequestOutput:
    """What the bar counts."""
    beams = [
        CompletionOutput(i, "", beam.tokens, None, None) for i, beam in enumerate(search.result())
    ]
    return RequestOutput(search.name, None, list(search.prompt), None, beams, True)
