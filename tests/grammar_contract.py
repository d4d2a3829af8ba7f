"""What every backend owes (quire.grammar.backends.base), run by the tests of each over the same cases."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.errors import RequestError
from quire.grammar.backends.base import GrammarCompiler
from tests.grammar_cases import CASES, IDS, ORACLE, VOCABULARY, Case, ids_of, text_of

ENDS = VOCABULARY.eos_token_ids


def mask(matcher) -> np.ndarray:
    words = np.full(VOCABULARY.mask_words, 0x55555555, np.int32)
    matcher.fill_bitmask(words)
    return words


def allowed(matcher) -> list[int]:
    bits = np.unpackbits(mask(matcher).view(np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


def accepted(matcher, ids) -> int:
    for n, token in enumerate(ids):
        if not matcher.accept(token):
            return n
    return len(ids)


def walk(grammar, chance: random.Random, most: int = 40):
    """(matcher, tokens) at every place of a walk that the masks allow; ends come early."""
    matcher, ids = grammar.matcher(), []
    while True:
        yield matcher, ids
        may = allowed(matcher)
        named = set() if matcher.is_complete else named_ends(grammar)
        plain = [i for i in may if i not in ENDS or i in named]
        if len(ids) >= most or not plain or (matcher.is_complete and chance.random() < 0.2):
            return
        short = [i for i in plain if i not in range(128, 256)]
        token = chance.choice(short or plain)
        assert matcher.accept(token), (ids, token)
        ids.append(token)


def named_ends(grammar) -> set[int]:
    matcher = grammar.matcher()
    return set(ENDS) - set(matcher.raw.stop_tokens)


def takes_good_texts(grammar, case: Case) -> None:
    for text in case.good:
        for chance in (None, random.Random(1), random.Random(2)):
            matcher, ids = grammar.matcher(), ids_of(text, chance)
            assert accepted(matcher, ids) == len(ids), (text, ids)
            assert matcher.is_complete, text
            assert matcher.accept(ENDS[-1]), text
            assert matcher.is_terminated


def refuses_bad_texts(grammar, case: Case) -> None:
    for text in case.bad:
        matcher, ids = grammar.matcher(), ids_of(text)
        assert accepted(matcher, ids) < len(ids) or not matcher.is_complete, text


def masks_are_what_accept_allows(grammar, chance: random.Random) -> None:
    for matcher, _ in walk(grammar, chance, most=12):
        may = set(allowed(matcher))
        for token in range(VOCABULARY.size):
            one = matcher.copy()
            assert one.accept(token) == (token in may), token


def ends_only_where_whole(grammar, chance: random.Random) -> None:
    for matcher, _ in walk(grammar, chance):
        ends = set(ENDS) - named_ends(grammar)
        may = set(allowed(matcher))
        assert may, "a mask is never empty"
        assert bool(ends & may) == matcher.is_complete or not ends
        if matcher.is_terminated:
            assert may <= set(ENDS)


def whole_is_what_the_oracle_says(grammar, case: Case, chance: random.Random) -> None:
    for matcher, ids in walk(grammar, chance):
        text = text_of(ids)
        is_whole = text is not None and ORACLE.whole(case.form, text)
        assert matcher.is_complete == is_whole, (text, ids)


def rollback_restores(grammar, chance: random.Random) -> None:
    matcher, ids, masks = grammar.matcher(), [], []
    for other, so_far in walk(grammar, chance, most=16):
        masks.append(mask(other))
        ids = list(so_far)
    for token in ids:
        assert matcher.accept(token)
    if matcher.is_complete:
        assert matcher.accept(ENDS[0])
        assert matcher.accept(ENDS[-1])
        matcher.rollback(2)
    back = chance.randrange(len(ids) + 1)
    matcher.rollback(back)
    for at in range(len(ids) - back, len(ids)):
        assert (mask(matcher) == masks[at]).all()
        assert matcher.accept(ids[at])
    assert (mask(matcher) == masks[-1]).all()


def copies_are_independent(grammar, chance: random.Random) -> None:
    for matcher, _ in walk(grammar, chance, most=8):
        before, twin = mask(matcher), matcher.copy()
        token = chance.choice(allowed(twin))
        assert twin.accept(token)
        assert (mask(matcher) == before).all()
        twin.rollback(1)
        assert (mask(twin) == before).all()


def validate_changes_nothing(grammar, chance: random.Random) -> None:
    steps = [list(ids) for _, ids in walk(grammar, chance)]
    ids = steps[-1]
    matcher = grammar.matcher()
    whole = accepted(matcher.copy(), ids) == len(ids) and _complete(grammar, ids)
    before = mask(matcher)
    assert matcher.validate(ids) == len(ids)
    assert matcher.validate([*ids, ENDS[0], ENDS[-1]]) == len(ids) + (2 if whole else 0)
    assert matcher.validate([*ids, IDS["<pad>"], *ids]) == len(ids)
    assert (mask(matcher) == before).all()


def _complete(grammar, ids) -> bool:
    matcher = grammar.matcher()
    assert accepted(matcher, ids) == len(ids)
    return matcher.is_complete


def dumps_load_elsewhere(make, grammar, chance: random.Random) -> None:
    """make: another compiler over an equal vocabulary."""
    again = make().load(grammar.dump())
    matcher = again.matcher()
    for other, ids in walk(grammar, chance, most=10):
        if ids:
            assert matcher.accept(ids[-1])
        assert (mask(matcher) == mask(other)).all()


def fills_all_as_one_by_one(compiler, grammars) -> None:
    matchers = [grammar.matcher() for grammar in grammars]
    for n, matcher in enumerate(matchers):
        for _ in range(n % 4):
            matcher.accept(allowed(matcher)[0])
    words = np.zeros((len(matchers) + 2, VOCABULARY.mask_words), np.int32)
    compiler.fill_bitmasks([(row + 1, one) for row, one in enumerate(matchers)], words)
    for row, matcher in enumerate(matchers):
        assert (words[row + 1] == mask(matcher)).all()
    assert not words[0].any()
    assert not words[-1].any()


def refuses(compiler, form, *words: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(form)
    assert all(word in str(caught.value) for word in words), str(caught.value)


class Contract:
    """What every backend is held to: a subclass named Test... says which one it is."""

    compiler: GrammarCompiler

    @pytest.fixture(scope="class", params=CASES, ids=lambda case: case.name)
    def case(self, request) -> Case:
        return request.param

    @pytest.fixture(scope="class")
    def grammar(self, case):
        return self.compiler.compile(case.form)

    @pytest.fixture(params=range(2))
    def chance(self, request) -> random.Random:
        return random.Random(request.param)

    def test_texts_of_the_form_are_taken_in_any_cut(self, grammar, case):
        takes_good_texts(grammar, case)

    def test_other_texts_are_not(self, grammar, case):
        refuses_bad_texts(grammar, case)

    def test_masks_are_what_accept_allows(self, grammar, chance):
        masks_are_what_accept_allows(grammar, chance)

    def test_ends_are_allowed_where_the_text_is_whole(self, grammar, chance):
        ends_only_where_whole(grammar, chance)

    def test_a_text_is_whole_where_the_oracle_says_so(self, grammar, case, chance):
        if case.by_oracle:
            whole_is_what_the_oracle_says(grammar, case, chance)

    def test_rollback_restores_masks(self, grammar, chance):
        rollback_restores(grammar, chance)

    def test_a_copy_is_independent(self, grammar, chance):
        copies_are_independent(grammar, chance)

    def test_a_look_ahead_changes_nothing(self, grammar, chance):
        validate_changes_nothing(grammar, chance)

    def test_a_dump_loads_elsewhere(self, grammar, chance):
        dumps_load_elsewhere(lambda: type(self.compiler)(VOCABULARY), grammar, chance)
