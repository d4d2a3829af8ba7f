"""Forms -> the text that llguidance compiles: Lark with %json, special tokens by id, lazy lexemes.

llguidance cuts text into lexemes, each as long as can be. So what is regular and stands together
becomes one lexeme, in which nothing is cut; and any text up to a mark is a lazy one. Special
tokens are in no lexeme: they are named by id, and free text never holds them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from quire.errors import RequestError
from quire.grammar import ebnf, own_lark, regex
from quire.grammar.forms import (
    Either,
    Form,
    Grammar,
    Json,
    Repeat,
    Seq,
    Tag,
    Tags,
    Text,
    Until,
)
from quire.grammar.lexemes import Lexemes, count, spelled
from quire.grammar.marks import tags_by_trigger
from quire.grammar.open_ends import goes_on_behind_open_text
from quire.grammar.regular import MOST_POSITIONS, regular
from quire.grammar.schema_text import closed
from quire.grammar.vocabulary import Names

WHITESPACE = r"[ \n\r\t]{1,2}"
"""Between JSON tokens: llguidance matches it once at each place."""
OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Forcing takes tokens from text as a tokenizer would; and loops for ever on some grammars."""
OWN = "// written by a caller"
"""Stands in grammars that hold one of a caller's: they may be ambiguous without end."""
_ANY = "/[\\x00-\U0010ffff]*/"


def grammars(form: Form, names: Names) -> list[dict[str, str]]:
    """llguidance's list of grammars; the first is the form."""
    if goes_on_behind_open_text(form):
        raise RequestError(
            "more stands behind text that has no clear end; only the backend xgrammar can do that"
        )
    writer = _Writer(names)
    node = regular(form, names.cut)
    start = writer.rule(form) if node is None else writer.lexeme(node)
    lines = [f"start: {start}", *writer.lines]
    return [{"lark_grammar": OPTIONS + "\n".join(lines) + "\n"}, *writer.others]


