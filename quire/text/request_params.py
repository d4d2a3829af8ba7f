"""What SamplingParams of a request mean for the engine, without a tokenizer or a model."""

from __future__ import annotations

from quire.core.params import SamplingParams
from quire.core.types import StopConditions
from quire.errors import RequestError


def check_allowed_tokens_remain(params: SamplingParams, stop: StopConditions) -> None:
    """Raise RequestError if the parameters allow no token at all."""
    if params.allowed_token_ids is None:
        return
    banned = {ids[0] for ids in params.bad_words_token_ids if len(ids) == 1}
    if stop.min_tokens:
        banned |= stop.eos_ids | stop.token_ids
    if banned.issuperset(params.allowed_token_ids):
        raise RequestError(
            "allowed_token_ids leaves no token: bad_words, or min_tokens with EOS and "
            "stop_token_ids, forbid all of them",
            param="allowed_token_ids",
        )


def engine_params(requested: SamplingParams) -> SamplingParams:
    """best_of ranks by cumulative logprob, so the engine must report the chosen tokens' ones.

    The form of the text is sent as a constraint, and the prediction as tokens.
    """
    ranks = requested.num_sequences != requested.n and requested.logprobs is None
    if not ranks and requested.structured_outputs is None and requested.prediction is None:
        return requested
    engine = requested.clone()
    engine.structured_outputs = engine.prediction = None
    if ranks:
        engine.logprobs = 0
    return engine


def reads_prefix_cache(params: SamplingParams) -> bool:
    """Whether a request may use cached prefixes. By default not for logprobs of its prompt, which
    cached tokens do not have."""
    if params.skip_reading_prefix_cache is not None:
        return not params.skip_reading_prefix_cache
    return params.prompt_logprobs is None
