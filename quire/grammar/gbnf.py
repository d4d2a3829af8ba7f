"""Forms -> the text that xgrammar compiles: rules of the GBNF kind, special tokens as Token(id).

xgrammar reads characters, so nothing here is cut into lexemes: regular expressions, marks and
callers' rules are written as they stand. JSON schemas it turns into rules itself; those are taken
in under names of their own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from quire.errors import RequestError
from quire.grammar import ebnf, regex
from quire.grammar.forms import (
    Choice,
    Either,
    Form,
    Grammar,
    Json,
    Regex,
    Repeat,
    Seq,
    Tag,
    Tags,
    Text,
    Until,
)
from quire.grammar.marks import tags_by_trigger
from quire.grammar.scan import Mark, State, mark_of, scan
from quire.grammar.vocabulary import Names

MOST_WHITESPACE = 2
_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|[A-Za-z_][\w.-]*')

Converted = Callable[[Json | Grammar], str]
"""A schema, or a caller's Lark text, as rules with `root`: xgrammar's own work."""


def rules(form: Form, names: Names, converted: Converted) -> str:
    """The grammar's text; its root is `root`."""
    writer = _Writer(names, converted)
    start = writer.rule(form)
    return "\n".join([f"root ::= {start}", *writer.lines]) + "\n"


class _Writer:
    def __init__(self, names: Names, converted: Converted) -> None:
        self.names = names
        self.converted = converted
        self.lines: list[str] = []
        self._known: dict[Form, str] = {}
        self._numbers = itertools.count()

    def rule(self, form: Form) -> str:
        """The name of a rule for the form."""
        if form not in self._known:
            self._known[form] = self._write(form)
        return self._known[form]

    def named(self, body: str) -> str:
        name = f"r{next(self._numbers)}"
        self.lines.append(f"{name} ::= {body}")
        return name

    def _write(self, form: Form) -> str:
        if isinstance(form, Json):
            return self._taken_in(self.converted(form))
        if isinstance(form, Regex):
            return self.named(_regex(regex.whole(regex.parse(form.pattern), search=False)))
        if isinstance(form, Choice):
            return self.named(" | ".join(map(_text, form.options)))
        if isinstance(form, Text):
            return self.named(self.pieces(form.text))
        if isinstance(form, Seq):
            return self.named(" ".join(map(self.rule, form.parts)) or '""')
        if isinstance(form, Either):
            return self.named(" | ".join(map(self.rule, form.parts)))
        if isinstance(form, Repeat):
            return self.named(self._repeat(form))
        if isinstance(form, Until):
            return self._until(form.mark)
        if isinstance(form, Tag):
            return self.rule(Seq((Text(form.begin), form.content, Text(form.end))))
        if isinstance(form, Tags):
            return self.named(self._tags(form))
        assert isinstance(form, Grammar)
        if ebnf.is_ebnf(form.text):
            return _Rules(self, ebnf.Rules(form.text, regex.MOST_POSITIONS)).rule("root")
        return self._taken_in(self.converted(form))

    def pieces(self, text: str) -> str:
        return " ".join(
            f"Token({piece})" if isinstance(piece, int) else _text(piece)
            for piece in self.names.cut(text)
        ) or '""'  # fmt: skip

    def token(self, name: str) -> str:
        """A special token that a caller names `<name>` or `<[id]>`."""
        numbered = re.fullmatch(r"<\[(\d+)\]>", name)
        if numbered is None and name not in self.names.ids:
            raise RequestError(f"the grammar names {name:.60}, which is no special token here")
        return f"Token({numbered[1] if numbered else self.names.ids[name]})"

    def _repeat(self, form: Repeat) -> str:
        if form.most == 0:
            return '""'
        part = self.rule(form.part)
        most = None if form.most is None else form.most - 1
        more = self.named(f"{self.pieces(form.between)} {part}")
        some = f"{part} {more}{count(max(form.least - 1, 0), most)}" if most != 0 else part
        return some if form.least else f"({some})?"

    # -- any text up to marks ---------------------------------------------------------------

    def _until(self, mark: str) -> str:
        if not mark:
            raise RequestError("structured output: any text needs a mark that ends it")
        spelled: Mark = tuple(mark)
        named = mark_of(self.names.cut(mark))
        return self._scanned({spelled: '""', named: '""'})

    def _tags(self, form: Tags) -> str:
        barred, groups = tags_by_trigger(form, self.names)
        behind: dict[Mark, str | None] = {tuple(one): None for one in barred}
        for trigger, tags in groups.items():
            rests = [Seq((Text(t.begin[len(trigger) :]), t.content, Text(t.end))) for t in tags]
            behind[mark_of(self.names.cut(trigger))] = self.rule(Either(tuple(rests)))
        one = self._scanned(behind) if form.tags else ""
        end = self._free(barred)
        if not one:
            return end
        if form.only_first:
            return one if form.least else f"{one} | {end}"
        return f"{one}{count(form.least, None)} {end}"

    def _free(self, barred: Sequence[str]) -> str:
        """Any text without these."""
        return self._scanned({tuple(one): None for one in barred}, may_end=True)

    def _scanned(self, behind: Mapping[Mark, str | None], may_end: bool = False) -> str:
        """Any text up to the first of the marks, and what follows it. None: it may not stand.

        may_end: the text may end before any mark.
        """
        follows = list(behind.values())
        states = scan(list(behind))
        prefix = f"r{next(self._numbers)}_"
        for at, state in enumerate(states):
            if state.ends is None:
                steps = _steps(state, states, follows, prefix)
                ways = ['""', *steps] if may_end and not state.inside else steps
                self.lines.append(f"{prefix}{at} ::= {' | '.join(ways)}")
            elif (after := follows[state.ends]) is not None:
                self.lines.append(f"{prefix}{at} ::= {after}")
        return f"{prefix}0"

    # -- what xgrammar wrote ----------------------------------------------------------------

    def _taken_in(self, text: str) -> str:
        """Rules under names of their own; the name of their root."""
        prefix = f"j{next(self._numbers)}_"
        own = set(re.findall(r"(?m)^([A-Za-z_][\w.-]*) ::=", text))

        def one(found: re.Match[str]) -> str:
            return prefix + found[0] if found[0] in own else found[0]

        self.lines.append(_NAME.sub(one, text).strip())
        return f"{prefix}root"


