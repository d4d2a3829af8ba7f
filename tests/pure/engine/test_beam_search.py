"""The search itself, against a table for a model."""

import itertools
import math

import pytest

from quire.core.params import HIGHEST_LENGTH_PENALTY, BeamSearchParams
from quire.core.types import Request, StopConditions, TokenLogprobs, Update
from quire.engine.client.beam_search import Beam, BeamSearch
from quire.errors import EngineError

EOS = 9
TABLE = {
    (): {1: -1.0, 2: -1.2},
    (1,): {EOS: -0.4, 3: -1.0},
    (2,): {3: -0.1, 4: -3.0},
}


ASKED = Request(
    "s", (7,), StopConditions(9), n=2, priority=2, salt=b"s", tenant=b"t", deadline_at=9.5
)


def run(width, rounds, *, max_new_tokens=100, table=TABLE, **params):
    """The search over a table of next-token logprobs; the requests it made, and its result."""
    search = BeamSearch(
        ASKED,
        BeamSearchParams(width, rounds, **params),
        eos_ids=[EOS],
        max_new_tokens=max_new_tokens,
        vocab=10,
    )
    made, released = [], []
    while not search.is_finished:
        asked = search.next_requests()
        made.append(asked)
        released += search.take_releasable()
        for request in asked:
            best = sorted(
                table.get(request.prompt[1:], {5: -0.5, 6: -0.6}).items(), key=lambda p: -p[1]
            )
            ids, values = [i for i, _ in best], [v for _, v in best]
            said = TokenLogprobs([ids[0], *ids], [values[0], *values], [1] * (len(ids) + 1))
            search.add_update(Update(request.id, 0, [ids[0]], "length", logprobs=[said]))
    return made, released + search.requests_to_end(), search.best_beams()


def test_eos_does_not_count_in_the_length():
    _, _, (best,) = run(1, 2)
    assert best.tokens == (1, 3)  # -2.0 / 2; EOS would be -1.4 / 1
    _, _, (best,) = run(1, 2, length_penalty=0.0)
    assert (best.tokens, best.finish_reason, best.stop_reason) == ((1,), "stop", EOS)


@pytest.mark.parametrize("penalty", [HIGHEST_LENGTH_PENALTY, -HIGHEST_LENGTH_PENALTY])
def test_every_length_has_a_score(penalty):
    beam = Beam(logprob_sum=-1e9, scored_tokens=10**9)
    assert math.isfinite(beam.score(penalty))
    assert beam.score(penalty) < 0


def test_eos_is_kept_or_ignored_if_requested():
    _, _, (best,) = run(1, 2, length_penalty=0.0, include_stop_str_in_output=True)
    assert best.tokens == (1, EOS)
    _, _, (best,) = run(1, 2, ignore_eos=True)
    assert (best.tokens, best.finish_reason) == ((1, EOS), "length")


def test_two_beams_beat_a_greedy_choice():
    _, _, beams = run(2, 2, ignore_eos=True)
    assert [b.tokens for b in beams] == [(2, 3), (1, EOS)]
    assert [round(b.logprob_sum, 6) for b in beams] == [-1.3, -1.4]


def test_children_name_their_parents_and_every_request_is_released():
    made, released, _ = run(2, 3, ignore_eos=True)
    assert [(r.parent, r.deadline_at) for r in made[0]] == [(None, 9.5)]
    for before, after in itertools.pairwise(made):
        assert {r.parent for r in after} <= {r.id for r in before}
        assert all(r.hold and r.priority == 2 and r.stop.max_tokens == 1 for r in after)
        assert all((r.salt, r.tenant, r.num_answers) == (b"s", b"t", 1) for r in after)
    assert sorted(set(released)) == sorted(r.id for asked in made for r in asked)


def test_the_context_bounds_the_rounds():
    made, _, _ = run(2, 50, max_new_tokens=3, ignore_eos=True)
    assert len(made) == 3


def test_only_what_is_allowed_is_considered():
    _, _, beams = run(2, 1, allowed_token_ids=[2])
    assert [b.tokens for b in beams] == [(2,)]


def test_a_search_without_beams_left_is_over():
    made, _, (best,) = run(1, 5, table={(): {EOS: -0.1}})
    assert len(made) == 1
    assert (best.tokens, best.finish_reason) == ((), "stop")


def test_a_failed_request_fails_the_search():
    search = BeamSearch(ASKED, BeamSearchParams(1, 2), max_new_tokens=9, vocab=10)
    (request,) = search.next_requests()
    search.add_update(Update(request.id, 0, [], "error", error="out of luck"))
    with pytest.raises(EngineError, match="out of luck"):
        search.raise_error()
    assert search.requests_to_end() == [request.id]  # its blocks are still to be released
