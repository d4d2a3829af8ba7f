"""Validates grammar nodes before a request is queued.

    build_constraint(form) -> Constraint   or RequestError with the place and the reason

Pure Python, in linear time, without a backend. Compile workers rewrite schemas; they may still find
that one cannot be enforced, or that a form takes too much work (quire.grammar.compilation).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from quire.config.structured_backends import canonical_name
from quire.core.constraint import Constraint
from quire.errors import ConfigError, RequestError
from quire.grammar import grammar_ast
from quire.grammar.automata import dfa, regex_ast
from quire.grammar.backends import backend_select
from quire.grammar.grammar_ast import (
    AlternationNode,
    ChoiceNode,
    GrammarNode,
    JsonNode,
    LiteralNode,
    RegexNode,
    RepeatNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    UntilNode,
    UserGrammarNode,
)
from quire.grammar.json_schema.document import UnsupportedSchema
from quire.grammar.json_schema.lowering import read_ignored

MAX_DEPTH = 64
"""Forms within forms."""
MAX_PARTS = 10_000
"""Forms in all."""
MAX_CHOICES = 10_000
MAX_CHOICE_CHARS = 262_144
"""Of all choices together."""
MAX_GRAMMAR_CHARS = 262_144
MAX_GRAMMAR_LINES = 10_000
MAX_GRAMMAR_BRACKETS = 200
"""Brackets within brackets."""
MAX_TEXT_CHARS = 262_144
"""Of a text, mark or trigger that a form holds."""
MAX_REPEATS = 10_000
MAX_SPACING_CHARS = 256
CACHE_SIZE = 64
"""Checked grammars that are cached."""

_SPACES = regex_ast.RegexRepeat(regex_ast.CharClass(((9, 10), (13, 13), (32, 32))), 0, None)


def build_constraint(
    form: GrammarNode, backend: str = "auto", *, param: str | None = None
) -> Constraint:
    """The form, checked, with the backend that is to compile it.

    param: the caller's word for the field that the form came from. Raises RequestError.
    """
    try:
        name = _backend(backend)
        _NodeValidator().validate(form)
        return Constraint(grammar_ast.dump_node(form), name)
    except RequestError as error:
        error.param = error.param or param
        raise


def ignored_keywords(form: GrammarNode) -> tuple[str, ...]:
    """Keywords and formats of its schemas that are not enforced. The form is a checked one."""
    found: set[str] = set()

    def read(node: JsonNode) -> JsonNode:
        found.update(read_ignored(node.schema))
        return node

    grammar_ast.map_json(form, read)
    return tuple(sorted(found))


def _backend(given: str) -> str:
    try:
        backend_select.check_backend(given)
    except ConfigError as error:
        raise RequestError(str(error)) from None
    return canonical_name(given)


class _NodeValidator:
    """One walk over one form."""

    def __init__(self) -> None:
        self.num_parts = 0

    def validate(self, form: GrammarNode, depth: int = 0) -> None:
        """Raises RequestError."""
        self.num_parts += 1
        if self.num_parts > MAX_PARTS:
            raise RequestError(f"the requested structure has more than {MAX_PARTS} parts")
        if depth > MAX_DEPTH:
            raise RequestError(f"the requested structure is nested deeper than {MAX_DEPTH} levels")
        if isinstance(form, SequenceNode | AlternationNode):
            if isinstance(form, AlternationNode) and not form.parts:
                raise RequestError("a choice between forms needs one at least")
            for part in form.parts:
                self.validate(part, depth + 1)
        elif isinstance(form, RepeatNode):
            _check_counts(form)
            self.validate(form.part, depth + 1)
        elif isinstance(form, TagNode):
            _check_text(form.begin, "the begin of a tag")
            _check_text(form.end, "the end of a tag")
            self.validate(form.content, depth + 1)
        elif isinstance(form, TaggedTextNode):
            _check_tags(form)
            for tag in form.tags:
                self.validate(tag, depth + 1)
        else:
            _check_leaf(form)


# -- leaves -------------------------------------------------------------------------------------


def _check_json(form: JsonNode) -> None:
    try:
        read_ignored(form.schema)
    except UnsupportedSchema as error:
        raise UnsupportedSchema(error.place, error.reason, form.owner) from None
    if form.whitespace_pattern is not None:
        _check_spacing(form.whitespace_pattern)


def _check_leaf(
    form: JsonNode | RegexNode | ChoiceNode | UserGrammarNode | LiteralNode | UntilNode,
) -> None:
    if isinstance(form, JsonNode):
        _check_json(form)
    elif isinstance(form, RegexNode):
        _check_regex(form.pattern)
    elif isinstance(form, ChoiceNode):
        _check_choice(form.options)
    elif isinstance(form, UserGrammarNode):
        _check_grammar(form.text)
    elif isinstance(form, LiteralNode):
        _check_text(form.text, "a text of a form")
    else:
        _check_text(form.terminator, "a mark that ends a text")
        if not form.terminator:
            raise RequestError("any text needs a mark that ends it, and this one is empty")


@functools.lru_cache(maxsize=CACHE_SIZE)
def _check_regex(pattern: str) -> None:
    if not pattern:
        raise RequestError("the regular expression is empty")
    _check_encodable(pattern, "the regular expression")
    if (
        regex_ast.text_lengths(
            regex_ast.without_anchors(regex_ast.parse_regex(pattern), search=False)
        )
        is None
    ):
        raise RequestError("the regular expression matches no text")


@functools.lru_cache(maxsize=CACHE_SIZE)
def _check_spacing(pattern: str) -> None:
    if len(pattern) > MAX_SPACING_CHARS:
        raise RequestError(
            f"whitespace_pattern has {len(pattern)} characters; the limit is {MAX_SPACING_CHARS}"
        )
    try:
        node = regex_ast.without_anchors(regex_ast.parse_regex(pattern), search=False)
        fits = dfa.RegexDfa([node], [_SPACES]).is_empty and regex_ast.text_lengths(node) is not None
    except dfa.DfaTooComplex:
        raise RequestError("whitespace_pattern is too complex") from None
    if not fits:
        raise RequestError(
            "whitespace_pattern must match white space of JSON only: space, tab and line breaks"
        )


def _check_choice(options: Sequence[str]) -> None:
    if not options:
        raise RequestError("a choice needs one option at least")
    if len(options) > MAX_CHOICES:
        raise RequestError(f"{len(options)} choices; the limit is {MAX_CHOICES}")
    if (chars := sum(map(len, options))) > MAX_CHOICE_CHARS:
        raise RequestError(f"choices of {chars} characters; the limit is {MAX_CHOICE_CHARS}")
    for option in options:
        _check_text(option, "a choice")


def _check_grammar(text: str) -> None:
    if not text.strip():
        raise RequestError("the grammar is empty")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"the grammar has {len(text)} characters; the limit is {MAX_GRAMMAR_CHARS}"
        )
    if (lines := text.count("\n")) > MAX_GRAMMAR_LINES:
        raise RequestError(f"the grammar has {lines} lines; the limit is {MAX_GRAMMAR_LINES}")
    _check_encodable(text, "the grammar")
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_GRAMMAR_BRACKETS:
        raise RequestError(f"brackets of the grammar are nested over {MAX_GRAMMAR_BRACKETS} deep")


def _check_text(text: str, what: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise RequestError(f"{what} has {len(text)} characters; the limit is {MAX_TEXT_CHARS}")
    _check_encodable(text, what)


def _check_encodable(text: str, what: str) -> None:
    if "\0" in text:
        raise RequestError(f"{what} holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{what} holds half a surrogate pair, which is not a character"
        ) from None


# -- what holds other forms ---------------------------------------------------------------------


def _check_counts(form: RepeatNode) -> None:
    _check_text(form.separator, "the separator of repeated parts")
    most = form.min_count if form.max_count is None else form.max_count
    if not 0 <= form.min_count <= most:
        raise RequestError(f"a part is repeated from {form.min_count} to {most} times")
    if most > MAX_REPEATS:
        raise RequestError(f"a part is repeated {most} times; the limit is {MAX_REPEATS}")


def _check_tags(form: TaggedTextNode) -> None:
    if not form.triggers or not all(form.triggers):
        raise RequestError("tags need triggers, and an empty one triggers everywhere")
    if not form.tags:
        raise RequestError("tags need one tag at least")
    if not 0 <= form.min_tags <= MAX_REPEATS:
        raise RequestError(f"{form.min_tags} tags at least; the limit is {MAX_REPEATS}")
    for trigger in form.triggers:
        _check_text(trigger, "a trigger")
    for tag in form.tags:
        if not any(tag.begin.startswith(trigger) for trigger in form.triggers):
            raise RequestError(f"the tag that begins with {tag.begin!r:.60} begins with no trigger")
