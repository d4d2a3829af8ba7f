"""Every dialect over its corpus: what is said, and that no cut of the text changes it."""

import json
import random

import pytest

from tests.pure.tools.samples import FORMATS, HERE, calls_of, corpus, dialect_of, read

RANDOM_SPLITS = 10_000
LONG = 150


def short(dialect):
    """Samples of which every split is tried; of the long ones only some are."""
    return [s for s in corpus(dialect) if len(s["text"]) <= LONG]


def marks_of(dialect):
    """Literals of a dialect that never belong to text."""
    return [m for form in dialect_of(dialect).syntaxes if not form.bare for m in form.begin]


def test_every_dialect_has_a_corpus_and_every_corpus_a_dialect():
    assert sorted(p.stem for p in HERE.glob("*.jsonl")) == FORMATS


@pytest.mark.parametrize("dialect", FORMATS)
def test_a_text_says_what_its_author_meant(dialect):
    for sample in corpus(dialect):
        said = read(dialect, sample["text"])
        told = [{"name": name, "arguments": arguments} for name, arguments in calls_of(said)]
        assert told == sample["calls"], sample["title"]
        assert len(said.calls) == len(told), sample["title"]
        assert said.text == sample["content"], sample["title"]
        assert said.reasoning == sample.get("reasoning", ""), sample["title"]
        assert len(said.notes) == sample.get("notes", 0), (sample["title"], said.notes)
        if "ids" in sample:
            assert [call.id for call in said.calls] == sample["ids"]


@pytest.mark.parametrize("dialect", FORMATS)
def test_no_split_in_two_changes_what_is_said(dialect):
    for sample in short(dialect):
        text = sample["text"]
        whole = read(dialect, text)
        for cut in range(len(text) + 1):
            assert read(dialect, text[:cut], text[cut:]) == whole, (sample["title"], cut)


@pytest.mark.parametrize("dialect", FORMATS)
def test_single_characters_say_the_same(dialect):
    for sample in corpus(dialect):
        text = sample["text"]
        assert read(dialect, *text, "") == read(dialect, text), sample["title"]


@pytest.mark.parametrize("dialect", FORMATS)
def test_no_random_split_changes_what_is_said(dialect, often):
    chance = random.Random(dialect)
    wholes = [(s["text"], read(dialect, s["text"])) for s in corpus(dialect)]
    for _ in range(often * -(-RANDOM_SPLITS // len(FORMATS))):
        text, whole = chance.choice(wholes)
        cuts = sorted(chance.sample(range(len(text) + 1), k=min(chance.randint(2, 9), len(text))))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        assert read(dialect, *parts) == whole, parts


@pytest.mark.parametrize("dialect", FORMATS)
def test_a_text_cut_anywhere_says_a_beginning_of_what_the_whole_says(dialect):
    for sample in short(dialect):
        whole = read(dialect, sample["text"])
        for end in range(len(sample["text"])):
            said = read(dialect, sample["text"][:end])
            for call, full in zip(said.calls, whole.calls):
                assert (call.name, call.id) == (full.name, full.id)
                assert full.arguments.startswith(call.arguments), (sample["title"], end)
            for call in said.calls:
                assert call.outcome in ("whole", "cut"), (sample["title"], end)
                assert call.arguments, "a call was told before its arguments began"
            if not said.calls and not said.reasoning:
                assert kept(dialect, sample["text"][:end], said.text), (sample["title"], end)


def kept(dialect, text, content):
    """Whether content is all of a text without calls; harmony's headers are none of it."""
    return content == text or (dialect == "openai" and (content in text or not content))


@pytest.mark.parametrize("dialect", FORMATS)
def test_marks_of_whole_calls_never_leak_into_content(dialect):
    for sample in corpus(dialect):
        if sample.get("notes") or sample["title"] == "tags inside a string":
            continue
        said = read(dialect, *sample["text"], "")
        for mark in marks_of(dialect):
            assert mark not in said.text, sample["title"]


@pytest.mark.parametrize("dialect", FORMATS)
def test_arguments_of_whole_calls_are_json_objects(dialect):
    for sample in corpus(dialect):
        for call in read(dialect, sample["text"]).calls:
            assert isinstance(json.loads(call.arguments), dict)