class _Rules:
    """The rules of one EBNF grammar that a caller wrote."""

    def __init__(self, writer: _Writer, rules: ebnf.Rules) -> None:
        self.writer = writer
        self.rules = rules
        self._names: dict[str, str] = {}

    def rule(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = f"r{next(self.writer._numbers)}"
            body = self.expression(self.rules.by_name[name])
            self.writer.lines.append(f"{self._names[name]} ::= {body}")
        return self._names[name]

    def expression(self, expr: ebnf.Expr) -> str:
        if isinstance(expr, ebnf.Ref):
            return self.rule(expr.name)
        if isinstance(expr, ebnf.Token):
            return self.writer.token(expr.name)
        if isinstance(expr, ebnf.Times):
            return _repeated(f"({self.expression(expr.part)})", expr.least, expr.most)
        if isinstance(expr, ebnf.Or):
            return "(" + " | ".join(map(self.expression, expr.parts)) + ")"
        if isinstance(expr, ebnf.Cat):
            return " ".join(map(self.expression, expr.parts)) or '""'
        return _regex(expr)


def _steps(
    state: State, states: Sequence[State], follows: Sequence[str | None], prefix: str
) -> list[str]:
    """What may come in a state, and the state that it leads to."""
    made: list[str] = []
    known: list[tuple[int, int]] = []
    leading: dict[int, list[tuple[int, int]]] = {}
    for symbol, to in state.next.items():
        if isinstance(symbol, str):
            known.append((ord(symbol), ord(symbol)))
        ends = states[to].ends
        if ends is not None and follows[ends] is None:
            continue
        if isinstance(symbol, int):
            made.append(f"Token({symbol}) {prefix}{to}")
        else:
            leading.setdefault(to, []).append((ord(symbol), ord(symbol)))
    made += [f"{_chars(regex.union(tuple(some)))} {prefix}{to}" for to, some in leading.items()]
    if not state.inside:
        made.append(f"{_chars(regex.others(regex.union(tuple(known))))} {prefix}0")
    return made


def count(least: int, most: int | None) -> str:
    """How often what stands before it is repeated."""
    short = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((least, most))
    return short if short is not None else f"{{{least},{'' if most is None else most}}}"


def _repeated(part: str, least: int, most: int | None) -> str:
    return '""' if most == 0 else part + count(least, most)


def _regex(node: regex.Node) -> str:
    if isinstance(node, regex.Chars):
        return _chars(node.ranges)
    if isinstance(node, regex.Repeat):
        return _repeated(f"({_regex(node.part)})", node.least, node.most)
    if isinstance(node, regex.Seq):
        return " ".join(_literal_runs(node.parts)) or '""'
    assert isinstance(node, regex.Alt)
    return "(" + " | ".join(map(_regex, node.parts)) + ")"


def _literal_runs(parts: Iterable[regex.Node]) -> Iterable[str]:
    """Single characters that stand together become one string."""
    for single, run in itertools.groupby(parts, key=_single):
        if single:
            yield _text("".join(chr(one.ranges[0][0]) for one in run))  # type: ignore[union-attr]
        else:
            yield from map(_regex, run)


def _single(node: regex.Node) -> bool:
    return isinstance(node, regex.Chars) and [a == b for a, b in node.ranges] == [True]


def _chars(ranges: regex.Ranges) -> str:
    if not ranges:
        raise RequestError("the regular expression has a class that no character is of")
    return "[" + "".join(_range(first, last) for first, last in ranges) + "]"


def _range(first: int, last: int) -> str:
    return _escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}"


def _escaped(point: int) -> str:
    is_plain = chr(point).isascii() and chr(point).isalnum()
    return chr(point) if is_plain else f"\\U{point:08x}"


def _text(text: str) -> str:
    """A string. NUL is written as a class: within a string xgrammar ends at it."""
    made = []
    for part in re.split("(\0)", text):
        if part == "\0":
            made.append("[\\U00000000]")
        elif part:
            made.append('"' + "".join(_escaped(ord(char)) for char in part) + '"')
    return " ".join(made) or '""'
