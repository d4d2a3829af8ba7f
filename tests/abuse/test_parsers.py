"""What a model may be made to say, against what reads it: no parser runs, raises, or takes for ever.

17 of the checklist. The time is of the processor, and grows with the text: a stream of an answer
that nobody closes costs no more for each piece the longer it gets.
"""

import json
import time

import pytest

from quire.text.reasoning.parser import ReasoningParser
from quire.text.reasoning.select import REASONING_FORMATS
from quire.text.tools.base import closing_literals
from tests.abuse.harness import LONG
from tests.pure.tools.rendering import CallToRender, render_calls
from tests.pure.tools.samples import FORMATS, format_of, pieces_of, read, reader

pytestmark = pytest.mark.sampled(3)

LENGTH = 200_000 if LONG else 4_000
MOST_S = 30.0 if LONG else 1.0
"""What takes longer must at least grow as its text does: machines differ."""
MOST_GROWTH = 8.0
"""Of the time for a text four times as long: 4 where each piece costs the same, 16 where each costs
more the longer the text is."""
PIECE = 8
CODE = "__import__('os').system('touch /tmp/quire-was-here')"
CALL = CallToRender("get_weather", {"city": "Rom", "days": 2})


def quickly(name, parts, run):
    """run(parts), which may not take long, or longer than its share of a longer run."""
    took, made = seconds(run, parts)
    if took > MOST_S:
        quarter, _ = seconds(run, parts[: len(parts) // 4])
        took = min(took, seconds(run, parts)[0])
        assert took < MOST_GROWTH * quarter, f"{name!r}: {took:.1f} s for {len(parts)} pieces"
    return made


def seconds(run, parts):
    """(processor time of run(parts), what it returned)."""
    began = time.process_time()
    made = run(parts)
    return time.process_time() - began, made


def texts(dialect):
    """name -> text, of a dialect's own marks."""
    one = format_of(dialect)
    call = render_calls(one, [CALL])
    begin = one.syntaxes[0].begin[0]
    ends = [mark for form in one.syntaxes for mark in closing_literals(form.steps)] or ["</x>"]
    half = call[: call.index("Rom")]

    def filled(unit, before=""):
        return before + unit * (LENGTH // max(len(unit), 1))

    return {
        "never closed": filled("a", begin),
        "an argument without end": filled("a", half),
        "brackets in an argument": filled("[", half),
        "brackets": filled("[{", begin),
        "braces": filled('{"a":', begin),
        "quotes": filled('"', begin),
        "backslashes": filled("\\", half),
        "white space": filled(" \n", begin),
        "beginnings": filled(begin),
        "ends": filled(ends[0]),
        "almost ends": filled(ends[0][:-1] or "<", half),
        "beginnings of calls": filled(half),
        "calls": filled(call),
        "commas": filled("a=1,", begin + "f("),
        "minus signs": filled("-", begin + "f(a="),
        "angles": filled("<", begin),
        "NULs": filled("\0", begin),
        "digits": filled("9", half),
        "half escapes": filled("\\u", half),
    }


@pytest.mark.parametrize("dialect", FORMATS)
def test_no_text_keeps_a_parser_of_calls_busy(dialect):
    for name, text in texts(dialect).items():
        parts = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
        told = quickly(name, parts, lambda parts: pieces_of(reader(dialect), parts))
        assert sum(len(piece.text or "") for piece in told) <= 2 * len(text), name


@pytest.mark.parametrize("dialect", FORMATS)
def test_code_in_arguments_stays_text(dialect, tmp_path):
    """CVE-2025-9141: as a value, as a name, and where a dialect expects a literal."""
    one = format_of(dialect)
    call = render_calls(one, [CallToRender("get_weather", {"city": CODE, "days": 2})])
    said = read(dialect, call)
    for made in said.calls:
        if made.outcome == "whole":
            assert json.loads(made.arguments).get("city", CODE) == CODE
    plain = render_calls(one, [CALL])
    for place in ('"Rom"', "Rom", "2", "get_weather"):
        read(dialect, plain.replace(place, CODE))
        read(dialect, plain.replace(place, "(lambda: 1)()"))
        read(dialect, plain.replace(place, "9" * 5000))
        read(dialect, plain.replace(place, "1e999999999"))
        read(dialect, plain.replace(place, "9**9**9"))
    with pytest.raises(FileNotFoundError):
        open("/tmp/quire-was-here")  # noqa: SIM115 - it must not be there


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS.names()))
def test_no_text_keeps_a_parser_of_thoughts_busy(name):
    dialect = REASONING_FORMATS.load(name).FORMAT

    def pushed(parts):
        machine = ReasoningParser(dialect, "", None, continued_text="")
        for part in parts:
            machine.push(part, last=False)
        machine.push("", last=True)

    for unit in ("<think>", "</think>", "<", "a", "<thin", "\n", "[THINK]", "<|channel|>", "</"):
        text = unit * (LENGTH // len(unit))
        quickly(unit, [text[i : i + PIECE] for i in range(0, len(text), PIECE)], pushed)
