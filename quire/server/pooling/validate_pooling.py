"""Validates pooling requests: what can be checked before their texts are tokenized."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.engine_config import PoolingSection
from quire.errors import RequestError
from quire.server.app_state import AppState
from quire.server.formats import ignored_fields
from quire.server.formats.vector_encoding import VectorEncoding
from quire.server.generation.validate import check_chars, validate_request
from quire.server.pooling.pooling_request import (
    TASK_ROUTES,
    Inputs,
    Pairs,
    PoolingRequest,
)
from quire.text.pooling_input import PoolingInputProcessor

_OPTIONS = {
    "embed": "--runner pooling --convert embed",
    "classify": "--runner pooling --convert classify",
    "token_embed": """--runner pooling --pooler-config '{"task": "token_embed"}'""",
    "token_classify": """--runner pooling --pooler-config '{"task": "token_classify"}'""",
}
"""Task -> options of a server that has it."""


def validate_pooling(
    state: AppState, request: PoolingRequest, encodings: Sequence[VectorEncoding] = ()
) -> None:
    """Check all that depends neither on tokens nor on the key. encodings: the forms that results
    will have.

    Raises RequestError.
    """
    if state.options.strict:
        ignored_fields.refuse_unknown(request.ignored)
    state.ignored_field_log.log_once(request.ignored)
    source = request.source
    if isinstance(source, Pairs):
        _check_scoring(require_pooling(state))
        _check_texts(state, request, "query", source.queries)
        _check_texts(state, request, "document", source.documents)
        return
    section = require_pooling(state).section
    _check_task(section, request.params.task)
    if isinstance(source, Inputs):
        _check_texts(state, request, "prompt", source.prompts)
    else:
        validate_request(state, source.request)
    size = request.params.dimensions or section.default_dimensions or section.size
    for one in encodings:
        one.check_size(size, "embedding_types")


def require_pooling(state: AppState) -> PoolingInputProcessor:
    """The input processor of a model that pools. Raises RequestError for one that does not."""
    if state.pooling is None:
        message = (
            "this model generates text and has no embeddings or scores here: /v1/chat/completions "
            f"and /v1/completions serve it; {_OPTIONS['embed']} makes a server of embeddings of it"
        )
        raise RequestError(message)
    return state.pooling


def _check_task(section: PoolingSection, task: str | None) -> None:
    if task is None or task in section.tasks or task not in TASK_ROUTES:
        return
    served = " and ".join(f"{one} ({TASK_ROUTES[one]})" for one in section.tasks)
    message = f"this model is served for {served}, not for {task}"
    raise RequestError(f"{message}: start a server with {_OPTIONS[task]}", param="task")


def _check_scoring(pooling: PoolingInputProcessor) -> None:
    """Raise RequestError, with the route that serves the model, if it cannot score."""
    try:
        pooling.score_kind  # noqa: B018 - it raises
    except RequestError as error:
        route = TASK_ROUTES[pooling.section.tasks[0]]
        raise RequestError(f"{error}; {route} serves this model as it is") from None


def _check_texts(
    state: AppState, request: PoolingRequest, name: str, texts: Sequence[object]
) -> None:
    """Check that texts are neither empty nor endless."""
    param = request.field_names.get(name, name)
    for place, one in enumerate(texts):
        where = param if len(texts) == 1 else f"{param}[{place}]"
        if not one and request.refuses_empty:
            raise RequestError(f"{where} must not be empty", param=param)
        if not request.cuts and isinstance(one, str):
            check_chars(state, len(one), where)
