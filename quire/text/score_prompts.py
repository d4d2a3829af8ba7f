"""Prompts of rerankers that are decoders: a query and a document in one text.

A template of these models writes every special token by itself. The query comes first, so that
documents of one query share a cached prefix. Sources: the model cards of the checkpoints.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

from quire.config.engine_config import ScoreFormat
from quire.errors import RequestError
from quire.text.templates.chat_template import ChatTemplate
from quire.text.tokenizing.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CHAT_START = "<|im_start|>"
"""A query that begins so has the template already, as scripts for other engines write it."""
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_GEMMA_QUESTION = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the "
    "query by providing a prediction of either 'Yes' or 'No'."
)
_MXBAI_QUESTION = (
    "You are a search relevance expert who evaluates how well documents match search queries. For "
    "each query-document pair, carefully analyze the semantic relationship between them, then "
    "provide your binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
)
_ROLES = tuple(re.compile(rf"""(["']){role}\1""") for role in ("query", "document"))


@dataclass(frozen=True, slots=True)
class ScoreTemplate:
    """render: (query, document, instruction or None) -> text of a prompt."""

    name: str
    render: Callable[[str, str, str | None], str]
    takes_instruction: bool = True
    adds_special_tokens: bool = False  # the tokenizer adds some to the text


def _qwen3_reranker(query: str, document: str, instruction: str | None) -> str:
    if query.startswith(CHAT_START):
        return query + document
    task = instruction or QWEN3_INSTRUCTION
    return (
        f"<|im_start|>system\n{_QWEN3_SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: {task}\n"
        f"<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def _mxbai_rerank_v2(query: str, document: str, instruction: str | None) -> str:
    if query.startswith(CHAT_START):
        return query + document
    task = f"instruction: {instruction}\n" if instruction else ""
    return (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        f"<|im_end|>\n<|im_start|>user\n{task}query: {query}\ndocument: {document}\n"
        f"{_MXBAI_QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )


def _bge_reranker_gemma(query: str, document: str, instruction: str | None) -> str:
    return f"A: {query}\nB: {document}\n{instruction or _GEMMA_QUESTION}"


_BUILT_IN: dict[ScoreFormat, ScoreTemplate] = {
    "qwen3_reranker": ScoreTemplate("Qwen3-Reranker", _qwen3_reranker),
    "mxbai_rerank_v2": ScoreTemplate("mxbai-rerank-v2", _mxbai_rerank_v2),
    "bge_reranker_gemma": ScoreTemplate(
        "bge-reranker-v2-gemma", _bge_reranker_gemma, adds_special_tokens=True
    ),
    "concatenated": ScoreTemplate(
        "none", lambda query, document, _: query + document, False, adds_special_tokens=True
    ),
}


def has_score_roles(template: str | None) -> bool:
    """Whether a chat template writes messages of the roles `query` and `document`."""
    return template is not None and all(role.search(template) for role in _ROLES)


def given_template(source: str, tokenizer: Tokenizer) -> ScoreTemplate:
    """Make one of a chat template's text. Raises RequestError if it writes no queries."""
    if not has_score_roles(source):
        raise RequestError(
            "the chat template for scores must write messages of the roles 'query' and 'document'",
            param="chat_template",
        )
    return _chat_score_template(tokenizer.template(source), "chat_template")


def own_template(
    score_format: ScoreFormat, tokenizer: Tokenizer, chat_template: str | None
) -> ScoreTemplate | None:
    """Choose the template of a model, and log it. None: the tokenizer joins pairs.

    chat_template: the server's; None: the tokenizer's own. It is used if it has the roles.
    """
    source = chat_template or tokenizer.chat_template
    if source is not None and has_score_roles(source):
        log.info("scores: the model's chat template writes query and document")
        return _chat_score_template(tokenizer.template(source), "chat template")
    found = _BUILT_IN.get(score_format)
    if score_format == "concatenated":
        log.warning(
            "scores: query and document become one text without a template, which gives wrong "
            "scores with most models; set chat_template to one with the roles query and document"
        )
    elif found is not None:
        log.info("scores: prompts are written for %s", found.name)
    return found


def _chat_score_template(template: ChatTemplate, name: str) -> ScoreTemplate:
    def render(query: str, document: str, instruction: str | None) -> str:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        variables = None if instruction is None else {"instruction": instruction}
        return template.render_as_is(messages, variables=variables)

    return ScoreTemplate(name, render)
