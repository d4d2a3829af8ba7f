"""Ranks share heads and widths: each has some, and none is left out."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.facts import model_facts
from quire.config.head_cuts import can_cut, rank_heads, require_layer_cuts
from quire.distributed.mesh import Mesh, shard_range, width_range
from quire.errors import ConfigError

QWEN_05B = {"model_type": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2}
SIZES = {"hidden_size": 896, "num_hidden_layers": 2, "vocab_size": 300, "intermediate_size": 4864}


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_each_query_head_is_on_one_rank_beside_its_kv_head(kv_heads, each, ranks, sharing):
    heads, ranks = kv_heads * each, ranks * kv_heads if sharing else ranks
    if not can_cut(heads, kv_heads, ranks):
        with pytest.raises(ConfigError, match=f"num_attention_heads is {heads} and num_key_value"):
            rank_heads(heads, kv_heads, ranks, 0)
        return
    cut = [rank_heads(heads, kv_heads, ranks, rank) for rank in range(ranks)]
    assert list(chain(*cut)) == list(range(heads))
    sizes = {len(mine) for mine in cut}
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 1
    for rank, mine in enumerate(cut):
        kv = shard_range(kv_heads, Mesh(tp=ranks, rank=rank), what="heads", repeat=True)
        assert {head // each for head in mine} == set(kv)
        assert len(mine) % len(kv) == 0, "kernels need as many queries for each"


@given(st.integers(1, 500), st.integers(1, 12), st.sampled_from([1, 2, 8, 32, 48, 128]))
def test_widths_are_cut_in_blocks_as_evenly_as_they_can_be(total, ranks, block):
    meshes = [Mesh(tp=ranks, rank=rank) for rank in range(ranks)]
    if -(-total // block) < ranks:
        with pytest.raises(ConfigError, match=f"a width of {total} has"):
            width_range(total, meshes[0], block)
        return
    cut = [width_range(total, mesh, block) for mesh in meshes]
    assert list(chain(*cut)) == list(range(total))
    assert all(len(mine) for mine in cut)
    assert not any(mine.start % block for mine in cut)
    if total % (ranks * block) == 0:
        assert {len(mine) for mine in cut} == {total // ranks}


def test_the_error_names_heads_and_the_sizes_that_work():
    facts = model_facts(QWEN_05B | SIZES, name="Qwen2.5-0.5B")
    for ranks in (1, 2, 4, 14):
        require_layer_cuts(facts.heads, facts.layers, ranks)
    with pytest.raises(ConfigError) as caught:
        require_layer_cuts(facts.heads, facts.layers, 3)
    assert str(caught.value) == (
        "tensor_parallel_size=3 cannot cut this model: num_attention_heads is 14 and "
        "num_key_value_heads is 2; sizes that work: 1, 2, 4, 6, 8, 10, 12, 14"
    )
