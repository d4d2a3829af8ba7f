"""Drafts on the GPU: tokens and logprobs of float32 are those without, steps replay graphs, and no
kernel is compiled."""

import dataclasses
import random

import pytest
import torch

from quire.config.engine_config import SpeculationSection
from quire.config.facts import read_hf_config
from quire.engine.startup.drafter_setup import describe_drafter
from quire.models.build import build_model, read_model_config
from quire.runner.gpu.cuda_graphs import DecodeGraph
from tests.cpu.drafters import heads, test_eagle3
from tests.cpu.engine_of import request, run
from tests.cpu.made_grammars import END, Grammars, bound_to
from tests.gpu.test_invariance import WIDE, WINDOWED, engine_of, watch_graphs
from tests.pure.core.builders import FunctionDrafter

CASES = {"full": WIDE, "windows": WINDOWED}


def workload():
    drawn = dict(temperature=0.8, top_p=0.9)
    return [
        request("plain", range(20), 40),
        request("repeats", [5, 6, 7, 8] * 6, 40),
        request("scored", [5], 30, logprobs=2),
        request("drawn", range(30, 50), 30, seed=4, n=2, **drawn),
        request("scored and drawn", range(30, 40), 30, seed=5, logprobs=3, **drawn),
        request("penalised", range(3, 9), 30, repetition_penalty=1.4),
        request("biased", range(40, 60), 20, logit_bias={3: 4.0, 9: -3.0}),
        request("lists", range(9), 30, constraint=bound_to("lists"), eos=[END]),
        request("ends", range(30, 70), 40, stop_token_ids=[*range(0, 97, 7)]),
        request("long", [i % 97 for i in range(300)], 40),
    ]


def knows(answers, rate=0.8):
    """A drafter that has read the answers, and is right at this rate."""
    rng = random.Random(1)

    def propose(seq):
        at = len(seq.tokens) - seq.prompt_len
        known = answers[seq.request.id, seq.index][at : at + 12]
        return tuple(token if rng.random() < rate else (token + 1) % 97 for token in known)

    return propose


def scores(updates):
    found = {}
    for one in updates:
        found.setdefault((one.request_id, one.index), []).extend(one.logprobs or ())
    return found


@pytest.fixture(scope="module", params=CASES)
def case(request):
    hf = CASES[request.param]
    engine = engine_of(hf, prefix=False, budget=4000, eager=True, grammars=Grammars())
    return hf, *run(engine, workload())


PATHS = {
    "graphs": dict(),
    "overlap": dict(depth=2),
    "overlap, eager": dict(depth=2, eager=True),
    "overlap, small chunks": dict(depth=2, budget=19, stagger=2),
    "overlap, preempted": dict(depth=2, num_blocks=64, stagger=1, prefix=False),
}


@pytest.mark.parametrize(
    ("name", "drafts"), [*((name, 3) for name in PATHS), ("overlap", 1), ("overlap", 7)]
)
def test_drafts_change_no_token_and_no_logprob(case, name, drafts):
    hf, want, before = case
    settings = dict(PATHS[name])
    stagger = settings.pop("stagger", 0)
    speculation = SpeculationSection(max_drafts=drafts, adaptive=False)
    engine = engine_of(hf, grammars=Grammars(), speculation=speculation, **settings)
    propose_by(engine, knows(want))
    replayed = [] if settings.get("eager") else watch_graphs(engine)
    got, updates = run(engine, workload(), stagger=stagger)
    assert got == want
    assert sum(len(one.token_ids) > 1 for one in updates) > 5, "drafts were accepted"
    assert settings.get("eager") or any(
        isinstance(key, DecodeGraph) and key.drafts for key in replayed
    )
    for key, entries in scores(updates).items():
        for one, other in zip(entries, scores(before)[key], strict=True):
            assert one.ids == other.ids
            assert one.values == pytest.approx(other.values, abs=1e-3)


def propose_by(engine, propose):
    """Let a function make the drafts of an engine."""
    host = FunctionDrafter(lambda seq, tokens: propose(dataclasses.replace(seq, tokens=tokens)))
    engine._scheduler._drafting._sources = (host,)


def test_ngram_and_predictions_draft_by_themselves():
    work = [one for one in workload() if not one.constraint]
    want, _ = run(engine_of(WIDE, prefix=False), work)
    speculation = SpeculationSection(method="ngram", max_drafts=4, lookup_min=1, adaptive=False)
    engine = engine_of(WIDE, depth=2, speculation=speculation)
    told = [dataclasses.replace(one, prediction=tuple(want[one.id, 0])) for one in work]
    got, updates = run(engine, told)
    assert got == want
    assert sum(len(one.token_ids) > 1 for one in updates) > 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("drafters")
    tensors = heads.target_tensors()
    return {
        "target": heads.write(root / "target", heads.TARGET, tensors),
        "draft_model": heads.write(root / "same", heads.TARGET, tensors),
        "eagle3": heads.write(
            root / "head", test_eagle3.PLAIN, test_eagle3.head_tensors("midlayer.")
        ),
    }


def engine_with(folders, method, **settings):
    """An engine of the target's folder, with a drafter's."""
    target = folders["target"]
    hf = read_hf_config(target)
    kind, config = read_model_config(hf)
    model = build_model(
        kind, config, folder=target, dtype=torch.float32, device="cuda", progress=False
    )
    given = dict(built=(model, config), max_len=200, **settings)
    if method is None:
        return engine_of(hf, **given)
    found = describe_drafter(method, folders[method], hf["model_type"], config, hf)
    section = SpeculationSection(method=method, max_drafts=4, adaptive=False)
    return engine_of(hf, speculation=section, drafter=found, **given)


@pytest.mark.parametrize("settings", [{}, {"depth": 2, "budget": 19}, {"eager": True}], ids=str)
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_models_draft_and_change_no_token(folders, method, settings):
    work = [one for one in workload() if one.id != "long" and not one.constraint]
    want, _ = run(engine_with(folders, None, prefix=False), work)
    engine = engine_with(folders, method, **settings)
    got, updates = run(engine, work)
    assert got == want
    assert engine._scheduler._drafting._total.tokens > 100
    several = [one for one in updates if len(one.token_ids) > 1]
    assert method == "eagle3" or len(several) > 30, "drafts were accepted"


@pytest.mark.parametrize("settings", [{}, {"eager": True}, {"num_blocks": 24}], ids=str)
@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_steps_continue_behind_drafts_that_are_not_verified(tmp_path, method, settings):
    """Rows that need the host have no part in a first run, and join in a second one."""
    target, head = heads.agreeing_pair(tmp_path)
    folders = {"target": target, "eagle": head, "draft_model": target}
    drawn = [one for one in workload() if one.id in ("plain", "repeats", "drawn", "ends")]
    for work in drawn, [one for one in workload() if one.id != "long" and not one.constraint]:
        want, _ = run(engine_with(folders, None, prefix=False), work)
        engine = engine_with(folders, method, depth=2, **settings)
        plans = heads.watch_plans(engine)
        replayed = [] if settings.get("eager") else watch_graphs(engine)
        got, _ = run(engine, work, stagger=2)
        assert got == want
        assert sum(bool(plan.continues) for plan in plans) > 5
        counts = engine._scheduler.draft_counts
        assert 0.2 < sum(counts.accepted) / counts.tokens < 0.98
        assert settings.get("eager") or any(
            isinstance(key, DecodeGraph) and key.drafts for key in replayed
        )
