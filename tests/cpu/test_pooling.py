"""Pooled results of whole engines: methods, heads, chunks, preemption, token tasks, bad numbers."""

import numpy as np
import pytest
import torch

from quire.config.engine_config import DenseSection, PoolingSection
from quire.core.types import Pooling, Request, StopConditions
from tests.cpu.engine_of import TINY, engine_of, model_of, request, run

HIDDEN = TINY["hidden_size"]
ENCODER = {**TINY, "is_causal": False}
METHODS = ("cls", "last", "mean", "max", "mean_sqrt_len", "weighted_mean")
PROMPTS = [[7], list(range(20, 90)), [5, 6, 7, 8] * 9, list(range(3, 40)), [11, 12]]
SETTINGS = {
    "together": dict(),
    "overlap": dict(depth=2),
    "chunks": dict(budget=13),
    "chunks in flight": dict(budget=9, depth=2),
    "little memory": dict(num_blocks=22, block_size=8, budget=24, depth=2),
    "no prefix cache": dict(prefix=False, budget=40),
}
RAW = Pooling("embed", use_activation=False)
STATES = Pooling("token_embed", use_activation=False)


def section(*methods, **fields):
    tasks = fields.pop("tasks", ("embed", "token_embed"))
    return PoolingSection(tasks=tasks, methods=methods or ("last",), size=HIDDEN, **fields)


def pooled(name, prompt, pooling=RAW, **fields):
    reads = fields.pop("read_prefix_cache", False)
    return Request(
        name, tuple(prompt), StopConditions(1), pooling=pooling, read_prefix_cache=reads, **fields
    )


def results(updates):
    assert not [u.error for u in updates if u.error]
    return {
        u.request_id: np.frombuffer(u.pooled.data, np.float32).reshape(u.pooled.shape)
        for u in updates
        if u.pooled is not None
    }


def pool(hf, work, pooling, *, stagger=0, **settings):
    _, updates = run(engine_of(hf, pooling=pooling, **settings), work, stagger=stagger)
    return results(updates)


def hidden_states(hf):
    """The state of each token of each prompt, each prompt alone."""
    found = {}
    for i, prompt in enumerate(PROMPTS):
        found |= pool(hf, [pooled(str(i), prompt, STATES)], section())
    return found


def formula(method, states, skip=0):
    x = states.astype(np.float64)
    kept = x[skip:]
    weights = np.arange(1, len(x) + 1)[skip:, None]
    return {
        "cls": lambda: x[0],
        "last": lambda: x[-1],
        "mean": lambda: kept.mean(0),
        "max": lambda: kept.max(0),
        "mean_sqrt_len": lambda: kept.sum(0) / np.sqrt(len(kept)),
        "weighted_mean": lambda: (kept * weights).sum(0) / weights.sum(),
    }[method]()


