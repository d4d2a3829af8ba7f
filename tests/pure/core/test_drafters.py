"""Host drafters propose what the tokens of a request make likely."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire.config.engine_config import SpeculationSection
from quire.core.drafters import suffix
from quire.core.drafters.ngram import MAX_INDEXED, NgramDrafter
from quire.core.drafters.prediction import PredictionDrafter
from quire.core.drafters.suffix import SuffixDrafter
from quire.core.types import AdapterRef
from quire.engine.startup.scheduler_setup import HOST_DRAFTERS
from tests.pure.core.builders import sequence

pytestmark = pytest.mark.sampled(3)


def growing(drafter, seq, tokens, most=8, rng=None):
    """Return the proposals of a drafter as tokens come one by one, or several."""
    found = {}
    while tokens:
        count = 1 if rng is None else rng.randrange(1, 9)
        seq.tokens += tokens[:count]
        tokens = tokens[count:]
        found[len(seq.tokens)] = list(drafter.propose(seq, len(seq.tokens), most))
    return found


def common_suffix(tokens, end, other):
    length = 0
    while length < other and tokens[other - length - 1] == tokens[end - length - 1]:
        length += 1
    return length


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_ngram_proposes_what_followed_an_earlier_place(size, seed):
    rng = random.Random(seed)
    vocab = rng.choice([2, 9, 1000])
    text = [rng.randrange(vocab) for _ in range(150)]
    text += [*text[20:60], 1000, *text[61:90]]
    drafter, prompt = NgramDrafter(size, size), text[: rng.randrange(1, 100)]
    seq = sequence(prompt)
    for known, drafts in growing(drafter, seq, text[len(prompt) :], rng=rng).items():
        places = [at for at in range(1, known) if common_suffix(text, known, at) >= size]
        repeats = [text[:known][at:] for at in places]
        if drafts:
            assert any((again * 9)[:8] == drafts for again in repeats), (known, drafts)
        longest = max([common_suffix(text, known, at) for at in places], default=0)
        assert drafts or longest < size + 3 or vocab < 1000, (known, longest)
    drafter.remove(seq)
    assert not drafter._indexes


def test_ngram_prefers_the_longest_and_the_latest_place():
    seq = sequence([1, 2, 3, 7, 7, 2, 3, 8, 8, 1, 2, 3])
    assert list(NgramDrafter(2, 3).propose(seq, 12, 2)) == [7, 7]
    assert list(NgramDrafter(2, 2).propose(seq, 12, 2)) == [8, 8]


def test_ngram_repeats_a_period():
    seq = sequence([9, *[1, 2, 3] * 4])
    assert list(NgramDrafter(3, 3).propose(seq, 13, 8)) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_long_prompt_is_indexed_in_several_calls():
    tokens = list(range(3 * MAX_INDEXED))
    seq, drafter = sequence([*tokens, *tokens[:9]]), NgramDrafter(3, 3)
    known = len(seq.tokens)
    drafter.propose(seq, known, 4)
    seq.tokens[-9:] = tokens[-18:-9]
    found = [bool(drafter.propose(seq, known, 4)) for _ in range(3)]
    assert found[::2] == [False, True]


def predicting(prediction, output=()):
    seq = sequence((1, 2, 3), output=output)
    seq.request = replace(seq.request, prediction=tuple(prediction))
    return seq


@pytest.mark.parametrize("seed", range(20))
def test_a_prediction_is_followed_through_changes(seed):
    """Replaced, skipped and added tokens cost some drafts, and no more."""
    rng = random.Random(seed)
    prediction = [rng.randrange(1000) for _ in range(200)]
    output, at = [], 0
    while at < 200:
        change = rng.random()
        if change < 0.03:
            output.append(2000)
            at += 1
        elif change < 0.05:
            at += rng.randrange(2, 9)
        elif change < 0.06:
            output += [3000, 3001]
        else:
            output.append(prediction[at])
            at += 1
    seq, drafter, right = predicting(prediction), PredictionDrafter(), 0
    for known, drafts in growing(drafter, seq, list(output)).items():
        right += drafts[:1] == output[known - 3 :][:1]
    assert right > len(output) - 50
    drafter.remove(seq)
    assert not drafter._followers


def test_a_prediction_is_proposed_from_the_first_token():
    seq, drafter = predicting((5, 6, 7)), PredictionDrafter()
    assert drafter.propose(seq, 3, 2) == (5, 6)
    seq.tokens += [5, 6, 7]
    assert drafter.propose(seq, 6, 2) == ()
    seq.tokens += [8, 9, 10, 11]
    assert drafter.propose(seq, 10, 2) == ()


def test_a_prediction_that_is_too_short_is_no_error():
    seq, drafter = predicting((5,)), PredictionDrafter()
    assert sum([bool(one) for one in growing(drafter, seq, [7, 7, 7, 7, 5, 5]).values()]) == 0


@pytest.mark.parametrize("name", HOST_DRAFTERS.names())
def test_each_drafter_is_built_from_the_config(name):
    drafter = HOST_DRAFTERS.load(name).build(SpeculationSection(method=name))
    seq = predicting((4, 5), output=[1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert len(drafter.propose(seq, 15, 2)) <= 2
    drafter.remove(seq)


def brute_force(tokens, depth, factor, least, most):
    """The drafts and the score of suffix decoding, from all occurrences of all suffixes."""
    best, best_score = [], 0.0
    for length in range(2, min(depth, len(tokens)) + 1):
        places = [
            at
            for at in range(length, len(tokens))
            if tokens[at - length : at] == tokens[len(tokens) - length :]
        ]
        drafts, probability, score = [], 1.0, 0.0
        while places and len(drafts) < min(most, int(factor * length)):
            ahead = [tokens[at + len(drafts)] for at in places if at + len(drafts) < len(tokens)]
            if not ahead:
                break
            count, token = max((ahead.count(one), one) for one in ahead)
            probability *= count / len(places)
            if probability < least:
                break
            drafts.append(token)
            score += probability
            places = [
                at
                for at in places
                if at + len(drafts) <= len(tokens) and tokens[at + len(drafts) - 1] == token
            ]
        if score > best_score:
            best, best_score = drafts, score
    return best, best_score


@pytest.mark.parametrize("seed", range(40))
def test_suffix_proposes_what_promises_most(seed, monkeypatch):
    """Compared with a brute force; the order of equally frequent tokens is free."""
    monkeypatch.setattr(suffix, "MAX_OCCURRENCES", 1000)
    monkeypatch.setattr(suffix, "continuation", lambda text, at, end, most: text[at : at + most])
    rng = random.Random(seed)
    vocab, least, factor = rng.choice([2, 4, 20]), rng.choice([0.0, 0.1, 0.5]), rng.choice([1, 2.5])
    text = [rng.randrange(vocab) for _ in range(rng.randrange(3, 80))]
    text += text[: rng.randrange(len(text))]
    drafter = SuffixDrafter(depth=12, requests=0, factor=factor, min_probability=least)
    seq = sequence(text)
    drafts = drafter.propose(seq, len(text), 9)
    want, score = brute_force(text, 12, factor, least, 9)
    matches = drafter._matches(
        text, len(text), text, (links := drafter._links[seq]), links.places[len(text)], 0
    )
    assert drafter._best(text, len(text), matches, 9)[1] == pytest.approx(score)
    assert len(drafts) == len(want) or vocab < 20


@pytest.mark.parametrize("seed", range(30))
def test_suffix_repeats_what_it_proposes_where_the_text_ends(seed):
    """Texts of few tokens have matches that reach their end; all proposals are whole."""
    rng = random.Random(seed)
    text = [rng.randrange(2) for _ in range(60)]
    drafter = SuffixDrafter(depth=24, requests=0, factor=9.0, min_probability=0.0)
    seq = sequence(text[:2])
    found = growing(drafter, seq, text[2:], rng=rng)
    assert all(len(drafts) in (0, 8) for drafts in found.values())
    repeats = sequence([3, 1, 2, 1, 2])
    assert list(drafter.propose(repeats, 5, 7)) == [1, 2, 1, 2, 1, 2, 1]


def past(drafter, output, **fields):
    """Let a sequence with this output end."""
    seq = sequence((1, 2), output=output, **fields)
    drafter.propose(seq, len(seq.tokens), 4)
    drafter.remove(seq)


def suffix_drafter(requests=10):
    return SuffixDrafter(depth=24, requests=requests, factor=1.0, min_probability=0.1)


def test_suffix_reads_past_outputs_of_the_same_tenant_salt_and_adapter():
    drafter = suffix_drafter()
    past(drafter, [5, 6, 7, 8, 9], tenant=b"a")
    ask = lambda **fields: list(drafter.propose(sequence((3, 5, 6, 7), **fields), 4, 8))  # noqa: E731
    assert ask(tenant=b"a") == [8, 9]
    assert ask() == ask(tenant=b"b") == ask(tenant=b"a", salt=b"s") == []
    adapted = sequence((3, 5, 6, 7), tenant=b"a")
    adapted.request = replace(adapted.request, adapter=AdapterRef("x", b"digest"))
    assert list(drafter.propose(adapted, 4, 8)) == []


def kept(drafter, tenants=(b"a", b"b")):
    """(tenant, number) of the outputs of outputs_of() that are drafted from."""
    return [
        (tenant, i)
        for tenant in tenants
        for i in range(40)
        if drafter.propose(sequence((1, 100 + i, 200 + i), tenant=tenant), 3, 4)
    ]


def let_end(drafter, numbers, tenant):
    for i in numbers:
        past(drafter, [100 + i, 200 + i, 300 + i, 400 + i], tenant=tenant, salt=b"s" * (i % 5 == 4))


def test_suffix_forgets_the_oldest_outputs():
    drafter = suffix_drafter(requests=3)
    let_end(drafter, range(40), b"a")
    assert kept(drafter) == [(b"a", 37), (b"a", 38)]  # and 39, with another salt
    assert sum(map(len, drafter._tenants.values())) == 3
    texts = drafter._past.values()
    assert sum(len(one.links._latest) for one in texts) < 60
    assert sum(len(one.tokens) for one in texts) < 60


def test_suffix_keeps_a_tenants_outputs_when_another_is_busy():
    drafter = suffix_drafter(requests=6)
    let_end(drafter, range(3), b"a")
    let_end(drafter, range(40), b"b")
    assert kept(drafter)[:3] == [(b"a", i) for i in range(3)]
    assert kept(drafter)[3:] == [(b"b", 37), (b"b", 38)]


def test_suffix_bounds_the_tokens_of_past_outputs(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_PAST_TOKENS", 100)
    drafter = suffix_drafter(requests=1000)
    for i in range(300):
        past(drafter, [1000 * i + j for j in range(1 + i % 30)], tenant=b"abc"[i % 3 :][:1])
        assert sum(drafter._tokens.values()) <= 100
        sizes = {tenant: sum(one.size for one in of) for tenant, of in drafter._tenants.items()}
        assert sizes == drafter._tokens
    assert sum(len(one.tokens) for one in drafter._past.values()) < 300
    past(drafter, range(500), tenant=b"a")
    assert not drafter._tokens.get(b"a")


def test_suffix_keeps_no_output_where_none_is_to_be_kept():
    drafter = suffix_drafter(requests=0)
    past(drafter, [5, 6, 7, 8, 9])
    assert not drafter._past
    assert not drafter._links
