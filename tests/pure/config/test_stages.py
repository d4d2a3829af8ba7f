"""Pipeline stages: layers are cut by the bytes of their weights, and the cache with them."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.memory.kv_layout import (
    LayerFacts,
    group_layers,
    groups_of_stage,
    place_layers,
    stage_ranges,
)
from quire.config.stages import cut_evenly
from quire.errors import ConfigError
from tests.pure.config.test_resolve import BERT, HF, TINY, cpu, run

T5 = {
    "model_type": "t5", "is_encoder_decoder": True, "d_model": 64, "d_kv": 16, "d_ff": 128,
    "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": 100,
    "decoder_start_token_id": 0,
}  # fmt: skip
FOUR = replace(cpu(), count=4)


def sums(sizes, counts):
    return [sum(sizes[one.start : one.stop]) for one in stage_ranges(counts)]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_the_heaviest_stage_is_as_light_as_any_cut_allows(sizes, data):
    stages = data.draw(st.integers(1, len(sizes)))
    counts = cut_evenly(sizes, stages)
    assert len(counts) == stages
    assert sum(counts) == len(sizes)
    assert min(counts) >= 1
    every = [
        [b - a for a, b in zip((0, *cuts), (*cuts, len(sizes)))]
        for cuts in combinations(range(1, len(sizes)), stages - 1)
    ]
    best = min((max(own), sum(x * x for x in own)) for own in (sums(sizes, one) for one in every))
    own = sums(sizes, counts)
    assert (max(own), sum(x * x for x in own)) == best


def test_embedding_and_head_weigh_as_layers_do():
    """Of a small model with a large vocabulary, the middle stages get most layers."""
    hf = TINY | {"num_hidden_layers": 20, "tie_word_embeddings": False}
    plain = run(hf, FOUR, pipeline_parallel_size=4).config.parallel
    wide = run(hf | {"vocab_size": 50 * hf["vocab_size"]}, FOUR, pipeline_parallel_size=4).config
    assert sum(plain.stage_layers) == sum(wide.parallel.stage_layers) == 20
    first, *middle, last = wide.parallel.stage_layers
    assert max(first, last) < min(middle)
    assert (plain.stages, plain.ranks, plain.sampling_ranks) == (4, 4, [range(3, 4)])


def test_a_stage_is_given_by_hand():
    hf = HF | {"num_hidden_layers": 7}
    made = run(hf, FOUR, pipeline_parallel_size=3, pipeline_layers="2, 4,1")
    assert made.config.parallel.stage_layers == (2, 4, 1)
    for wrong in ("2,4", "2,4,2", "7,0,0", "a,b,c", "3,4,-0"):
        with pytest.raises(ConfigError, match=r"pipeline_layers .*3 numbers.*sum is 7"):
            run(hf, FOUR, pipeline_parallel_size=3, pipeline_layers=wrong)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"3, and the model has 2 layers .*at most 2"):
        run(HF | {"num_hidden_layers": 2}, FOUR, pipeline_parallel_size=3)


@pytest.mark.parametrize("hf", [BERT, T5])
def test_models_with_an_encoder_are_refused(hf):
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2: models with an encoder"):
        run(hf, FOUR, pipeline_parallel_size=2)


def test_programs_that_torchrun_starts_have_no_stages():
    with pytest.raises(ConfigError, match=r"external_launcher.*no pipeline stages; use 'mp'"):
        run(TINY, FOUR, pipeline_parallel_size=2, distributed_executor_backend="external_launcher")


def test_stages_and_ranks_need_devices():
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 x pipeline_parallel_size=3"):
        run(HF, FOUR, pipeline_parallel_size=3, tensor_parallel_size=2)


def test_a_stage_holds_its_layers_alone():
    """The cache of a half has twice the blocks; the plan is that of the tightest stage."""
    sizes = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": 512}
    hf = HF | {"num_hidden_layers": 8}
    whole, half = run(hf, FOUR, **sizes), run(hf, FOUR, pipeline_parallel_size=2, **sizes)
    assert half.config.cache.num_blocks == 2 * whole.config.cache.num_blocks
    assert half.plan.weight_bytes < whole.plan.weight_bytes
    assert len(half.config.cache.layers) == 8, "the scheduler's cache is that of the model"
    assert half.config.scheduler.steps_in_flight == 3
    uneven = run(hf, FOUR, pipeline_parallel_size=2, pipeline_layers="6,2", **sizes)
    assert uneven.config.cache.num_blocks == whole.config.cache.num_blocks * 8 // 6
    host = {"kv_offloading_size": 1.0}
    blocks = [run(hf, FOUR, **more, **host).plan.num_host_blocks for more in ({}, {"pp": 2})]
    assert blocks[0] == blocks[1], "the size is that of all ranks together"


@given(st.lists(st.sampled_from([None, 16]), min_size=1, max_size=24), st.data())
def test_each_stage_has_an_equal_part_of_each_group(windows, data):
    layers = [LayerFacts(2, 8, window) for window in windows]
    groups = group_layers(layers, dealt=True)
    assert sorted(i for group in groups for i in group.layers) == [*range(len(layers))]
    assert all(windows[i] == group.window for group in groups for i in group.layers)
    assert len(groups) == len(group_layers(layers))
    start = data.draw(st.integers(0, len(layers) - 1))
    stage = range(start, data.draw(st.integers(start + 1, len(layers))))
    own = groups_of_stage(groups, stage)
    for window in {None, 16}:
        counts = [len(group.layers) for group in own if group.window == window]
        assert not counts or max(counts) - min(counts) <= 1
    assert len(place_layers(layers[stage.start : stage.stop], own)) <= len(stage)


def test_half_of_the_layers_take_half_of_the_places():
    """Of a model with a full layer after each five with a window."""
    layers = [LayerFacts(2, 8, window) for window in (*[16] * 5, None) * 4]
    for dealt, places in ((True, 2), (False, 4)):
        groups = group_layers(layers, dealt=dealt)
        assert {len(group.layers) for group in groups} == {4}
        own = groups_of_stage(groups, range(12))
        assert len(place_layers(layers[:12], own)) == places
