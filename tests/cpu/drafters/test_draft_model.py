"""A smaller model as drafter: its drafts are its own greedy tokens, and texts are those without."""

from functools import cache

import pytest
import torch

from tests.cpu.drafters.heads import (
    TARGET,
    check_drafts,
    engine_with,
    plain_engine,
    rms,
    run_target,
    target_tensors,
    write,
)
from tests.cpu.engine_of import request, run

SMALL = {**TARGET, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write(tmp_path_factory.mktemp("target"), TARGET, target_tensors())


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write(tmp_path_factory.mktemp("small"), SMALL, target_tensors(SMALL, seed=2))


def reference_of(weights, layers, count=4):
    @cache
    def reference(tokens):
        tokens = list(tokens)
        for _ in range(count):
            last = run_target(weights, torch.tensor(tokens), layers)[-1][-1]
            normed = rms(last, weights["model.norm.weight"])
            tokens.append(int((weights["lm_head.weight"] @ normed).argmax()))
        return tuple(tokens[-count:])

    return reference


def workload():
    return [
        request("a", [5, 6, 7, 8] * 6, 20),
        request("b", range(20, 60), 20),
        request("c", [9], 40, logprobs=2),
        request("d", range(30, 50), 20, temperature=0.9, seed=4, n=2),
        request("prompt", [5, 6, 7, 8] * 3, 12, prompt_logprobs=1),
        request("short", range(40, 49), 1),
        request("b again", range(20, 60), 12),
    ]


def test_drafts_are_the_greedy_tokens_of_the_model(target, small):
    greedy = [request("a", [5, 6, 7, 8] * 6, 24), request("b", range(20, 60), 24)]
    want, _ = run(plain_engine(target), greedy)
    reference = reference_of(target_tensors(SMALL, seed=2), 2)
    got, whole = check_drafts(engine_with(target, "draft_model", small), greedy, reference)
    assert got == want
    assert whole > 0.8


SETTINGS = {
    "together": {},
    "overlap": dict(depth=2),
    "small chunks": dict(budget=13),
    "little memory": dict(num_blocks=22, block_size=8, depth=2),
    "host tier": dict(num_blocks=22, block_size=8, host_blocks=40),
    "eager": dict(eager=True, depth=2),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_target_as_its_own_drafter_is_always_right(target, name):
    """All its drafts are accepted, whatever moves its keys and values about."""
    want, before = run(plain_engine(target), workload())
    engine = engine_with(target, "draft_model", target, **SETTINGS[name])
    refused, seen, apply = [], 0, engine._scheduler.apply

    def counting(plan, result):
        nonlocal seen
        for row, ids in zip(plan.rows, result.token_ids, strict=True):
            seen += row.drafts
            if row.drafts and row.seq.request.params.greedy and len(ids) <= row.drafts:
                refused.append((row.seq.request.id, row.start, row.drafts, ids))
        return apply(plan, result)

    engine._scheduler.apply = counting
    got, updates = run(engine, workload(), stagger=2)
    assert got == want
    assert logprobs(updates) == logprobs(before)
    assert seen > 30
    assert not refused


def logprobs(updates):
    found = {}
    for one in updates:
        found.setdefault((one.request_id, one.index), []).extend(
            each.ids for each in one.logprobs or ()
        )
    return found
