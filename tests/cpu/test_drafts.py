"""Rows that yield several tokens, or a pooled state, on a real model: the same as one at a time."""

import pytest
import torch

from quire.config.engine_config import PoolingSection
from quire.core.types import Pooling, Request, StopConditions
from tests import tiers
from tests.cpu.engine_of import TINY, WINDOWED, engine_of, model_of, request, run


def ngram(seq):
    """The tokens behind the latest earlier place of the last one; sampled rows get no drafts."""
    params = seq.request.params
    if not params.greedy or params.repetition_penalty != 1.0 or params.logit_bias:
        return ()
    last, tokens = seq.tokens[-1], seq.tokens[:-1]
    if last not in tokens:
        return ()
    at = len(tokens) - tokens[::-1].index(last)
    return tuple(seq.tokens[at : at + 4])


def workload():
    return [
        request("a", [5, 6, 7, 8] * 6, 40),
        request("b", range(20, 60), 40),
        request("c", [9], 60, logprobs=2),
        request("drawn", range(30, 50), 20, temperature=0.9, seed=4, n=2),
        request("penalised", range(30, 50), 20, repetition_penalty=1.4),
        request("prompt", [5, 6, 7, 8] * 3, 12, prompt_logprobs=1),
        request("short", range(40, 49), 3),
    ]


SETTINGS = {
    "together": dict(),
    "overlap": dict(depth=2),
    "small chunks": dict(budget=13),
    "little memory": dict(num_blocks=22, block_size=8, depth=2),
    "eager": dict(eager=True, depth=2),
}


EASY = ("together", "overlap", "eager")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("hf", "name"),
    [
        *((TINY, name) for name in SETTINGS),
        *((WINDOWED, name) for name in SETTINGS if name not in EASY),
        *tiers.long(*((WINDOWED, name) for name in EASY)),
    ],
)
def test_tokens_with_drafts_are_those_without(hf, name):
    want, before = run(engine_of(hf), workload())
    engine = engine_of(hf, drafts=4, propose=ngram, **SETTINGS[name])
    steps, submit = [], engine._executor.submit
    engine._executor.submit = lambda plan: (steps.append(plan.num_drafts), submit(plan))[1]
    got, updates = run(engine, workload(), stagger=2)
    assert got == want
    assert sum(steps) > 20, "drafts were verified"
    accepted = [u for u in updates if len(u.token_ids) > 1]
    assert accepted, "and some were accepted"
    logprobs = lambda made: [one.ids for u in made for one in u.logprobs or ()]  # noqa: E731
    assert logprobs(updates) == logprobs(before)


def test_wrong_drafts_cost_nothing_but_time():
    wrong = lambda seq: (96, 95, 94) if seq.request.params.greedy else ()  # noqa: E731
    work = [one for one in workload() if one.id != "penalised"]
    want, _ = run(engine_of(), work)
    assert run(engine_of(drafts=3, propose=wrong, depth=2), work)[0] == want


LAST = PoolingSection(tasks=("embed",), methods=("last",), size=TINY["hidden_size"])


def pooled(name, prompt):
    pooling = Pooling("embed", use_activation=False)
    return Request(name, tuple(prompt), StopConditions(1), pooling=pooling)


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_a_pooled_row_yields_the_last_hidden_state_in_any_company(name):
    """The head reads the first greedy token of the same prompt from it."""
    prompts = [[7], list(range(20, 60)), [5, 6, 7, 8] * 9]
    work = [pooled(str(i), prompt) for i, prompt in enumerate(prompts)]
    engine = engine_of(**SETTINGS[name], pooling=LAST)
    _, updates = run(engine, [*work, *workload()], stagger=1)
    states = {u.request_id: u.pooled for u in updates if u.pooled is not None}
    assert sorted(states) == ["0", "1", "2"], [u for u in updates if u.error]
    model, _ = model_of(TINY, torch.float32)
    tokens = [request(f"t{i}", prompt, 1) for i, prompt in enumerate(prompts)]
    want, _ = run(engine_of(), tokens)
    for i, one in states.items():
        assert one.shape == (TINY["hidden_size"],)
        state = torch.frombuffer(bytearray(one.data), dtype=torch.float32)
        assert model.logits(state[None]).argmax().item() == want[f"t{i}", 0][0]