class _Writer:
    """Rules of one grammar, as they come to be needed."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.lines: list[str] = []
        self.others: list[dict[str, str]] = []
        self._known: dict[Form, str] = {}
        self._terminals: dict[str, str] = {}
        self._lexemes = Lexemes(self.lexeme)

    def rule(self, form: Form) -> str:
        """The name of a rule for the form."""
        if form not in self._known:
            self._known[form] = self._write(form)
        return self._known[form]

    def _write(self, form: Form) -> str:
        node = regular(form, self.names.cut)
        if node is not None:
            return self.named(self._lexemes.within([node]))
        if isinstance(form, Json):
            return self.named(f"%json {_schema(form)}")
        if isinstance(form, Text):
            return self.named(self.pieces(self.names.cut(form.text)))
        if isinstance(form, Seq):
            return self.named(self._sequence(form.parts))
        if isinstance(form, Either):
            return self.named(self._either(form.parts))
        if isinstance(form, Repeat):
            return self.named(self._repeat(form))
        if isinstance(form, Until):
            return self._until(form.mark)
        if isinstance(form, Tag):
            return self.rule(Seq((Text(form.begin), form.content, Text(form.end))))
        if isinstance(form, Tags):
            return self.named(self._tags(form))
        assert isinstance(form, Grammar)
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

    def lexeme(self, node: regex.Node) -> str:
        if node == regex.EMPTY:
            return self.named('""')
        return self.terminal(slashed(node))

    def token(self, name: str) -> str:
        """A special token that a caller names `<name>` or `<[id]>`."""
        if re.fullmatch(r"<\[\d+\]>", name):
            return name
        if name not in self.names.ids:
            raise RequestError(f"the grammar names {name:.60}, which is no special token here")
        return f"<[{self.names.ids[name]}]>"

    def pieces(self, pieces: Sequence[str | int]) -> str:
        """A text, special tokens by id."""
        return " ".join(
            f"<[{piece}]>" if isinstance(piece, int) else spelled(piece) for piece in pieces
        ) or '""'  # fmt: skip

    # -- forms ------------------------------------------------------------------------------

    def _sequence(self, parts: Iterable[Form]) -> str:
        """What is regular and stands together is one lexeme."""
        made: list[str] = []
        run: list[regex.Node] = []
        for part in _flat(parts):
            node = regular(part, self.names.cut)
            if node is not None:
                run.append(node)
                continue
            made += [*self._run(run), self.rule(part)]
            run = []
        return " ".join([*made, *self._run(run)]) or '""'

    def _run(self, run: list[regex.Node]) -> list[str]:
        return [self._lexemes.within(run)] if run else []

    def _either(self, parts: Iterable[Form]) -> str:
        found = [regular(part, self.names.cut) for part in parts]
        nodes = tuple(node for node in found if node is not None)
        rules = [self.rule(part) for part, node in zip(parts, found) if node is None]
        return " | ".join([*([self._lexemes.either(nodes)] if nodes else []), *rules])

    def _repeat(self, form: Repeat) -> str:
        if form.most == 0:
            return '""'
        part = self.rule(form.part)
        some = part
        if form.most != 1:
            more = self._sequence([Text(form.between), form.part]) if form.between else part
            some += f" ({more}){count(form.least - 1, form.most and form.most - 1)}"
        return some if form.least else f"({some})?"

    def _until(self, mark: str) -> str:
        """A special token ends it, and so does its name in other tokens: readers read text."""
        if not mark:
            raise RequestError("structured output: any text needs a mark that ends it")
        pieces = self.names.cut(mark)
        spelled = self.named(f"{_ANY[:-1]}{_slashed_text(mark)}/", "[lazy]")
        if pieces == [mark]:
            return spelled
        before = self.terminal(_free([mark]))
        return self.named(f"{spelled} | {self._behind(before, pieces, [mark])}")

    def _behind(self, free: str, pieces: Sequence[str | int], barred: Sequence[str]) -> str:
        """Free text and then the pieces, of which one is a special token."""
        if isinstance(pieces[0], int):
            return f"{free} {self.pieces(pieces)}"
        ending = f"{_ANY[:-1]}{_slashed_text(pieces[0])}/ & {_free(barred)}"
        return f"{self.terminal(ending)} {self.pieces(pieces[1:])}"

    def _tags(self, form: Tags) -> str:
        barred, groups = tags_by_trigger(form, self.names)
        end = self.terminal(_free(barred))
        if not groups:
            return end
        each = [self._triggered(trigger, tags, barred) for trigger, tags in groups.items()]
        one = "(" + " | ".join(each) + ")"
        if form.only_first:
            return one if form.least else f"{one} | {end}"
        return f"{one}{{{form.least},}} {end}"

    def _triggered(self, trigger: str, tags: list[Tag], barred: Sequence[str]) -> str:
        pieces = self.names.cut(trigger)
        rests = [Seq((Text(tag.begin[len(trigger) :]), tag.content, Text(tag.end))) for tag in tags]
        rest = self.rule(Either(tuple(rests)))
        if pieces != [trigger]:
            head = self._behind(self.terminal(_free(barred)), pieces, barred)
            return f"{head} {rest}"
        others = [one for one in barred if one != trigger]
        alone = f" & {_free(others)}" if others else ""
        head = self.named(self.terminal(f"{_ANY[:-1]}{_slashed_text(trigger)}/{alone}"), "[lazy]")
        return f"{head} {rest}"

    # -- grammars that callers write --------------------------------------------------------

    def _grammar(self, form: Grammar) -> str:
        if ebnf.is_ebnf(form.text):
            rules = ebnf.Rules(form.text, MOST_POSITIONS)
            node = rules.regular(ebnf.Ref("root"))
            if node is not None:
                return self.lexeme(node)
            self.lines.append(OWN)
            return _Rules(self, rules).rule("root")
        text = own_lark.prepared(form.text, self.names, WHITESPACE)
        self.lines.append(OWN)
        name = f"g{len(self.others)}"
        self.others.append({"name": name, "lark_grammar": text + "\n" + OPTIONS})
        return self.named(f"@{name}")


class _Rules:
    """The rules of one EBNF grammar. What is not recursive in them becomes lexemes.

    Not spelled out: a keyword beside names must be as long a lexeme as they are.
    """

    def __init__(self, writer: _Writer, rules: ebnf.Rules) -> None:
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

    def expression(self, expr: ebnf.Expr) -> str:
        node = self.rules.regular(expr)
        if node is not None:
            return self.writer.lexeme(node)
        if isinstance(expr, ebnf.Ref):
            return self.rule(expr.name)
        if isinstance(expr, ebnf.Token):
            return self.writer.token(expr.name)
        if isinstance(expr, ebnf.Times):
            if expr.most == 0:
                return '""'
            return f"({self.expression(expr.part)}){count(expr.least, expr.most)}"
        if isinstance(expr, ebnf.Or):
            return "(" + " | ".join(map(self.expression, expr.parts)) + ")"
        assert isinstance(expr, ebnf.Cat)
        return self._sequence(expr.parts)

    def _sequence(self, parts: Iterable[ebnf.Expr]) -> str:
        """What is regular and stands together is one lexeme, unless that were too long a one."""
        made: list[str] = []
        run: list[regex.Node] = []
        for part in parts:
            node = self.rules.regular(part)
            fits = node is not None and regex.positions(regex.Seq((*run, node))) <= MOST_POSITIONS
            if not fits:
                made += self._lexemes(run)
                run = []
            if node is not None:
                run.append(node)
            else:
                made.append(self.expression(part))
        return " ".join([*made, *self._lexemes(run)]) or '""'

    def _lexemes(self, run: list[regex.Node]) -> list[str]:
        return [self.writer.lexeme(regex.Seq(tuple(run)))] if run else []


def slashed(node: regex.Node) -> str:
    """A regular expression between slashes, and none within."""
    return "/" + re.sub(r"\\.|/", _escaped_slash, regex.text(node), flags=re.DOTALL) + "/"


def _escaped_slash(found: re.Match[str]) -> str:
    return "\\/" if found[0] == "/" else found[0]


def _slashed_text(text: str) -> str:
    return slashed(regex.literal(text))[1:-1]


def _free(barred: Sequence[str]) -> str:
    """A terminal's body: any text without these."""
    if not barred:
        return _ANY
    inner = "|".join(map(_slashed_text, barred))
    return f"{_ANY} & ~{_ANY[:-1]}(?:{inner}){_ANY[1:]}"


def _flat(parts: Iterable[Form]) -> Iterable[Form]:
    for part in parts:
        if isinstance(part, Seq):
            yield from _flat(part.parts)
        elif isinstance(part, Tag):
            yield from _flat((Text(part.begin), part.content, Text(part.end)))
        else:
            yield part


def _schema(form: Json) -> str:
    schema = closed(form)
    if not isinstance(schema, dict):
        schema = {"anyOf": [schema]} if schema is False else {}
    written: dict[str, object] = {"whitespace_flexible": False}
    if form.spacing is not None:
        written = {"whitespace_pattern": regex.text(regex.whole(regex.parse(form.spacing), False))}
    elif form.whitespace:
        written = {"whitespace_pattern": WHITESPACE}
    return json.dumps({"x-guidance": written, **schema})
