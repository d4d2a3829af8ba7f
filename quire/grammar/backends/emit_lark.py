"""Writes grammar nodes as Lark text for llguidance: %json, special tokens by id, lazy lexemes.

llguidance cuts a text into lexemes and makes each as long as possible. So adjacent regular parts
become one lexeme, and free text up to a mark becomes a lazy lexeme. Special tokens are named by id
and are part of no lexeme: free text never contains them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from quire.errors import RequestError
from quire.grammar.automata import regex_ast
from quire.grammar.automata.to_regex import MAX_POSITIONS, to_regex
from quire.grammar.backends.lexemes import LexemeWriter, lark_count, spell_chars
from quire.grammar.backends.tag_triggers import tags_by_trigger
from quire.grammar.backends.trailing_text import continues_after_trailing_text
from quire.grammar.frontends import ebnf, user_lark
from quire.grammar.grammar_ast import (
    AlternationNode,
    GrammarNode,
    JsonNode,
    LiteralNode,
    RepeatNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    UntilNode,
    UserGrammarNode,
)
from quire.grammar.json_schema.strings import ESCAPES
from quire.grammar.vocabulary import SpecialTokenNames

WHITESPACE = r"[ \n\r\t]{1,2}"
"""Between JSON tokens: llguidance matches it once at each place."""
LARK_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Forcing takes tokens from text as a tokenizer would; and loops for ever on some grammars."""
USER_GRAMMAR_MARKER = "// written by a caller"
"""Marks grammars that contain one of a caller: they may be ambiguous without end."""
_ANY = "/[\\x00-\U0010ffff]*/"


def emit_lark(form: GrammarNode, names: SpecialTokenNames) -> list[dict[str, str]]:
    """llguidance's list of grammars; the first is the form."""
    if continues_after_trailing_text(form):
        raise RequestError(
            "a part of the form follows text that has no clear end: end that text with a mark "
            "of its own, or put it last"
        )
    writer = _LarkWriter(names)
    node = to_regex(form, names.split)
    start = writer.rule(form) if node is None else writer.lexeme(node)
    lines = [f"start: {start}", *writer.lines]
    return [{"lark_grammar": LARK_OPTIONS + "\n".join(lines) + "\n"}, *writer.extra_grammars]


