"""Random texts: nothing raises, nothing is lost, and time is linear."""

import itertools
import random
import time

import pytest

from quire.text.output.parsed_text import collect_pieces
from quire.text.output.special_strings import SpecialStrings, SpecialStringStripper
from quire.text.reasoning.base import WHITESPACE
from quire.text.reasoning.parser import ReasoningParser
from quire.text.reasoning.select import REASONING_FORMATS, select_reasoning_format
from tests import tiers

FORMATS = {name: select_reasoning_format(name) for name in REASONING_FORMATS.names()}
WORDS = ["a", "<", "</", "\n", "  ", "é", "😀", "[", "|>", '{"x": "<think>"}', "to=f", "analysis"]


def marks_of(reasoning_format):
    return sorted(
        {
            mark
            for some in (reasoning_format.markers, reasoning_format.initial_markers)
            for m in some.values()
            for mark in m.strings
        }
    )


def accounted(text, reasoning, content, marks):
    """Whether the two hold the text, each in its order, but for marks, headers and white space."""
    states, seen = {(0, 0, 0)}, set()
    while states:
        here = i, j, k = states.pop()
        if here == (len(text), len(reasoning), len(content)):
            return True
        if here in seen or i == len(text):
            continue
        seen.add(here)
        if text[i] in WHITESPACE:
            states.add((i + 1, j, k))
        if text[i] == reasoning[j : j + 1]:
            states.add((i + 1, j + 1, k))
        if text[i] == content[k : k + 1]:
            states.add((i + 1, j, k + 1))
        states |= {(i + len(mark), j, k) for mark in marks if text.startswith(mark, i)}
        begins_header = not i or text.startswith(("<|start|>", "<|channel|>"), i)
        if begins_header and "<|message|>" in text[i:]:
            states.add((text.index("<|message|>", i) + 11, j, k))
    return False


def bare(text):
    return "".join(text.split())


@pytest.mark.parametrize("name", FORMATS)
def test_random_text_parses_alike_at_every_cut_and_loses_nothing(name):
    draw = random.Random(name)
    reasoning_format = FORMATS[name]
    marks = marks_of(reasoning_format)
    words = WORDS + marks * 2 + [mark[: len(mark) // 2] for mark in marks]
    prompts = ["", *(mark for mark in marks), "x <think>", "</think>\n\n"]
    for _ in range(60):
        text = "".join(draw.choices(words, k=draw.randint(0, 12)))
        prompt = draw.choice(prompts)
        whole = collect_pieces(ReasoningParser(reasoning_format, prompt).push(text, last=True))
        cut = ReasoningParser(reasoning_format, prompt)
        assert (
            collect_pieces(
                [p for c in text for p in cut.push(c, last=False)] + cut.push("", last=True)
            )
            == whole
        )
        content = bare(whole.text.removeprefix(reasoning_format.prefix))
        assert accounted(text, bare(whole.reasoning), content, marks), (prompt, text, whole)


@pytest.mark.parametrize("name", FORMATS)
def test_a_continued_message_is_not_emitted_again(name):
    draw = random.Random(name)
    marks = marks_of(FORMATS[name])
    for _ in range(40):
        continued_text = "".join(draw.choices(WORDS + marks, k=5)).strip()
        parser = ReasoningParser(
            FORMATS[name], "assistant\n" + continued_text, continued_text=continued_text
        )
        parsed = collect_pieces(parser.push("more", last=True))
        assert "".join((parsed.reasoning + parsed.text).split()) == "more"


UNITS = ("a", "\n", "<", "</think>", "<think>", "<|channel|>", "<|end|>a")
NAMES = ("qwen3", "gemma4", "openai_gptoss", "granite")
PAIRS = list(itertools.product(NAMES, UNITS))
"""Each name and each unit is in every fourth of them."""
OTHERS = [pair for place, pair in enumerate(PAIRS) if place % 4]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "unit"), [*PAIRS[::4], *tiers.long(*OTHERS)])
def test_time_is_linear(name, unit):
    def seconds(count, whole):
        parts = [unit * count] if whole else [unit] * count
        best = 9e9
        for _ in range(3):
            parser = ReasoningParser(FORMATS[name], "<think>")
            began = time.process_time()
            for part in parts:
                parser.push(part, last=False)
            parser.push("", last=True)
            best = min(best, time.process_time() - began)
        return best

    for whole in (True, False):
        assert seconds(16_000, whole) < 16 * max(seconds(2_000, whole), 0.002)


def test_marks_are_removed_at_every_cut():
    marks = SpecialStrings(["<|a|>", "<|bc|>"])
    text = "x<|a|>y<|b<|bc|>z<|a|"
    for place in range(len(text)):
        parser = SpecialStringStripper(marks)
        parts = parser.push(text[:place]) + parser.push(text[place:]) + parser.push("", last=True)
        assert parts == "xy<|bz<|a|"


def test_a_mark_that_begins_another_is_refused():
    with pytest.raises(AssertionError, match="beginning"):
        SpecialStrings(["<a", "<a>"])
