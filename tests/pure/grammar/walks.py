"""Random texts of a form, as a model of random weights would write them: walks over a backend's
masks with the embedded model's tokenizer, closed within a budget.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import numpy as np

import quire.embedded
from quire.core.constraint import Constraint
from quire.engine.startup.vocabulary import build_vocabulary
from quire.grammar import grammar_ast
from quire.grammar.backends import backend_select
from quire.grammar.backends.base import CompiledGrammar
from quire.grammar.compilation.compile_service import CompileService
from quire.grammar.json_schema import rewrite
from quire.grammar.length_closing import budgeted_matcher, completion_plan
from quire.grammar.length_closing.token_classes import TokenClasses
from quire.grammar.vocabulary import Vocabulary
from quire.text.tokenizing.tokenizer import load_tokenizer

LIKELY = 0.5
"""How often a token is drawn of those that make JSON, and not of all that are allowed."""
MOST = 500
CLOSING = (b"}", b"]", b",", b":", b"n", b"u", b"l", b"t", b"f")
"""Outside strings, what brings the end nearer; best first."""


@functools.cache
def tokens() -> tuple[Vocabulary, TokenClasses, np.ndarray]:
    """Of the embedded model: vocabulary, its spelling, and which tokens [V] make JSON."""
    folder = Path(quire.embedded.__file__).parent
    tokenizer = load_tokenizer(str(folder))
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    made = build_vocabulary(tokenizer, size, [tokenizer.eos_token_id])
    likely = [bool(re.fullmatch(rb'[\[\]{}",: 0-9]+', piece)) for piece in made.tokens]
    return made, TokenClasses(made), np.array(likely)


@functools.cache
def service() -> CompileService:
    return CompileService(tokens()[0])


@functools.cache
def compiler(name: str):
    return backend_select.build_compiler(name, tokens()[0])


def json_node(schema: object, closed: bool = False) -> grammar_ast.JsonNode:
    """The node of a schema, parsed or as text."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return grammar_ast.JsonNode(text, closed=closed)


def compiled(constraint: Constraint) -> CompiledGrammar:
    """The grammar of a constraint."""
    return compiler(constraint.backend).compile(rewritten(constraint))


def rewritten(constraint: Constraint) -> grammar_ast.GrammarNode:
    """Its grammar with schemas as llguidance gets them."""
    return grammar_ast.map_json(grammar_ast.load_node(constraint.form), rewrite.rewrite_node)


def least(constraint: Constraint, grammar: CompiledGrammar) -> completion_plan.MinCompletion:
    """The fewest tokens that a text of it takes."""
    return completion_plan.find_min_completion(
        rewritten(constraint), grammar.matcher(), tokens()[1]
    )


def walk(grammar: CompiledGrammar, draw: random.Random, ease: int) -> str | None:
    """One text. After `ease` tokens it takes what ends strings, objects and arrays where it may.

    None: it came to no end within MOST tokens. Fails where the masks lead into a dead end.
    """
    words, _, likely = tokens()
    matcher = grammar.matcher()
    mask = np.zeros(words.mask_words, np.int32)
    text = b""
    for count in range(MOST):
        if matcher.is_complete and (matcher.is_terminated or count >= ease or draw.random() < 0.3):
            return text.decode()
        matcher.fill_bitmask(mask)
        allowed = _allowed(mask)
        allowed[list(words.eos_token_ids)] = False
        assert allowed.any(), f"nothing may follow {text!r}"
        token = _ending(text, allowed) if count >= ease else None
        if token is None:
            token = _drawn(allowed, likely, draw)
        assert matcher.accept(token), f"{words.tokens[token]!r} was allowed after {text!r}"
        text += words.tokens[token]
    return None


def _ending(text: bytes, allowed: np.ndarray) -> int | None:
    """A token that brings the end nearer, if one may follow."""
    within = len(re.findall(rb'(?<!\\)(?:\\\\)*"', text)) % 2
    spelled = tokens()[1].ids
    for piece in (b'"',) if within else CLOSING:
        if (token := spelled.get(piece)) is not None and allowed[token]:
            return token
    return None


def walk_within(
    grammar: CompiledGrammar, least: completion_plan.MinCompletion, budget: int, draw: random.Random
) -> str:
    """One text of at most `budget` tokens, closed in time."""
    words, spelling, likely = tokens()
    guide = budgeted_matcher.BudgetedMatcher(
        grammar.matcher(), completion_plan.build_completion_plan(least, spelling)
    )
    mask = np.zeros(words.mask_words, np.int32)
    text = b""
    for left in range(budget, 0, -1):
        if guide.is_terminated:
            break
        guide.fill_bitmask(mask, left)
        allowed = _allowed(mask)
        assert allowed.any(), f"nothing may follow {text!r}"
        token = _drawn(allowed, likely, draw)
        if token in words.eos_token_ids:
            break
        assert guide.accept(token), f"{words.tokens[token]!r} was allowed after {text!r}"
        text += words.tokens[token]
    assert guide.is_complete, f"not whole after {budget} tokens: {text!r}"
    return text.decode()


def _allowed(mask: np.ndarray) -> np.ndarray:
    """Whether each token [V] is allowed."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return bits[: len(tokens()[2])].view(bool)


def _drawn(allowed: np.ndarray, likely: np.ndarray, draw: random.Random) -> int:
    if draw.random() < LIKELY and (few := np.flatnonzero(allowed & likely)).size:
        return int(draw.choice(few))
    return int(draw.choice(np.flatnonzero(allowed)))


def number(text: str) -> Decimal | int | float:
    """A JSON number with a point or an exponent, exactly."""
    if re.search(r"[eE][+-]?0*[1-9]\d{3}", text):
        return float(text)
    value = Decimal(text)
    whole = value.is_finite() and abs(value.adjusted()) < 400 and value == value.to_integral_value()
    return int(value) if whole else value


def spaces(text: str) -> Iterator[str]:
    """White space between the tokens of a JSON text."""
    yield from re.findall(r"\s+", re.sub(r'"(?:[^"\\]|\\.)*"', '""', text))
