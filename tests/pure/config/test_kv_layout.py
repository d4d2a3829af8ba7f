"""Groups of equal size, and what a sequence holds."""

from hypothesis import given
from hypothesis import strategies as st

from quire.config.memory.kv_format import KV_FORMATS
from quire.config.memory.kv_layout import (
    KVCacheGroup,
    LayerFacts,
    block_bytes,
    group_layers,
    max_blocks_held,
)


def layers(*windows):
    return [LayerFacts(2, 64, w) for w in windows]


def test_layers_that_are_alike_are_one_group():
    assert group_layers(layers(None, None)) == (KVCacheGroup(None, (0, 1)),)
    assert group_layers(layers(128, 128)) == (KVCacheGroup(128, (0, 1)),)


def test_kinds_are_cut_to_the_size_of_the_smaller():
    assert group_layers(layers(8, 8, None, 8, 8, None)) == (
        KVCacheGroup(None, (2, 5)),
        KVCacheGroup(8, (0, 1)),
        KVCacheGroup(8, (3, 4)),
    )


def test_kinds_of_nearly_one_size_are_padded_instead():
    groups = group_layers(layers(*[8] * 13, *[None] * 11))
    assert [len(g.layers) for g in groups] == [11, 13]


def test_shapes_that_differ_share_one_table():
    facts = [LayerFacts(2, 64, 8), LayerFacts(1, 64)]
    assert group_layers(facts) == (KVCacheGroup(None, (0, 1)),)
    assert block_bytes(facts, group_layers(facts), 16, KV_FORMATS["bfloat16"]) == 16 * 2 * sum(
        2 * one.kv_heads * one.head_dim for one in facts
    )


def test_one_table_can_be_requested():
    assert group_layers(layers(8, None), hybrid=False) == (KVCacheGroup(None, (0, 1)),)


@given(st.lists(st.sampled_from([None, 16, 64]), min_size=1, max_size=40))
def test_every_layer_is_in_one_group_and_groups_have_one_window(windows):
    facts = layers(*windows)
    groups = group_layers(facts)
    assert sorted(i for g in groups for i in g.layers) == list(range(len(facts)))
    assert all(facts[i].window == g.window for g in groups for i in g.layers)
    size = max(len(g.layers) for g in groups)
    assert block_bytes(facts, groups, 16, KV_FORMATS["bfloat16"]) == size * 2 * 2 * 64 * 16 * 2


def test_a_window_group_holds_the_window_and_the_chunk():
    full, window = KVCacheGroup(None, (0,)), KVCacheGroup(100, (1,))
    assert max_blocks_held((full,), 1000, 16, 1) == 63
    assert max_blocks_held((window,), 1000, 16, 1) == 8
    assert max_blocks_held((window,), 50, 16, 64) == 4
    assert max_blocks_held((full, window), 1000, 16, 1) == 71
