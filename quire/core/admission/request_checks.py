"""Request checks: refuse malformed requests, and requests that could never finish."""

from __future__ import annotations

from collections.abc import Mapping

from quire.core.kv.kv_cache import KVCache
from quire.core.media.item_tensors import with_tensors_of
from quire.core.scheduling.request_group import RequestGroup
from quire.core.types import Request
from quire.errors import RequestError, TooLong, context_overflow


def check_request(request: Request, groups: Mapping[str, RequestGroup]) -> Request:
    """Return the request with what it shares with its parent.

    Raises RequestError if it is malformed or conflicts with active requests.
    """
    if request.id in groups:
        raise RequestError(f"request id {request.id!r} is in use", param="request_id")
    if not request.prompt or request.n < 1 or request.stop.max_tokens < 1:
        raise RequestError(
            f"request {request.id!r} has {len(request.prompt)} prompt tokens, n={request.n}, "
            f"max_tokens={request.stop.max_tokens}; each must be at least 1"
        )
    _check_resumed(request)
    if request.parent is None:
        return request
    parent = groups.get(request.parent)
    if parent is None or not parent.hold:
        raise RequestError(
            f"parent {request.parent!r} is not a request made with hold=True, or was released",
            param="parent",
        )
    return with_tensors_of(request, parent.request)


def _check_resumed(request: Request) -> None:
    """Raise unless each unfinished sequence of a resumed request can generate more tokens."""
    resumed = request.resumed_tokens
    if not resumed:
        return
    longest = max((len(one) for one in resumed if one is not None), default=request.stop.max_tokens)
    if len(resumed) != request.n or longest >= request.stop.max_tokens:
        raise RequestError(
            f"request {request.id!r} has {longest} resumed tokens in {len(resumed)} of "
            f"n={request.n} sequences, and max_tokens={request.stop.max_tokens}: no token is left "
            "to generate"
        )


def check_length(request: Request, kv: KVCache, max_len: int) -> None:
    """Raise TooLong if a sequence could not finish even with the whole cache."""
    prompt = len(request.prompt)
    if prompt + (request.pooling is None) > max_len:
        problem = f"the prompt has {prompt} tokens, and the output needs at least one"
        raise context_overflow(max_len, problem, param="prompt")
    tokens = min(prompt + request.stop.max_tokens, max_len) - 1  # the last is never computed
    need = kv.max_blocks(request, tokens)
    if need > kv.pool.size:
        raise TooLong(
            f"prompt ({prompt} tokens) and output (up to {request.stop.max_tokens}) need {need} "
            f"KV cache blocks of {kv.block_size} tokens, and there are {kv.pool.size}; lower "
            "max_tokens or max_model_len, or raise num_gpu_blocks_override or "
            "kv_cache_memory_bytes",
            param="max_tokens",
        )
