"""Every reasoning format on its samples: the result, and that no cut of the text changes it."""

import functools
import itertools
import json
import pathlib
import random

import pytest

from quire.text.output.parsed_text import collect_pieces
from quire.text.reasoning.parser import FORCE_CONTENT, ReasoningParser
from quire.text.reasoning.select import REASONING_FORMATS, select_reasoning_format

CORPUS = [
    json.loads(line)
    for line in pathlib.Path(__file__).with_name("corpus.jsonl").read_text().splitlines()
]
RANDOM_CUTS = 10_000
ALIASES = {
    *("step5", "deepseek_v41", "mimo", "granite_thinking_parser", "step3p5"),
    *("minicpmv", "glm47", "ling3", "hy_v4", "musespark1x", "muse_glimmer"),
}


reasoning_format = functools.cache(select_reasoning_format)


def reader(sample):
    return ReasoningParser(
        reasoning_format(sample["format"]),
        sample.get("prompt", ""),
        sample.get("variables"),
        continued_text=sample.get("continued_text", ""),
    )


def read(sample, parts):
    """The parsed text, and the spans of reasoning."""
    parser = reader(sample)
    pieces = [piece for part in parts for piece in parser.push(part, last=False)]
    return collect_pieces(pieces + parser.push("", last=True)), parser.spans


def cut(text, places):
    edges = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def name_of(sample):
    return f"{sample['format']}: {sample['text'][:40]}"


@pytest.mark.parametrize("sample", CORPUS, ids=name_of)
def test_a_sample_parses_to_its_reasoning_and_content(sample):
    parsed, _ = read(sample, [sample["text"]])
    assert (parsed.reasoning, parsed.text) == (sample["reasoning"], sample["content"])
    assert len(parsed.notes) == sample.get("notes", 0), parsed.notes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sample", CORPUS, ids=name_of)
def test_no_cut_in_two_changes_the_result(sample):
    text = sample["text"]
    whole = read(sample, [text])
    for place in range(len(text) + 1):
        assert read(sample, cut(text, [place])) == whole, place
    assert read(sample, list(text)) == whole


def test_no_random_cuts_change_the_result():
    draw = random.Random(5)
    whole = {}
    for _ in range(RANDOM_CUTS):
        index = draw.randrange(len(CORPUS))
        sample = CORPUS[index]
        text = sample["text"]
        if index not in whole:
            whole[index] = read(sample, [text])
        places = [draw.randint(0, len(text)) for _ in range(draw.randint(1, 9))]
        assert read(sample, cut(text, places)) == whole[index], (text, places)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "sample",
    [one for one in CORPUS if not one.get("variables", {}).get(FORCE_CONTENT)],
    ids=name_of,
)
def test_spans_are_where_the_reasoning_is(sample):
    _, spans = read(sample, [sample["text"]])
    found = "\n".join(sample["text"][start:end] for start, end in spans)
    assert found.split() == sample["reasoning"].split()


def test_every_format_has_samples_or_is_a_second_name():
    sampled = {sample["format"] for sample in CORPUS}
    assert set(REASONING_FORMATS.names()) - sampled == ALIASES
