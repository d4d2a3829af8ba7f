"""KV tensors cost nothing until written, and can be given back."""

import psutil

from quire.config.memory.kv_format import KV_FORMATS
from quire.config.memory.kv_layout import LayerFacts, group_layers
from quire.runner.kv_tensors import allocate_kv_tensors, release_pages

MIB = 2**20


def resident():
    return psutil.Process().memory_info().rss


def tensors_of(blocks):
    layers = [LayerFacts(2, 64)] * 4
    return allocate_kv_tensors(
        layers, group_layers(layers), num_blocks=blocks, block_size=16, form=KV_FORMATS["bfloat16"]
    )


def test_memory_is_taken_when_written_and_goes_back_when_forgotten():
    before = resident()
    tensors = tensors_of(blocks=16384)  # 128 MiB each
    assert [tuple(t.shape) for t in tensors] == [(16384, 2, 2, 16, 64)] * 4
    assert resident() - before < 32 * MIB
    for tensor in tensors:
        tensor.fill_(1.0)
    assert resident() - before > 400 * MIB
    release_pages(tensors)
    assert resident() - before < 64 * MIB
    tensors[0][5].fill_(2.0)
    assert tensors[0][5].float().mean() == 2.0


def test_a_cache_of_no_blocks_is_no_cache():
    tensors = tensors_of(blocks=0)
    assert all(t.shape[0] == 0 for t in tensors)
    release_pages(tensors)


def test_layers_of_unlike_shape_share_one_group_with_places_of_their_own():
    layers = [LayerFacts(2, 64), LayerFacts(1, 32, window=8)]
    groups = group_layers(layers)
    tensors = allocate_kv_tensors(
        layers, groups, num_blocks=3, block_size=4, form=KV_FORMATS["float32"]
    )
    assert [tuple(t.shape) for t in tensors] == [(3, 2, 2, 4, 64), (3, 2, 1, 4, 32)]
