"""A request may have tokens that its sequences generated in another engine: it continues there.

An engine stops at a random step, and another resumes from the delivered tokens. Together the
two yield the tokens of one engine, to the bit, whatever the engines do.
"""

import dataclasses
import random

import pytest
import torch

from quire.errors import RequestError
from tests.cpu.engine_of import engine_of, request
from tests.cpu.made_grammars import Grammars
from tests.cpu.same_bits import needs_same_bits
from tests.cpu.test_structured import RANDOM
from tests.cpu.test_structured import workload as bound_workload

pytestmark = [needs_same_bits, pytest.mark.sampled(3)]


def workload():
    """Requests whose outputs depend on earlier ones: draws, penalties, minima, grammars, logprobs."""
    rng = random.Random(5)
    prompt = [rng.randrange(14, 97) for _ in range(50)]
    return [
        *bound_workload(),
        request("greedy", prompt, 40),
        request("penalised", prompt, 40, repetition_penalty=1.3, frequency_penalty=0.5),
        request("siblings", prompt, 30, n=3, seed=9, presence_penalty=0.3, **RANDOM),
        request("vectors", prompt, 30, n=2, vectors=torch.eye(40, 32), logprobs=1, **RANDOM),
        request("judged", prompt, 30, logprobs=3, prompt_logprobs=2),
        request("judged siblings", prompt, 20, n=2, logprobs=1, prompt_logprobs=1, **RANDOM),
        request("least", prompt[:9], 40, min_tokens=25, stop_token_ids=list(range(60)), **RANDOM),
        request("stopped", prompt[:7], 40, stop_token_ids=list(range(20)), n=4, **RANDOM),
    ]


class Told:
    """The delivered outputs of some requests, from any number of engines."""

    def __init__(self, requests):
        self.requests = requests
        self.places = {(one.id, i): ([], [], [], []) for one in requests for i in range(one.n)}

    def take(self, updates):
        for u in updates:
            tokens, ends, logprobs, prompt = self.places[u.request_id, u.index]
            assert not ends, "something was told after the end"
            tokens.extend(u.token_ids)
            ends.extend(
                [(u.finish, u.stop_reason, u.error, u.last_token_is_text)] if u.finish else []
            )
            logprobs.extend(u.logprobs or [])
            prompt.extend([u.prompt_logprobs] if u.prompt_logprobs else [])

    def again(self):
        """The requests that have not ended, with their generated tokens."""
        found = []
        for one in self.requests:
            said = [self.places[one.id, i] for i in range(one.n)]
            spoken = tuple(None if ends else tuple(tokens) for tokens, ends, _, _ in said)
            if spoken != (None,) * one.n:
                found.append(dataclasses.replace(one, resumed_tokens=spoken))
        return found


def made(**settings):
    return engine_of(grammars=Grammars(), **{"seqs": 48, "num_blocks": 600, **settings})


def talk(told, engine, steps=None):
    """Run what has not ended, to the end or for so many steps."""
    for one in told.again():
        engine.add(one)
    while not engine.idle and steps != 0:
        told.take(engine.step())
        steps = None if steps is None else steps - 1
    return engine


@pytest.fixture(scope="module")
def want():
    told = Told(workload())
    talk(told, made())
    return told.places


SETTINGS = {
    "together": dict(),
    "small chunks": dict(budget=11),
    "whole prompts": dict(chunked=False, budget=112),
    "two seats": dict(seqs=2),
    "no prefix cache": dict(prefix=False),
    "little memory": dict(num_blocks=40),
    "little memory, host tier": dict(num_blocks=40, host_blocks=60),
    "overlap": dict(depth=2),
    "overlap, small chunks, little memory": dict(depth=2, budget=9, num_blocks=40),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SETTINGS)
def test_an_engine_continues_where_another_stopped(want, name):
    rng = random.Random(name)
    told = Told(workload())
    for _ in range(3):
        talk(told, made(**SETTINGS[name]), rng.randrange(1, 14))
    talk(told, made(**SETTINGS[name]))
    assert told.places == want


@pytest.mark.parametrize("steps", range(1, 40, 3))
def test_it_continues_from_any_step(want, steps):
    told = Told(workload())
    talk(told, made(depth=2), steps)
    talk(told, made(depth=2))
    assert told.places == want


def test_siblings_that_ended_stay_so_and_the_next_computes_the_prompt():
    one = request("a", range(20, 50), 8, n=3, seed=3, **RANDOM)
    alone = Told([one])
    talk(alone, made())
    _, second, third = (alone.places["a", i][0] for i in range(3))
    engine = made()
    again = dataclasses.replace(one, resumed_tokens=(None, tuple(second[:3]), ()))
    told = Told([one])
    engine.add(again)
    rows = {row.index for row in engine.snapshot().rows}
    assert rows == {1, 2}
    while not engine.idle:
        told.take(engine.step())
    assert [told.places["a", i][0] for i in range(3)] == [[], second[3:], third]
    engine.check()


def test_a_first_token_is_counted_once():
    one = request("a", range(20, 50), 8)
    told = Told([one])
    talk(told, made(), 3)
    engine = talk(told, made())
    counted = engine.snapshot().counters
    assert counted.prompt_tokens == 33  # computed: the prompt and what was said
    assert sum(counted.first_token_times) == 0


@pytest.mark.parametrize(
    "spoken", [((1,) * 8,), ((1,), (2,)), (None,)], ids=["all", "too many", "nobody lives"]
)
def test_a_resumed_request_without_remaining_tokens_is_refused(spoken):
    one = dataclasses.replace(request("a", [20, 21], 8), resumed_tokens=spoken)
    with pytest.raises(RequestError, match="no token is left to generate"):
        made().add(one)
