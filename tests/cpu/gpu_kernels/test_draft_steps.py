"""Steps with drafts on the GPU's worker, acted: tokens and logprobs are those of the CPU without."""

import functools

import pytest

pytest.importorskip("triton")

from quire.engine.startup import scheduler_setup
from quire.engine.startup.warmup import run_dummy_requests
from quire.runner.gpu import draft_proposals
from quire.runner.gpu.cuda_graphs import DecodeGraph, decode_graph_groups, draft_sizes
from quire.runner.gpu.graph_groups import OwnedGraph
from quire.runner.gpu.mixed_batch_graphs import GraphShape
from tests.cpu import engine_of as tiny
from tests.cpu.drafters import heads, test_eagle3
from tests.cpu.gpu_kernels.test_cuda_worker import acted, engine_of, graphs_of, replayed  # noqa: F401
from tests.cpu.made_grammars import END, Grammars, bound_to


def knows(answers, every=3):
    """A drafter that has read the answers: each `every`th draft is wrong."""

    def propose(seq):
        known = answers[seq.request.id, seq.index]
        at = len(seq.tokens) - seq.prompt_len
        drafts = list(known[at : at + 3])
        return tuple((d + 1) % 97 if (at + i) % every == 0 else d for i, d in enumerate(drafts))

    return propose


def workload():
    return [
        tiny.request("plain", range(20), 14),
        tiny.request("scored", [5], 12, logprobs=2),
        tiny.request("penalised", range(3, 9), 14, repetition_penalty=1.4),
        tiny.request("biased", range(40, 60), 9, logit_bias={3: 4.0, 9: -3.0}),
        tiny.request("lists", range(9), 20, constraint=bound_to("lists"), eos=[END]),
        tiny.request("ends", range(30, 70), 14, stop_token_ids=[*range(0, 97, 7)]),
    ]


def scores(updates):
    found = {}
    for one in updates:
        for entry in one.logprobs or ():
            found.setdefault(one.request_id, []).append(entry)
    return found


PATHS = {
    "graphs": dict(),
    "eager, overlap": dict(eager=True, depth=2),
    "overlap, chunks": dict(depth=2, budget=16),
    "preempted": dict(depth=2, num_blocks=16, prefix=False),
}


@pytest.fixture(scope="module", params=["full", "windows"])
def known(request):
    hf = tiny.TINY if request.param == "full" else tiny.WINDOWED
    return hf, tiny.run(tiny.engine_of(hf, grammars=Grammars()), workload())


@pytest.mark.sampled(3)
@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("name", PATHS)
def test_drafts_change_no_token(acted, replayed, known, name):  # noqa: F811
    hf, (want, before) = known
    settings = dict(PATHS[name])
    if hf is tiny.WINDOWED and "num_blocks" in settings:
        settings["num_blocks"] *= 3
    engine = engine_of(hf, drafts=3, propose=knows(want), grammars=Grammars(), seqs=8, **settings)
    got, updates = tiny.run(engine, workload(), stagger=2)
    assert got == want
    assert any(len(one.token_ids) > 1 for one in updates), "drafts were accepted"
    one, other = scores(updates), scores(before)
    assert {k: [p.ids for p in v] for k, v in one.items()} == {
        k: [p.ids for p in v] for k, v in other.items()
    }
    for entry, same in zip(one["scored"], other["scored"], strict=True):
        assert entry.values == pytest.approx(same.values, abs=1e-4)
    graphs = {key: there for key, there in replayed if isinstance(key, DecodeGraph) and key.drafts}
    assert graphs, "there were steps of drafts"
    assert all(graphs.values()) != bool(settings.get("eager"))


