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
from quire.grammar.automata import regex_ast
from quire.grammar.automata.aho_corasick import (
    MarkerSymbols,
    ScanState,
    build_automaton,
    marker_symbols,
)
from quire.grammar.backends.tag_triggers import tags_by_trigger
from quire.grammar.frontends import ebnf
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
from quire.grammar.vocabulary import SpecialTokenNames

MAX_WHITESPACE = 2
_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|[A-Za-z_][\w.-]*')

NodeConverter = Callable[[JsonNode | UserGrammarNode], str]
"""A schema, or a caller's Lark text, as rules with `root`: xgrammar's own work."""


def emit_gbnf(form: GrammarNode, names: SpecialTokenNames, converted: NodeConverter) -> str:
    """The grammar's text; its root is `root`."""
    writer = _GbnfWriter(names, converted)
    start = writer.rule(form)
    return "\n".join([f"root ::= {start}", *writer.lines]) + "\n"


class _GbnfWriter:
    def __init__(self, names: SpecialTokenNames, converted: NodeConverter) -> None:
        self.names = names
        self.converted = converted
        self.lines: list[str] = []
        self._known: dict[GrammarNode, str] = {}
        self._numbers = itertools.count()

    def rule(self, form: GrammarNode) -> str:
        """The name of a rule for the form."""
        if form not in self._known:
            self._known[form] = self._write(form)
        return self._known[form]

    def named(self, body: str) -> str:
        name = f"r{next(self._numbers)}"
        self.lines.append(f"{name} ::= {body}")
        return name

    def _write(self, form: GrammarNode) -> str:
        if isinstance(form, JsonNode):
            return self._import_rules(self.converted(form))
        if isinstance(form, RegexNode):
            return self.named(
                _regex(regex_ast.without_anchors(regex_ast.parse_regex(form.pattern), search=False))
            )
        if isinstance(form, ChoiceNode):
            return self.named(" | ".join(map(_quote, form.options)))
        if isinstance(form, LiteralNode):
            return self.named(self.pieces(form.text))
        if isinstance(form, SequenceNode):
            return self.named(" ".join(map(self.rule, form.parts)) or '""')
        if isinstance(form, AlternationNode):
            return self.named(" | ".join(map(self.rule, form.parts)))
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
        if ebnf.is_ebnf(form.text):
            return _GbnfRules(self, ebnf.EbnfGrammar(form.text, regex_ast.MAX_POSITIONS)).rule(
                "root"
            )
        return self._import_rules(self.converted(form))

    def pieces(self, text: str) -> str:
        return " ".join(
            f"Token({piece})" if isinstance(piece, int) else _quote(piece)
            for piece in self.names.split(text)
        ) or '""'  # fmt: skip

    def token(self, name: str) -> str:
        """A special token that a caller names `<name>` or `<[id]>`."""
        numbered = re.fullmatch(r"<\[(\d+)\]>", name)
        if numbered is None and name not in self.names.ids:
            raise RequestError(f"the grammar names {name:.60}, which is no special token here")
        return f"Token({numbered[1] if numbered else self.names.ids[name]})"

    def _repeat(self, form: RepeatNode) -> str:
        if form.max_count == 0:
            return '""'
        part = self.rule(form.part)
        most = None if form.max_count is None else form.max_count - 1
        more = self.named(f"{self.pieces(form.separator)} {part}")
        some = (
            f"{part} {more}{repeat_count(max(form.min_count - 1, 0), most)}" if most != 0 else part
        )
        return some if form.min_count else f"({some})?"

    # -- any text up to marks ---------------------------------------------------------------

    def _until(self, mark: str) -> str:
        if not mark:
            raise RequestError("structured output: any text needs a mark that ends it")
        spelled: MarkerSymbols = tuple(mark)
        named = marker_symbols(self.names.split(mark))
        return self._scan_rules({spelled: '""', named: '""'})

    def _tags(self, form: TaggedTextNode) -> str:
        barred, groups = tags_by_trigger(form, self.names)
        behind: dict[MarkerSymbols, str | None] = {tuple(one): None for one in barred}
        for trigger, tags in groups.items():
            rests = [
                SequenceNode((LiteralNode(t.begin[len(trigger) :]), t.content, LiteralNode(t.end)))
                for t in tags
            ]
            behind[marker_symbols(self.names.split(trigger))] = self.rule(
                AlternationNode(tuple(rests))
            )
        one = self._scan_rules(behind) if form.tags else ""
        end = self._free_text(barred)
        if not one:
            return end
        if form.only_first:
            return one if form.min_tags else f"{one} | {end}"
        return f"{one}{repeat_count(form.min_tags, None)} {end}"

    def _free_text(self, barred: Sequence[str]) -> str:
        """Any text without these."""
        return self._scan_rules({tuple(one): None for one in barred}, may_end=True)

    def _scan_rules(self, behind: Mapping[MarkerSymbols, str | None], may_end: bool = False) -> str:
        """Any text up to the first of the marks, and what follows it. None: it may not stand.

        may_end: the text may end before any mark.
        """
        follows = list(behind.values())
        states = build_automaton(list(behind))
        prefix = f"r{next(self._numbers)}_"
        for at, state in enumerate(states):
            if state.matched_marker is None:
                steps = _state_options(state, states, follows, prefix)
                ways = ['""', *steps] if may_end and not state.within_token else steps
                self.lines.append(f"{prefix}{at} ::= {' | '.join(ways)}")
            elif (after := follows[state.matched_marker]) is not None:
                self.lines.append(f"{prefix}{at} ::= {after}")
        return f"{prefix}0"

    # -- what xgrammar wrote ----------------------------------------------------------------

    def _import_rules(self, text: str) -> str:
        """Rules under names of their own; the name of their root."""
        prefix = f"j{next(self._numbers)}_"
        own = set(re.findall(r"(?m)^([A-Za-z_][\w.-]*) ::=", text))

        def one(found: re.Match[str]) -> str:
            return prefix + found[0] if found[0] in own else found[0]

        self.lines.append(_NAME.sub(one, text).strip())
        return f"{prefix}root"


