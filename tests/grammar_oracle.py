"""What a form allows, said a second time and slowly: where its texts may end, place by place.

A text is a list of symbols: characters, and ints for special tokens. No backend is asked.
"""

from __future__ import annotations

import json
import re

import jsonschema

from quire.grammar.grammar_ast import (
    JsonNode,
    LiteralNode,
    SequenceNode,
)

Symbols = tuple


class Oracle:
    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids
        names = sorted(ids, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def whole(self, form, text: Symbols) -> bool:
        return len(text) in self.ends(form, text, 0)

    def cut(self, text: str) -> Symbols:
        """A text, names of special tokens as their ids."""
        made, at = [], 0
        for found in self._names.finditer(text):
            made += [*text[at : found.start()], self.ids[found[0]]]
            at = found.end()
        return (*made, *text[at:])

    def ends(self, form, text: Symbols, at: int) -> set[int]:
        """Where a text of the form that begins at `at` may end."""
        return getattr(self, f"_{type(form).__name__.lower().removesuffix('node')}")(form, text, at)

    def _stretches(self, text, at, fits):
        """Ends of plain stretches of which `fits` is true."""
        found = set()
        for end in range(at, len(text) + 1):
            if end > at and isinstance(text[end - 1], int):
                break
            if fits("".join(text[at:end])):
                found.add(end)
        return found

    def _regex(self, form, text, at):
        return self._stretches(text, at, re.compile(form.pattern).fullmatch)

    def _choice(self, form, text, at):
        return self._stretches(text, at, form.options.__contains__)

    def _json(self, form, text, at):
        return self._stretches(text, at, lambda part: is_json(form, part))

    def _exactly(self, wanted, text, at):
        end = at + len(wanted)
        return {end} if text[at:end] == wanted else set()

    def _literal(self, form, text, at):
        return self._exactly(self.cut(form.text), text, at)

    def _until(self, form, text, at):
        spelled, named = tuple(form.terminator), self.cut(form.terminator)
        for end in range(at, len(text) + 1):
            for mark in (spelled, named):
                start = end - len(mark)
                plain = all(isinstance(one, str) for one in text[at : max(start, at)])
                if start >= at and text[start:end] == mark and plain:
                    return {end}
        return set()

    def _sequence(self, form, text, at):
        places = {at}
        for part in form.parts:
            places = {end for place in places for end in self.ends(part, text, place)}
        return places

    def _alternation(self, form, text, at):
        return {end for part in form.parts for end in self.ends(part, text, at)}

    def _repeat(self, form, text, at):
        found, places, times = set(), {at}, 0
        if form.min_count == 0:
            found.add(at)
        while (
            places and (form.max_count is None or times < form.max_count) and times <= len(text) + 1
        ):
            part = (
                form.part if times == 0 else SequenceNode((LiteralNode(form.separator), form.part))
            )
            places = {end for place in places for end in self.ends(part, text, place)}
            times += 1
            if times >= form.min_count:
                found |= places
        return found

    def _tag(self, form, text, at):
        return self._sequence(
            SequenceNode((LiteralNode(form.begin), form.content, LiteralNode(form.end))), text, at
        )

    def _taggedtext(self, form, text, at):
        """States: how many tags were read, and where. Free text goes on to the first trigger."""
        found, todo, seen = set(), {(at, 0)}, set()
        while todo:
            place, tags = todo.pop()
            if (place, tags) in seen:
                continue
            seen.add((place, tags))
            if form.only_first and tags:
                found.add(place)
                continue
            stop = self._first_trigger(form, text, place)
            last = len(text) if stop is None else stop[1] - 1
            if tags >= form.min_tags:
                plain = [
                    end for end in range(place, last + 1) if not self._has_id(text, place, end)
                ]
                found.update(plain)
            if stop is not None and not self._has_id(text, place, stop[0]):
                todo |= {
                    (end, tags + 1) for tag in form.tags for end in self._tag(tag, text, stop[0])
                }
        return found

    def _has_id(self, text, start, end):
        return any(isinstance(one, int) for one in text[start:end])

    def _first_trigger(self, form, text, at):
        """(start, end) of the trigger that ends first."""
        for end in range(at, len(text) + 1):
            for trigger in form.triggers:
                for mark in {tuple(trigger), self.cut(trigger)}:
                    if end - len(mark) >= at and text[end - len(mark) : end] == mark:
                        return end - len(mark), end
        return None


def is_json(form: JsonNode, text: str) -> bool:
    try:
        value = json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    too_long = r"\s{3}" if form.whitespace else r"\s"
    if text != text.strip() or re.search(too_long, outside):
        return False
    return jsonschema.Draft202012Validator(json.loads(form.schema)).is_valid(value)
