"""Where requests are placed: by load, by prompts that were sent before, and evenly."""

import random
from collections import Counter

from quire.core.params import SamplingParams
from quire.core.scheduler_stats import EngineLoad
from quire.core.types import Request, StopConditions
from quire.engine.client.placement import CHUNK_TOKENS, SEQUENCE_COST, Placement


def request(name, prompt, n=1, **more):
    return Request(name, tuple(prompt), StopConditions(9), SamplingParams(max_tokens=9, n=n), n=n,
                   **more)  # fmt: skip


def place(placement, one, engines=range(4)):
    """Place a request and send it; it is not answered."""
    return placement.place([one], engines).engine


def answered(placement, one, engines):
    """Place a request; it is answered at once."""
    sent = placement.place([one], engines)
    placement.end(sent)
    return sent.engine


def prompts(rng, count, length):
    return [[rng.randrange(1000) for _ in range(length)] for _ in range(count)]


def test_a_burst_of_equal_requests_is_spread_evenly():
    placement, rng = Placement(4, 1 << 20), random.Random(0)
    found = Counter(
        place(placement, request(str(i), one)) for i, one in enumerate(prompts(rng, 512, 100))
    )
    assert sorted(found.values()) == [128] * 4


def test_a_long_prompt_counts_as_many_short_ones():
    placement, rng = Placement(2, 1 << 20), random.Random(0)
    (long,), short = prompts(rng, 1, 20_000), prompts(rng, 60, 100)
    first = place(placement, request("long", long), range(2))
    found = Counter(place(placement, request(str(i), one), range(2)) for i, one in enumerate(short))
    assert found == {1 - first: 60}


def test_a_prompt_goes_where_its_beginning_was_sent():
    placement, rng = Placement(4, 1 << 20), random.Random(0)
    chats = prompts(rng, 40, 10 * CHUNK_TOKENS)
    where = [place(placement, request(str(i), one)) for i, one in enumerate(chats)]
    for engine in range(4):
        placement.report(engine, EngineLoad(0, 10))
        for sent in list(placement._sent[engine].values()):
            placement.end(sent)
    for i in rng.sample(range(40), 40):
        more = request(f"{i}b", chats[i] + [1] * 100)
        assert answered(placement, more, range(4)) == where[i]


def test_a_shared_beginning_does_not_overload_one_engine():
    placement, rng = Placement(4, 1 << 20), random.Random(0)
    (system,) = prompts(rng, 1, 8 * CHUNK_TOKENS)
    own = prompts(rng, 400, 50)
    found = Counter(place(placement, request(str(i), system + one)) for i, one in enumerate(own))
    assert max(found.values()) - min(found.values()) <= 8 * CHUNK_TOKENS // SEQUENCE_COST


def test_other_salts_are_other_prompts():
    placement = Placement(2, 1 << 20)
    prompt = range(CHUNK_TOKENS * 4)
    a, b = request("a", prompt, salt=b"x"), request("b", prompt, salt=b"y")
    placement.end(placement.begin([a], 0))
    assert answered(placement, a, range(2)) == 0
    placement.report(0, EngineLoad(0, 1))
    assert answered(placement, a, range(2)) == 0
    assert answered(placement, b, range(2)) == 1


def test_an_answer_and_a_report_count_a_request_once():
    placement = Placement(2, 0)
    sent = placement.begin([request("a", range(1000), n=3)], 0)
    assert placement._waiting(0) == 1000 + 3 * SEQUENCE_COST
    placement.report(0, EngineLoad(700, 3))
    placement.end(sent)
    assert placement._waiting(0) == 700 + 3 * SEQUENCE_COST
    placement.clear(0)
    assert placement._waiting(0) == 0


def test_the_prompts_of_an_engine_are_bounded_by_its_cache():
    placement, rng = Placement(1, 100 * CHUNK_TOKENS), random.Random(0)
    for i, one in enumerate(prompts(rng, 50, 10 * CHUNK_TOKENS)):
        place(placement, request(str(i), one), [0])
    assert len(placement._prompts[0]._keys) == 100


def test_only_candidates_are_chosen():
    placement = Placement(4, 0)
    assert {place(placement, request(str(i), [1] * 9), [1, 3]) for i in range(9)} == {1, 3}
