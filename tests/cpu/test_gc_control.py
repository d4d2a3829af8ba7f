"""The collector is held back while steps are made, and as it was afterwards."""

import gc

import pytest

from quire import LLM
from quire.engine.core.gc_control import GC_THRESHOLD, infrequent_gc


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_within_only_growth_brings_a_collection_on(thresholds):
    gc.set_threshold(700, 10, 10)
    with infrequent_gc():
        assert gc.get_threshold() == (GC_THRESHOLD, 10, 10)
    assert gc.get_threshold() == (700, 10, 10)


def test_an_error_within_changes_nothing_for_good(thresholds):
    gc.set_threshold(700, 10, 10)
    inside = infrequent_gc()
    inside.__enter__()
    assert not inside.__exit__(KeyError, KeyError(), None), "it must go on its way"
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("first", [0, GC_THRESHOLD, 10**6])
def test_a_higher_collection_threshold_is_kept(thresholds, first):
    gc.set_threshold(first, 5, 5)
    with infrequent_gc():
        assert gc.get_threshold() == (first, 5, 5)


def test_none_comes_between_the_prompts_and_the_outputs_of_a_call(thresholds, monkeypatch):
    """It would visit every token of every prompt that is queued."""
    llm, changes = LLM("embedded", max_num_seqs=2, use_tqdm_on_load=False), []
    real = gc.set_threshold
    gc.set_threshold(700, 10, 10)
    monkeypatch.setattr(gc, "set_threshold", lambda *to: (changes.append(to), real(*to)))
    llm.generate(["a b c", "d e", "f"], use_tqdm=False)
    assert changes == [(GC_THRESHOLD, 10, 10), (700, 10, 10)]