class _LarkWriter:
    """Rules of one grammar, as they come to be needed."""

    def __init__(self, names: SpecialTokenNames) -> None:
        self.names = names
        self.lines: list[str] = []
        self.extra_grammars: list[dict[str, str]] = []
        self._known: dict[GrammarNode, str] = {}
        self._terminals: dict[str, str] = {}
        self._lexemes = LexemeWriter(self.lexeme)

    def rule(self, form: GrammarNode) -> str:
        """The name of a rule for the form."""
        if form not in self._known:
            self._known[form] = self._write(form)
        return self._known[form]

    def _write(self, form: GrammarNode) -> str:
        node = to_regex(form, self.names.split)
        if node is not None:
            return self.named(self._lexemes.sequence([node]))
        if isinstance(form, JsonNode):
            return self.named(f"%json {_schema(form)}")
        if isinstance(form, LiteralNode):
            return self.named(self.pieces(self.names.split(form.text)))
        if isinstance(form, SequenceNode):
            return self.named(self._sequence(form.parts))
        if isinstance(form, AlternationNode):
            return self.named(self._either(form.parts))
        if isinstance(form, RepeatNode):
            return self.named(self._repeat(form))
        if isinstance(form, UntilNode):
            return self._until(form.terminator)
        if isinstance(form, TagNode):
            return self.rule(
                SequenceNode((LiteralNode(form.begin), form.content, LiteralNode(form.end)))
            )
        if isinstance(form, TaggedTextNode):
            return self.named(self._tags(form))
        assert isinstance(form, UserGrammarNode)
        return self._grammar(form)

    # -- lines ------------------------------------------------------------------------------

    def named(self, body: str, options: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        if body not in self._terminals:
            self._terminals[body] = f"T{len(self.lines)}"
            self.lines.append(f"{self._terminals[body]}: {body}")
        return self._terminals[body]

    def lexeme(self, node: regex_ast.RegexExpr) -> str:
        if node == regex_ast.EMPTY:
            return self.named('""')
        return self.terminal(lark_regex(node))

    def token(self, name: str) -> str:
        """A special token that a caller names `<name>` or `<[id]>`."""
        if re.fullmatch(r"<\[\d+\]>", name):
            return name
        if name not in self.names.ids:
            raise RequestError(
                f"the grammar names {name:.60}, which is not a special token of this model"
            )
        return f"<[{self.names.ids[name]}]>"

    def pieces(self, pieces: Sequence[str | int]) -> str:
        """A text, special tokens by id."""
        return " ".join(
            f"<[{piece}]>" if isinstance(piece, int) else spell_chars(piece) for piece in pieces
        ) or '""'  # fmt: skip

    # -- forms ------------------------------------------------------------------------------

    def _sequence(self, parts: Iterable[GrammarNode]) -> str:
        """Adjacent regular parts are one lexeme."""
        made: list[str] = []
        run: list[regex_ast.RegexExpr] = []
        for part in _flatten(parts):
            node = to_regex(part, self.names.split)
            if node is not None:
                run.append(node)
                continue
            made += [*self._run(run), self.rule(part)]
            run = []
        return " ".join([*made, *self._run(run)]) or '""'

    def _run(self, run: list[regex_ast.RegexExpr]) -> list[str]:
        return [self._lexemes.sequence(run)] if run else []

    def _either(self, parts: Iterable[GrammarNode]) -> str:
        found = [to_regex(part, self.names.split) for part in parts]
        nodes = tuple(node for node in found if node is not None)
        rules = [self.rule(part) for part, node in zip(parts, found) if node is None]
        return " | ".join([*([self._lexemes.alternation(nodes)] if nodes else []), *rules])

    def _repeat(self, form: RepeatNode) -> str:
        if form.max_count == 0:
            return '""'
        part = self.rule(form.part)
        some = part
        if form.max_count != 1:
            more = (
                self._sequence([LiteralNode(form.separator), form.part]) if form.separator else part
            )
            some += (
                f" ({more}){lark_count(form.min_count - 1, form.max_count and form.max_count - 1)}"
            )
        return some if form.min_count else f"({some})?"

    def _until(self, mark: str) -> str:
        """A special token ends it, and so does its name in other tokens: readers read text."""
        if not mark:
            raise RequestError("structured output: any text needs a mark that ends it")
        pieces = self.names.split(mark)
        spelled = self.named(f"{_ANY[:-1]}{_slash_text(mark)}/", "[lazy]")
        if pieces == [mark]:
            return spelled
        before = self.terminal(_free_text([mark]))
        return self.named(f"{spelled} | {self._free_text_then(before, pieces, [mark])}")

    def _free_text_then(self, free: str, pieces: Sequence[str | int], barred: Sequence[str]) -> str:
        """Free text and then the pieces, of which one is a special token."""
        if isinstance(pieces[0], int):
            return f"{free} {self.pieces(pieces)}"
        ending = f"{_ANY[:-1]}{_slash_text(pieces[0])}/ & {_free_text(barred)}"
        return f"{self.terminal(ending)} {self.pieces(pieces[1:])}"

    def _tags(self, form: TaggedTextNode) -> str:
        barred, groups = tags_by_trigger(form, self.names)
        end = self.terminal(_free_text(barred))
        if not groups:
            return end
        each = [self._triggered(trigger, tags, barred) for trigger, tags in groups.items()]
        one = "(" + " | ".join(each) + ")"
        if form.only_first:
            return one if form.min_tags else f"{one} | {end}"
        return f"{one}{{{form.min_tags},}} {end}"

    def _triggered(self, trigger: str, tags: list[TagNode], barred: Sequence[str]) -> str:
        pieces = self.names.split(trigger)
        rests = [
            SequenceNode(
                (LiteralNode(tag.begin[len(trigger) :]), tag.content, LiteralNode(tag.end))
            )
            for tag in tags
        ]
        rest = self.rule(AlternationNode(tuple(rests)))
        if pieces != [trigger]:
            head = self._free_text_then(self.terminal(_free_text(barred)), pieces, barred)
            return f"{head} {rest}"
        extra_grammars = [one for one in barred if one != trigger]
        alone = f" & {_free_text(extra_grammars)}" if extra_grammars else ""
        head = self.named(self.terminal(f"{_ANY[:-1]}{_slash_text(trigger)}/{alone}"), "[lazy]")
        return f"{head} {rest}"

    # -- grammars that callers write --------------------------------------------------------

    def _grammar(self, form: UserGrammarNode) -> str:
        if ebnf.is_ebnf(form.text):
            rules = ebnf.EbnfGrammar(form.text, MAX_POSITIONS)
            node = rules.to_regex(ebnf.RuleRef("root"))
            if node is not None:
                return self.lexeme(node)
            self.lines.append(USER_GRAMMAR_MARKER)
            return _LarkRules(self, rules).rule("root")
        text = user_lark.prepare_user_lark(form.text, self.names, WHITESPACE)
        self.lines.append(USER_GRAMMAR_MARKER)
        name = f"g{len(self.extra_grammars)}"
        self.extra_grammars.append({"name": name, "lark_grammar": text + "\n" + LARK_OPTIONS})
        return self.named(f"@{name}")


class _LarkRules:
    """The rules of one EBNF grammar. What is not recursive in them becomes lexemes.

    Not spelled out: a keyword beside names must be as long a lexeme as they are.
    """

    def __init__(self, writer: _LarkWriter, rules: ebnf.EbnfGrammar) -> None:
        self.writer = writer
        self.rules = rules
        self.prefix = f"e{len(writer.lines)}"
        self._names: dict[str, str] = {}

    def rule(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = f"{self.prefix}_{len(self._names)}"
            body = self.expression(self.rules.by_name[name])
            self.writer.lines.append(f"{self._names[name]}: {body}")
        return self._names[name]

    def expression(self, expr: ebnf.EbnfExpr) -> str:
        node = self.rules.to_regex(expr)
        if node is not None:
            return self.writer.lexeme(node)
        if isinstance(expr, ebnf.RuleRef):
            return self.rule(expr.name)
        if isinstance(expr, ebnf.SpecialTokenRef):
            return self.writer.token(expr.name)
        if isinstance(expr, ebnf.EbnfRepeat):
            if expr.max_count == 0:
                return '""'
            return f"({self.expression(expr.part)}){lark_count(expr.min_count, expr.max_count)}"
        if isinstance(expr, ebnf.EbnfAlternation):
            return "(" + " | ".join(map(self.expression, expr.parts)) + ")"
        assert isinstance(expr, ebnf.EbnfSequence)
        return self._sequence(expr.parts)

    def _sequence(self, parts: Iterable[ebnf.EbnfExpr]) -> str:
        """Adjacent regular parts are one lexeme, unless it would be too long."""
        made: list[str] = []
        run: list[regex_ast.RegexExpr] = []
        for part in parts:
            node = self.rules.to_regex(part)
            fits = (
                node is not None
                and regex_ast.count_positions(regex_ast.RegexSequence((*run, node)))
                <= MAX_POSITIONS
            )
            if not fits:
                made += self._lexemes(run)
                run = []
            if node is not None:
                run.append(node)
            else:
                made.append(self.expression(part))
        return " ".join([*made, *self._lexemes(run)]) or '""'

    def _lexemes(self, run: list[regex_ast.RegexExpr]) -> list[str]:
        return [self.writer.lexeme(regex_ast.RegexSequence(tuple(run)))] if run else []


def lark_regex(node: regex_ast.RegexExpr) -> str:
    """A regular expression between slashes, and none within."""
    return "/" + re.sub(r"\\.|/", _escaped_slash, regex_ast.to_pattern(node), flags=re.DOTALL) + "/"


def _escaped_slash(found: re.Match[str]) -> str:
    return "\\/" if found[0] == "/" else found[0]


def _slash_text(text: str) -> str:
    return lark_regex(regex_ast.literal_regex(text))[1:-1]


def _free_text(barred: Sequence[str]) -> str:
    """A terminal's body: any text without these."""
    if not barred:
        return _ANY
    inner = "|".join(map(_slash_text, barred))
    return f"{_ANY} & ~{_ANY[:-1]}(?:{inner}){_ANY[1:]}"


def _flatten(parts: Iterable[GrammarNode]) -> Iterable[GrammarNode]:
    for part in parts:
        if isinstance(part, SequenceNode):
            yield from _flatten(part.parts)
        elif isinstance(part, TagNode):
            yield from _flatten((LiteralNode(part.begin), part.content, LiteralNode(part.end)))
        else:
            yield part


def _schema(form: JsonNode) -> str:
    """The schema with options of llguidance."""
    try:
        schema = json.loads(form.schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        schema = {"anyOf": [schema]} if schema is False else {}
    options: dict[str, object] = {}
    if '"properties"' in form.schema or '"patternProperties"' in form.schema:
        options["json_allowed_escapes"] = ESCAPES
    if form.whitespace_pattern is not None:
        node = regex_ast.parse_regex(form.whitespace_pattern)
        options["whitespace_pattern"] = regex_ast.to_pattern(regex_ast.without_anchors(node, False))
    elif form.whitespace:
        options["whitespace_pattern"] = WHITESPACE
    else:
        options["whitespace_flexible"] = False
    return json.dumps({"x-guidance": options, **schema})
