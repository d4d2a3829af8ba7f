"""Every format over its corpus: the result, and that no cut of the text changes it."""

import json
import random

import pytest

from tests import tiers
from tests.pure.tools.samples import FORMATS, HERE, calls_of, corpus, format_of, read

RANDOM_SPLITS = tiers.amount(5_000, 10_000)
STRIDE = tiers.amount(2, 1)
"""Between places of a text that are tried."""
LONG = 150


def short(tool_format):
    """Samples of which every split is tried; of the long ones only some are."""
    return [s for s in corpus(tool_format) if len(s["text"]) <= LONG]


def marks_of(tool_format):
    """Literals of a format that never belong to text."""
    return [m for form in format_of(tool_format).syntaxes if not form.bare for m in form.begin]


def test_every_format_has_a_corpus_and_every_corpus_a_format():
    assert sorted(p.stem for p in HERE.glob("*.jsonl")) == FORMATS


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_sample_parses_to_its_calls_and_content(tool_format):
    for sample in corpus(tool_format):
        parsed = read(tool_format, sample["text"])
        emitted = [{"name": name, "arguments": arguments} for name, arguments in calls_of(parsed)]
        assert emitted == sample["calls"], sample["title"]
        assert len(parsed.calls) == len(emitted), sample["title"]
        assert parsed.text == sample["content"], sample["title"]
        assert parsed.reasoning == sample.get("reasoning", ""), sample["title"]
        assert len(parsed.notes) == sample.get("notes", 0), (sample["title"], parsed.notes)
        if "ids" in sample:
            assert [call.id for call in parsed.calls] == sample["ids"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tool_format", FORMATS)
def test_no_split_in_two_changes_the_result(tool_format):
    for number, sample in enumerate(short(tool_format)):
        text = sample["text"]
        whole = read(tool_format, text)
        for cut in range(number % STRIDE, len(text) + 1, STRIDE):
            assert read(tool_format, text[:cut], text[cut:]) == whole, (sample["title"], cut)


@pytest.mark.parametrize("tool_format", FORMATS)
def test_single_characters_give_the_same_result(tool_format):
    for sample in corpus(tool_format):
        text = sample["text"]
        assert read(tool_format, *text, "") == read(tool_format, text), sample["title"]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_no_random_split_changes_the_result(tool_format, often):
    chance = random.Random(tool_format)
    wholes = [(s["text"], read(tool_format, s["text"])) for s in corpus(tool_format)]
    for _ in range(often * -(-RANDOM_SPLITS // len(FORMATS))):
        text, whole = chance.choice(wholes)
        cuts = sorted(chance.sample(range(len(text) + 1), k=min(chance.randint(2, 9), len(text))))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        assert read(tool_format, *parts) == whole, parts


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_truncated_text_gives_a_prefix_of_the_result(tool_format):
    for number, sample in enumerate(short(tool_format)):
        whole = read(tool_format, sample["text"])
        for end in range(number % STRIDE, len(sample["text"]), STRIDE):
            parsed = read(tool_format, sample["text"][:end])
            for call, full in zip(parsed.calls, whole.calls):
                assert (call.name, call.id) == (full.name, full.id)
                assert full.arguments.startswith(call.arguments), (sample["title"], end)
            for call in parsed.calls:
                assert call.outcome in ("whole", "cut"), (sample["title"], end)
                assert call.arguments, "a call was told before its arguments began"
            if not parsed.calls and not parsed.reasoning:
                assert kept(tool_format, sample["text"][:end], parsed.text), (sample["title"], end)


def kept(tool_format, text, content):
    """Whether content is all of a text without calls; harmony's headers are none of it."""
    return content == text or (tool_format == "openai" and (content in text or not content))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tool_format", FORMATS)
def test_markup_of_complete_calls_is_never_content(tool_format):
    for sample in corpus(tool_format):
        if sample.get("notes") or sample["title"] == "tags inside a string":
            continue
        parsed = read(tool_format, *sample["text"], "")
        for mark in marks_of(tool_format):
            assert mark not in parsed.text, sample["title"]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_arguments_of_complete_calls_are_json_objects(tool_format):
    for sample in corpus(tool_format):
        for call in read(tool_format, sample["text"]).calls:
            assert isinstance(json.loads(call.arguments), dict)
