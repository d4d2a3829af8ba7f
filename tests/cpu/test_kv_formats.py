"""KV caches of 8 bits through the engine: the same answers on every path, near those of float32."""

import pytest
import torch

from quire.config.memory.kv_format import KV_FORMATS
from quire.config.memory.kv_layout import LayerFacts, block_bytes, group_layers
from quire.kernels.formats.kv_cache import split_memory
from quire.runner.kv_tensors import allocate_kv_tensors
from tests import tiers
from tests.cpu.encoder_decoder.seq2seq import T5
from tests.cpu.engine_of import TINY, WINDOWED, engine_of, request, run
from tests.cpu.same_bits import needs_same_bits

PER_TOKEN = ["int8_per_token_head", "fp8_per_token_head"]
CODED = [name for name, form in KV_FORMATS.items() if form.itemsize == 1]
SOURCED = {**T5, "is_encoder_decoder": True}
REQUESTS = [
    ("a", range(1, 30), 14, {}),
    ("b", range(1, 30), 14, {"temperature": 1.0, "n": 3}),
    ("c", range(5, 9), 24, {}),
    ("d", range(40, 90), 5, {}),
    ("e", range(1, 45), 9, {"temperature": 0.8, "n": 2}),
]
PATHS = {
    "in a batch": {},
    "in small chunks, two steps in flight": {"budget": 9, "depth": 2},
    "preempted": {"num_blocks": 30, "block_size": 4, "prefix": False, "max_len": 80},
    "preempted, with a host tier": {
        "num_blocks": 30, "block_size": 4, "host_blocks": 60, "depth": 2, "max_len": 80,
    },
}  # fmt: skip


def made(which=REQUESTS, source=()):
    return [request(name, list(p), n, source=source, **more) for name, p, n, more in which]


def answers(engine, source=()):
    """Tokens of all requests, the second time with prefix hits."""
    return run(engine, made(source=source), stagger=2)[0]


def alone(source=(), **setup):
    found = {}
    for one in REQUESTS:
        engine = engine_of(eager=True, prefix=False, **setup)
        found |= run(engine, made([one], source))[0]
    return found


@needs_same_bits
@pytest.mark.slow("an engine for each path")
@pytest.mark.parametrize(
    ("hf", "kv"),
    [
        (TINY, "int8_per_token_head"),
        (WINDOWED, "fp8_per_token_head"),
        *tiers.long(
            *((hf, kv) for hf in (TINY, WINDOWED) for kv in CODED),
        ),
    ],
)
def test_answers_are_the_same_on_every_path(hf, kv):
    want = alone(hf=hf, kv=kv)
    for name, setup in PATHS.items():
        engine = engine_of(hf=hf, kv=kv, **setup)
        assert answers(engine) == want, name
        stats = engine.stats()
        assert (stats.preemptions > 0) == ("preempted" in name), name
        assert (stats.host_loaded_blocks > 0) == ("host_blocks" in setup), name


@needs_same_bits
@pytest.mark.parametrize("kv", ["int8_per_token_head", *tiers.long("fp8_per_token_head")])
def test_answers_over_a_source_are_the_same_alone_and_in_a_batch(kv):
    source = list(range(3, 40))
    want = alone(source, hf=SOURCED, kv=kv)
    assert answers(engine_of(hf=SOURCED, kv=kv), source) == want
    assert answers(engine_of(hf=SOURCED, kv=kv, budget=45), source) == want


def logprobs_of_prompt(kv, dtype=torch.float32):
    """Of a prompt in two chunks, so that the second reads the cache."""
    engine = engine_of(kv=kv, dtype=dtype, budget=64)
    prompt = [(7 * i) % 97 for i in range(120)]
    _, updates = run(engine, [request("a", prompt, 1, prompt_logprobs=0)])
    found = [one for u in updates for one in u.prompt_logprobs or () if one is not None]
    return torch.tensor([one.values[0] for one in found])


@pytest.mark.parametrize(
    ("kv", "bound"),
    [
        ("int8_per_token_head", 0.04),
        ("fp8_per_token_head", 0.25),
        ("float8_e4m3fn", 0.3),
        ("float8_e5m2", 0.6),
    ],
)
def test_logprobs_are_near_those_of_a_cache_in_float32(kv, bound):
    want = logprobs_of_prompt("float32")
    off = (logprobs_of_prompt(kv) - want).abs().max()
    assert 0 < off < bound


def memory(engine):
    """The bytes of each place."""
    return [cache.view(torch.uint8) for cache in engine._executor.runner.worker._cache]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv", CODED)
@pytest.mark.parametrize("hf", [WINDOWED, *tiers.long(TINY)])
def test_free_memory_reaches_no_row(hf, kv):
    clean, spoilt = (engine_of(hf=hf, kv=kv, num_blocks=40, budget=24) for _ in range(2))
    for place in memory(spoilt):
        place.fill_(0xFF)  # a NaN in every float format
    assert answers(spoilt) == answers(clean)


@pytest.mark.parametrize("kv", PER_TOKEN)
def test_a_sequence_whose_scales_are_spoilt_ends_alone(kv):
    want = answers(engine_of(kv=kv, prefix=False))
    engine = engine_of(kv=kv, prefix=False)
    for one in made():
        engine.add(one)
    found, ends = {}, {}
    for number in range(200):
        seqs = {seq.request.id: seq for seq in engine._scheduler.sequences()}
        if number == 5:
            for place in engine._executor.runner.worker._cache:
                scales = split_memory(place, KV_FORMATS[kv], 8, 16)[1]
                scales[seqs["c"].tables[0][0]] = float("nan")
        for u in engine.step():
            found.setdefault(u[:2], []).extend(u.token_ids)
            if u.finish:
                ends[u[:2]] = u
    engine.shutdown()
    assert ends["c", 0].fault == "numbers"
    found.pop(("c", 0)), want.pop(("c", 0))
    assert found == want


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize(("size", "block"), [(128, 16), (80, 16), (20, 1), (18, 3), (64, 32)])
def test_the_plan_has_the_bytes_of_the_tensors(name, size, block):
    layers = [LayerFacts(3, size), LayerFacts(3, size, window=9), LayerFacts(3, size, window=9)]
    groups, form = group_layers(layers), KV_FORMATS[name]
    tensors = allocate_kv_tensors(layers, groups, num_blocks=5, block_size=block, form=form)
    assert sum(t.nbytes for t in tensors) == 5 * block_bytes(layers, groups, block, form)
    if form.per_token:
        codes, scales = split_memory(tensors[0], form, size, block)
        codes.zero_()
        scales.fill_(1.0)
        assert (codes.shape, scales.shape) == ((5, 2, 3, block, size), (5, 2, 3, block))
        assert not codes.float().any()
        assert bool((scales == 1).all())
        assert tensors[0][0].nbytes % 16 == 0


def test_a_scale_costs_four_bytes_a_token_and_head():
    layers = [LayerFacts(8, 128)]
    plain, scaled = (
        block_bytes(layers, group_layers(layers), 16, KV_FORMATS[name])
        for name in ("float8_e4m3fn", "int8_per_token_head")
    )
    assert scaled - plain == 16 * 2 * 8 * 4