def test_steps_with_drafts_have_forward_graphs_and_share_those_of_sampling():
    groups = decode_graph_groups(4, draft_rows=20)
    found = [graph for group in groups for graph in group]
    assert len(found) == len(set(found))
    forward = [graph for graph in found if graph.drafts]
    assert forward == [DecodeGraph(n, "forward", None, "", True) for n in (20, 16, 8, 4, 2)]
    sampled = {graph.size for graph in found if graph.part == "sampling"}
    assert sampled >= {2, 4, 8, 16, 20}
    assert all(group == sorted(group, reverse=True) for group in groups)
    assert draft_sizes(0) == []
    assert draft_sizes(512)[-4:] == [192, 256, 384, 512]
    assert draft_sizes(3) == [2, 3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("drafters")
    small = {**heads.TARGET, "num_hidden_layers": 2}
    eagle3 = {
        **heads.TARGET,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": test_eagle3.DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": test_eagle3.IDS},
    }
    return {
        "target": heads.write(root / "target", heads.TARGET, heads.target_tensors()),
        "draft_model": heads.write(root / "small", small, heads.target_tensors(small, seed=2)),
        "eagle3": heads.write(root / "eagle3", eagle3, test_eagle3.head_tensors("midlayer.")),
    }


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("settings", [{}, {"depth": 2, "eager": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_model_drafts_what_it_does_on_the_cpu(acted, replayed, folders, method, settings):  # noqa: F811
    work = [one for one in workload() if one.id in ("plain", "scored", "penalised")]
    target, folder = folders["target"], folders[method]
    want, _ = tiny.run(heads.plain_engine(target), work)
    proposals, right = [], knows(want, every=7)
    for make in (heads.engine_with, functools.partial(engine_of, make=heads.engine_with)):
        given = dict(method=method, folder=folder, drafts=3)
        engine = make(target, **given, **({"seqs": 8, **settings}))
        found = {}
        taken = engine._scheduler._drafting.set_proposals

        def note(seq, drafts, taken=taken, found=found):
            found.setdefault((seq.request.id, len(seq.tokens)), drafts)
            taken(seq, right(seq)[: len(drafts)])  # those of random heads are hardly accepted

        engine._scheduler._drafting.set_proposals = note
        got, _ = tiny.run(engine, work)
        assert got == want
        proposals.append(found)
    assert proposals[0] == proposals[1]
    graphs = [there for key, there in replayed if isinstance(key, DecodeGraph) and key.drafts]
    assert graphs, "there were steps of drafts"
    assert all(graphs) != bool(settings.get("eager"))
    shapes = [there for key, there in replayed if isinstance(key, GraphShape)]
    assert all(shapes)
    assert bool(shapes) != bool(settings.get("eager"))
    passes = [there for key, there in replayed if isinstance(key, OwnedGraph)]
    assert passes
    assert all(passes) != bool(settings.get("eager"))


DRAWN = dict(temperature=0.9, top_p=0.9)
CONTINUED = {
    "drawn on the device": (
        tiny.request("plain", range(20), 30),
        tiny.request("drawn", range(30, 50), 40, seed=4, n=2, **DRAWN),
        tiny.request("ends", range(30, 70), 30, stop_token_ids=[*range(0, 97, 7)]),
        tiny.request("short", range(9), 7),
        tiny.request("late", [5], 15),
    ),
    "some need the host": (
        tiny.request("plain", range(20), 20),
        tiny.request("scored", [5], 16, logprobs=2),
        tiny.request("drawn", range(30, 50), 20, seed=4, **DRAWN),
        tiny.request("penalised", range(3, 9), 20, repetition_penalty=1.4),
        tiny.request("biased", range(40, 60), 9, logit_bias={3: 4.0, 9: -3.0}),
        tiny.request("lists", range(9), 6, constraint=bound_to("lists"), eos=[END]),
    ),
}


@pytest.mark.slow("kernels in the interpreter")
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", CONTINUED)
def test_steps_continue_behind_drafts_that_are_not_verified(
    acted,  # noqa: F811
    replayed,  # noqa: F811
    tmp_path,
    monkeypatch,
    name,
    eager,
):
    monkeypatch.setattr(scheduler_setup, "continues_steps", lambda config: True)
    waits, waited = [], draft_proposals.continued_batch
    monkeypatch.setattr(
        draft_proposals, "continued_batch", lambda *of: waits.append(of) or waited(*of)
    )
    (target, head), work = heads.agreeing_pair(tmp_path), CONTINUED[name]
    want, before = tiny.run(heads.plain_engine(target, grammars=Grammars()), work)
    given = dict(method="eagle", folder=head, drafts=3, seqs=8, depth=2, eager=eager)
    engine = engine_of(target, make=heads.engine_with, grammars=Grammars(), **given)
    plans = heads.watch_plans(engine)
    got, updates = tiny.run(engine, work, stagger=3)
    assert got == want
    for one, other in zip(*(scores(of).get("scored", []) for of in (updates, before)), strict=True):
        assert one.ids == other.ids
        assert one.values == pytest.approx(other.values, abs=1e-4)
    continued = [plan for plan in plans if plan.continues]
    assert len(continued) > 3
    rows = [(plan, row) for plan in continued for row in plan.rows[: len(plan.continues)]]
    assert not any(row.seq.request.constraint for _, row in rows)
    assert any(len(plan.continues) < len(plan.rows) for plan in continued), "prompts are beside"
    counts = engine._scheduler.draft_counts
    assert 0.2 < sum(counts.accepted) / counts.tokens < 0.9
    on_device = name == "drawn on the device"
    assert bool(waits) != on_device
    shorter = [plan for plan in continued if plan.continues != tuple(range(len(plan.rows)))]
    assert shorter or not on_device, "a sequence has ended before"


@pytest.mark.slow("kernels in the interpreter")
def test_a_draft_model_reads_the_tokens_of_steps_that_continue(acted, tmp_path, monkeypatch):  # noqa: F811
    """It is the model itself, so all its drafts are right if it has read what the model has."""
    monkeypatch.setattr(scheduler_setup, "continues_steps", lambda config: True)
    target, _ = heads.agreeing_pair(tmp_path)
    work = [tiny.request("a", range(20), 40), tiny.request("b", range(30, 50), 25)]
    want, _ = tiny.run(heads.plain_engine(target), work)
    given = dict(method="draft_model", folder=target, drafts=3, seqs=8, depth=2)
    engine = engine_of(target, make=heads.engine_with, **given)
    plans = heads.watch_plans(engine)
    assert tiny.run(engine, work)[0] == want
    assert sum(bool(plan.continues) for plan in plans) > 5
    counts = engine._scheduler.draft_counts
    assert sum(counts.accepted) > 0.8 * counts.tokens  # others are behind the last token


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_products_of_a_drafter_are_warmed_up(acted, folders, monkeypatch, method):  # noqa: F811
    """The library loads a kernel at its first use, and waits for an idle device then."""
    make = functools.partial(engine_of, make=heads.engine_with, captured=False)
    engine = make(folders["target"], method=method, folder=folders[method], drafts=3, seqs=4)
    worker, rows = engine.executor.runner.worker, {}
    drafter = worker.proposals._drafter.graphed_head.model.module
    linears = [one for one in drafter.modules() if getattr(one, "role", None) == "linear"]
    for kind in {type(one.weight) for one in linears}:

        def note(weight, x, bias, product=kind.product):
            rows.setdefault(id(weight), set()).add(len(x))
            return product(weight, x, bias)

        monkeypatch.setattr(kind, "product", note)
    worker._sampler.warm_up = lambda dtype: None
    engine.executor.call("warm_up_kernels")
    assert max(len(rows.get(id(one.weight), ())) for one in linears) > 5


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_drafter_leaves_out_tokens_of_prompts_that_are_not_sampled(
    acted,  # noqa: F811
    folders,
    monkeypatch,
    method,
):
    make = functools.partial(engine_of, make=heads.engine_with, eager=True, budget=16)
    engine = make(folders["target"], method=method, folder=folders[method], drafts=3, seqs=4)
    drafter = engine.executor.runner.worker.proposals._drafter.graphed_head.model.module
    layer, rows = drafter.layers[-1], {"self_attn": [], "mlp": []}
    for name, found in rows.items():
        module = getattr(layer, name)

        def note(x, *more, run=module.forward, found=found):
            found.append(len(x))
            return run(x, *more)

        monkeypatch.setattr(module, "forward", note)
    tiny.run(engine, [tiny.request("plain", range(40), 4)])
    counts = list(zip(*rows.values(), strict=True))
    assert all(0 < some <= whole for whole, some in counts)
    assert [some for whole, some in counts if whole > 4] == [1, 1, 1]


def test_a_start_with_few_layers_drafts_behind_prompts_and_decode_steps(acted, folders):  # noqa: F811
    """Some of the layers whose states the head reads are not there while a start is traced."""
    make = functools.partial(engine_of, make=heads.engine_with, captured=False)
    engine = make(folders["target"], method="eagle3", folder=folders["eagle3"], drafts=3, seqs=4)
    assert engine.executor.runner.worker.proposals.taps.layers > {0, 1}
    half = engine._scheduler, engine.executor
    engine.executor.call("begin_trace")
    run_dummy_requests(half, [20, 1], tiny.request("x", [1], 1).params, tokens=6)
    engine.executor.call("end_trace")
    del graphs_of(engine)._capture
    engine.executor.call("capture_graphs", 0)
    work = [tiny.request("plain", range(20), 14)]
    got, _ = tiny.run(engine, work)
    assert got == tiny.run(heads.plain_engine(folders["target"]), work)[0]