@pytest.mark.parametrize("hf", [TINY, ENCODER], ids=["decoder", "encoder"])
@pytest.mark.parametrize("method", METHODS)
def test_each_method_is_its_formula(hf, method):
    states = hidden_states(hf)
    work = [pooled(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    got = pool(hf, work, section(method))
    for name, own in states.items():
        assert np.allclose(got[name], formula(method, own), atol=1e-5), name
    assert np.ptp([got["1"] @ one for one in got.values()]) > 0.3, "states differ"


@pytest.mark.parametrize("method", ["mean", "max", "mean_sqrt_len", "weighted_mean"])
@pytest.mark.parametrize("budget", [512, 5])
def test_tokens_of_an_instruction_do_not_count(method, budget):
    states = hidden_states(TINY)
    work = [
        pooled(str(i), PROMPTS[i], Pooling("embed", use_activation=False, skip_tokens=i * 4))
        for i in (1, 2, 3)
    ]
    got = pool(TINY, work, section(method), budget=budget)
    for i in (1, 2, 3):
        assert np.allclose(got[str(i)], formula(method, states[str(i)], i * 4), atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_results_are_the_same_bits_however_steps_divide_prompts(name):
    """All methods side by side, with rows that generate, and preempted ones."""
    work = [pooled(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    work += [pooled(f"t{i}", prompt, STATES) for i, prompt in enumerate(PROMPTS)]
    want = pool(TINY, work, section(*METHODS))
    beside = [request(f"g{i}", [9, i, 4], 40) for i in range(4)]
    got = pool(TINY, [*work, *beside], section(*METHODS), stagger=1, **SETTINGS[name])
    assert got.keys() == want.keys()
    for key, one in want.items():
        assert got[key].tobytes() == one.tobytes(), key


def test_the_last_state_may_come_from_behind_a_cached_prefix():
    prompt = list(range(20, 90))
    engine = engine_of(pooling=section("last"))
    _, first = run_on(engine, [pooled("a", prompt, read_prefix_cache=True)])
    _, again = run_on(engine, [pooled("b", prompt, read_prefix_cache=True)])
    assert again[-1].cached_tokens >= 64
    assert first[-1].pooled.data == again[-1].pooled.data


def run_on(engine, work):
    for one in work:
        engine.add(one)
    updates = []
    while not engine.idle:
        updates += engine.step()
    return results(updates), updates


@pytest.mark.parametrize("depth", [1, 2])
def test_an_encoder_computes_whole_prompts_in_any_company(depth):
    work = [pooled(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    want = {}
    for one in work:
        want |= pool(ENCODER, [one], section("mean"))
    got = pool(ENCODER, work, section("mean"), budget=72, max_len=72, seqs=3, depth=depth)
    for name, one in want.items():
        assert np.abs(got[name] - one).max() < 1e-6
    causal = pool(TINY, work, section("mean"))
    assert np.abs(causal["1"] - want["1"]).max() > 0.1, "later tokens are seen"


def test_an_encoder_has_no_block_and_no_cache():
    engine = engine_of(ENCODER, pooling=section("mean"))
    stats = engine.stats()
    assert (stats.blocks, stats.usage) == (0, 0.0)
    assert engine.snapshot().block_states == b""
    assert engine.health_probe_step()
    assert engine.reset_prefix_cache()
    assert engine.release_kv_memory()


def test_heads_cut_then_norm():
    dense = (
        DenseSection(folder="2_Dense", inputs=2 * HIDDEN, outputs=24, bias=True, activation="tanh"),
    )
    work = [
        pooled("raw", PROMPTS[1]),
        pooled("unit", PROMPTS[1], Pooling("embed")),
        pooled("cut", PROMPTS[1], Pooling("embed", dimensions=5)),
    ]
    got = pool(TINY, work, section("mean", "last", dense=dense))
    assert got["raw"].shape == (24,)
    unit = got["raw"] / np.linalg.norm(got["raw"])
    assert np.allclose(got["unit"], unit, atol=1e-6)
    assert np.allclose(got["cut"], unit[:5] / np.linalg.norm(unit[:5]), atol=1e-6)


@pytest.mark.parametrize("hf", [TINY, ENCODER], ids=["decoder", "encoder"])
def test_heads_give_the_same_bits_alone_and_in_a_batch(hf):
    dense = tuple(
        DenseSection(folder=f"{i}_Dense", inputs=n, outputs=m, bias=True, activation=act)
        for i, (n, m, act) in enumerate([(HIDDEN, 45, "tanh"), (45, 31, "gelu")])
    )
    made = section("mean", dense=dense)
    work = [pooled(str(i), prompt, Pooling("embed")) for i, prompt in enumerate(PROMPTS)]
    batch = pool(hf, work, made)
    for one in work:
        assert pool(hf, [one], made)[one.id].tobytes() == batch[one.id].tobytes()


class Head:
    """[n, E] -> [n, 3], as a model's classify()."""

    weight = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(5)) / 4

    def __call__(self, states):
        return states @ self.weight.T


@pytest.fixture
def classifier(monkeypatch):
    model, _ = model_of(TINY, torch.float32)
    monkeypatch.setattr(model, "classify", Head(), raising=False)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "identity", "torch.nn.Tanh"])
def test_logits_are_shifted_scaled_and_activated_in_float32(classifier, activation):
    tasks = ("classify", "token_classify")
    made = section("last", tasks=tasks, activation=activation, logit_mean=0.2, logit_sigma=1.5)
    work = [
        pooled("probs", PROMPTS[1], Pooling("classify")),
        pooled("logits", PROMPTS[1], Pooling("classify", use_activation=False)),
        pooled("tokens", PROMPTS[1], Pooling("token_classify")),
        pooled("columns", PROMPTS[1], Pooling("token_classify", returned_token_ids=(2, 0))),
        pooled("tagged", PROMPTS[2], Pooling("token_classify", step_tag_id=7)),
        pooled("untagged", PROMPTS[2], Pooling("token_classify", step_tag_id=77)),
        pooled("all", PROMPTS[2], Pooling("token_classify")),
    ]
    got = pool(TINY, work, made, budget=50)
    states = torch.from_numpy(hidden_states(TINY)["1"].copy())
    logits = (Head()(states) - 0.2) / 1.5
    act = {
        "softmax": lambda x: x.softmax(-1),
        "sigmoid": torch.sigmoid,
        "identity": lambda x: x,
        "torch.nn.Tanh": torch.tanh,
    }[activation]
    assert np.allclose(got["logits"], logits[-1], atol=1e-5)
    assert np.allclose(got["probs"], act(logits[-1]), atol=1e-5)
    assert np.allclose(got["tokens"], act(logits), atol=1e-5)
    assert np.array_equal(got["columns"], got["tokens"][:, [2, 0]])
    assert np.allclose(got["tagged"], got["all"][2::4], atol=1e-6)
    assert len(got["untagged"]) == 0


def test_splade_takes_the_largest_logits():
    model, _ = model_of(TINY, torch.float32)
    states = hidden_states(TINY)
    work = [pooled(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    for budget in (512, 11):
        got = pool(TINY, work, section("splade"), budget=budget)
        for name, own in states.items():
            with torch.no_grad():
                logits = model.logits(torch.from_numpy(own.copy()))
            want = torch.log1p(torch.relu(logits.amax(0)))
            assert np.allclose(got[name], want, atol=1e-5)


def test_states_that_are_not_finite_end_their_request_alone(monkeypatch):
    model, _ = model_of(TINY, torch.float32)
    weight = model.embed_tokens.weight
    before = weight[95].clone()
    weight.data[95] = torch.inf
    try:
        work = [
            pooled("bad", [3, 95, 4]),
            pooled("bad too", [95, 4], STATES),
            pooled("good", [3, 4]),
            pooled("chunked", [95, *range(60)]),
        ]
        engine = engine_of(pooling=section("mean"), budget=32)
        _, updates = run(engine, work)
    finally:
        weight.data[95] = before
    ends = {u.request_id: u for u in updates if u.finish}
    for name in ("bad", "bad too", "chunked"):
        assert "not finite" in ends[name].error
        assert ends[name].fault == "numbers"
    assert ends["good"].pooled is not None