class _GbnfRules:
    """The rules of one EBNF grammar that a caller wrote."""

    def __init__(self, writer: _GbnfWriter, rules: ebnf.EbnfGrammar) -> None:
        self.writer = writer
        self.rules = rules
        self._names: dict[str, str] = {}

    def rule(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = f"r{next(self.writer._numbers)}"
            body = self.expression(self.rules.by_name[name])
            self.writer.lines.append(f"{self._names[name]} ::= {body}")
        return self._names[name]

    def expression(self, expr: ebnf.EbnfExpr) -> str:
        if isinstance(expr, ebnf.RuleRef):
            return self.rule(expr.name)
        if isinstance(expr, ebnf.SpecialTokenRef):
            return self.writer.token(expr.name)
        if isinstance(expr, ebnf.EbnfRepeat):
            return _repeated(f"({self.expression(expr.part)})", expr.min_count, expr.max_count)
        if isinstance(expr, ebnf.EbnfAlternation):
            return "(" + " | ".join(map(self.expression, expr.parts)) + ")"
        if isinstance(expr, ebnf.EbnfSequence):
            return " ".join(map(self.expression, expr.parts)) or '""'
        return _regex(expr)


def _state_options(
    state: ScanState, states: Sequence[ScanState], follows: Sequence[str | None], prefix: str
) -> list[str]:
    """What may come in a state, and the state that it leads to."""
    made: list[str] = []
    known: list[tuple[int, int]] = []
    leading: dict[int, list[tuple[int, int]]] = {}
    for symbol, to in state.next.items():
        if isinstance(symbol, str):
            known.append((ord(symbol), ord(symbol)))
        ends = states[to].matched_marker
        if ends is not None and follows[ends] is None:
            continue
        if isinstance(symbol, int):
            made.append(f"Token({symbol}) {prefix}{to}")
        else:
            leading.setdefault(to, []).append((ord(symbol), ord(symbol)))
    made += [
        f"{_char_class(regex_ast.union_ranges(tuple(some)))} {prefix}{to}"
        for to, some in leading.items()
    ]
    if not state.within_token:
        others = regex_ast.complement_ranges(regex_ast.union_ranges(tuple(known)))
        made.append(f"{_char_class(others)} {prefix}0")
    return made


def repeat_count(least: int, most: int | None) -> str:
    """How often what stands before it is repeated."""
    short = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((least, most))
    return short if short is not None else f"{{{least},{'' if most is None else most}}}"


def _repeated(part: str, least: int, most: int | None) -> str:
    return '""' if most == 0 else part + repeat_count(least, most)


def _regex(node: regex_ast.RegexExpr) -> str:
    if isinstance(node, regex_ast.CharClass):
        return _char_class(node.ranges)
    if isinstance(node, regex_ast.RegexRepeat):
        return _repeated(f"({_regex(node.part)})", node.min_count, node.max_count)
    if isinstance(node, regex_ast.RegexSequence):
        return " ".join(_literal_runs(node.parts)) or '""'
    assert isinstance(node, regex_ast.RegexAlternation)
    return "(" + " | ".join(map(_regex, node.parts)) + ")"


def _literal_runs(parts: Iterable[regex_ast.RegexExpr]) -> Iterable[str]:
    """Single characters that stand together become one string."""
    for single, run in itertools.groupby(parts, key=_single):
        if single:
            yield _quote("".join(chr(one.ranges[0][0]) for one in run))  # type: ignore[union-attr]
        else:
            yield from map(_regex, run)


def _single(node: regex_ast.RegexExpr) -> bool:
    return isinstance(node, regex_ast.CharClass) and [a == b for a, b in node.ranges] == [True]


def _char_class(ranges: regex_ast.CharRanges) -> str:
    if not ranges:
        raise RequestError("the regular expression has a class that no character is of")
    return "[" + "".join(_char_range(first, last) for first, last in ranges) + "]"


def _char_range(first: int, last: int) -> str:
    return _escape_char(first) if first == last else f"{_escape_char(first)}-{_escape_char(last)}"


def _escape_char(point: int) -> str:
    is_plain = chr(point).isascii() and chr(point).isalnum()
    return chr(point) if is_plain else f"\\U{point:08x}"


def _quote(text: str) -> str:
    """A string. NUL is written as a class: within a string xgrammar ends at it."""
    made = []
    for part in re.split("(\0)", text):
        if part == "\0":
            made.append("[\\U00000000]")
        elif part:
            made.append('"' + "".join(_escape_char(ord(char)) for char in part) + '"')
    return " ".join(made) or '""'
