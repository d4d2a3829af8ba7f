"""What the ranks of a mesh compute adds up to what one rank computes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.config.facts import read_hf_config
from quire.config.head_cuts import can_cut
from quire.config.quant.fp8 import Fp8Format
from quire.distributed.collectives import SingleProcessCollectives, connect
from quire.distributed.mesh import Mesh, shard_range, uneven_shard_range
from quire.errors import ConfigError, WeightError
from quire.layers import Attention, ColumnLinear, Embedding, Linear, LMHead, QKVLinear, RowLinear
from quire.layers.linear import OutputGroup
from quire.layers.recurrent import SplitLinear, order_by_head
from quire.models.build import build_model, read_model_config
from quire.quant import fp8
from quire.weights.mapping import ParamTarget
from quire.weights.weight_loader import WeightLoader
from tests import tiers
from tests.cpu.models.harness import Stepper, Together
from tests.cpu.models.peers import VARIANTS, peer, prompt_of, tiny
from tests.cpu.tiny_models import write_model

EVERYDAY = [("llama", 4), ("deepseek_v3", 2), ("olmo2", 4)]
EVERYDAY += [("jamba", 2), ("bamba", 4), ("granitemoehybrid", 2), ("qwen3_5_text", 2), ("lfm2", 2)]
SIZES = (2, 3, 4, 6)


def sizes_of(variant):
    """Numbers of ranks that can share the layers of a variant."""
    _, config = read_model_config(tiny(variant)[0])
    heads = config.heads
    kv_heads = {heads if one.latent else one.kv_heads for one in config.attention_layers()}
    sizes = [n for n in SIZES if all(can_cut(heads, one, n) for one in kv_heads)]
    return [n for n in sizes if all(one.can_cut(n) for one in config.states)]


CASES = [(one, size) for one in tiers.amount((), VARIANTS) for size in sizes_of(one)]


def filled(make, whole, rank=0, tp=1):
    """The layer of one rank, filled from whole tensors as the loader does."""
    layer = make()
    if tp > 1:
        layer.shard(Mesh(tp=tp, rank=rank), SingleProcessCollectives())
    filler = WeightLoader(
        {"x": layer}, lambda _: None, dtype=torch.float32, device=torch.device("cpu")
    )
    targets = {name: ParamTarget("x", name, None, False) for name in whole}
    filler.load(targets, whole.items())
    return layer


def ranks(make, tp=2, bias=None):
    """(the whole layer, the layers of all ranks) over the same random weights."""
    layer = make()
    whole = {name: torch.randn(getattr(layer, name).shape) for name in layer.param_names()}
    return filled(make, whole), [filled(make, whole, rank, tp) for rank in range(tp)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_column_outputs_of_ranks_lie_side_by_side_within_each_part():
    whole, parts = ranks(lambda: ColumnLinear(8, (6, 10), bias=True))
    x = torch.randn(3, 8)
    first, second = whole(x).split([6, 10], dim=1)
    outs = [part(x).split([3, 5], dim=1) for part in parts]
    close(torch.cat([outs[0][0], outs[1][0]], 1), first)
    close(torch.cat([outs[0][1], outs[1][1]], 1), second)


def test_row_outputs_of_ranks_sum_up_with_the_bias_once():
    whole, parts = ranks(lambda: RowLinear(8, 5, bias=True))
    x = torch.randn(3, 8)
    close(parts[0](x[:, :4]) + parts[1](x[:, 4:]), whole(x))


def test_heads_of_ranks_lie_side_by_side():
    whole, parts = ranks(lambda: QKVLinear(8, 6, 2, 4, bias=True))
    x = torch.randn(3, 8)
    for i, want in enumerate(whole(x)):
        close(torch.cat([part(x)[i] for part in parts], 1), want)


def test_ranks_share_a_kv_head_when_there_are_fewer_heads_than_ranks():
    whole, parts = ranks(lambda: QKVLinear(8, 8, 2, 4), tp=4)
    x = torch.randn(3, 8)
    q, k, v = whole(x)
    for rank, part in enumerate(parts):
        got = part(x)
        close(got[0], q[:, 2 * rank : 2 * rank + 2])
        close(got[1], k[:, rank // 2][:, None])
        close(got[2], v[:, rank // 2][:, None])


def test_heads_in_another_order_in_the_checkpoint_come_to_their_ranks():
    sizes = {"inputs": 8, "heads": 4, "kv_heads": 2, "head_dim": 4, "bias": True}
    whole = {"weight": torch.randn(32, 8), "bias": torch.randn(32)}
    grouped = [2, 0, 1, 4, 6, 3, 5, 7]  # where our heads come to be in the checkpoint
    moved = {name: torch.empty_like(value) for name, value in whole.items()}
    for ours, theirs in enumerate(grouped):
        for name, value in whole.items():
            moved[name][4 * theirs : 4 * theirs + 4] = value[4 * ours : 4 * ours + 4]
    x = torch.randn(3, 8)
    for rank in range(2):
        want = filled(lambda: QKVLinear(**sizes), whole, rank, 2)(x)
        got = filled(lambda: QKVLinear(**sizes, head_order=grouped), moved, rank, 2)(x)
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)


def test_projections_in_the_order_of_heads_come_to_their_ranks():
    """Rows of four projections for each head, and scales of blocks of these rows."""
    order, groups = order_by_head(4, (2, 2, 4)), tuple(OutputGroup(4, n) for n in (2, 2, 4))
    ours = {"weight": torch.randn(32, 8)}
    theirs = {"weight": torch.empty(32, 8)}
    theirs["weight"][torch.tensor(order)] = ours["weight"]
    x = torch.randn(3, 8)
    for rank in range(2):
        want = filled(lambda: SplitLinear(8, groups), ours, rank, 2)(x)
        layer = filled(lambda: SplitLinear(8, groups, order=order), theirs, rank, 2)
        for one, other in zip(layer(x), want, strict=True):
            assert torch.equal(one, other)
    scales = torch.arange(16)[:, None]  # of two rows each
    layer = SplitLinear(8, groups, order=order)
    layer.set_quant_method(fp8.Method(Fp8Format(block=2)))
    found = layer.split_fused("weight_scale", scales)
    assert torch.cat(list(found)).flatten().tolist() == [one // 2 for one in order[::2]]
    with pytest.raises(WeightError, match="8 rows of weight_scale for 32 outputs"):
        layer.split_fused("weight_scale", scales[:8])


def test_scales_of_blocks_that_span_heads_in_another_order_are_refused():
    form = Fp8Format(static_activations=True, block=128)
    layer = QKVLinear(128, 4, 2, 64, head_order=range(8))
    layer.set_quant_method(fp8.Method(form))
    assert len(layer.split_fused("input_scale", torch.randn(3))) == 3  # one number for each part
    with pytest.raises(WeightError, match="4 rows of weight_scale, which the 8 heads do not"):
        layer.split_fused(form.scale, torch.randn(4, 1))


def test_vocabulary_strips_of_ranks_cover_an_odd_vocabulary():
    whole, parts = ranks(lambda: LMHead(7, 8))
    x = torch.randn(3, 8)
    close(torch.cat([part(x) for part in parts], 1), whole(x))
    whole, parts = ranks(lambda: Embedding(7, 8, scale=3.0))
    ids = torch.arange(7, dtype=torch.int32)
    close(parts[0](ids) + parts[1](ids), whole(ids))


def test_a_plain_linear_is_whole_on_every_rank():
    whole, parts = ranks(lambda: Linear(8, 5, bias=True))
    x = torch.randn(3, 8)
    for part in parts:
        close(part(x), whole(x))


def test_attention_keeps_its_share_of_heads():
    layer = Attention(8, 2, 16, alibi=range(8))
    layer.shard(Mesh(tp=4, rank=3))
    layer.place_constants(torch.float32, torch.device("cpu"))
    assert (layer.heads, layer.kv_heads, layer.alibi.tolist()) == (2, 1, [6, 7])


@pytest.mark.slow("a model of transformers, and as many of ours as ranks")
@pytest.mark.parametrize(
    ("variant", "size"), [*EVERYDAY, *tiers.long(*sorted({*CASES} - {*EVERYDAY}))]
)
def test_ranks_give_the_outputs_of_one(variant, size, tmp_path):
    peer(variant, tmp_path)
    check_ranks(tmp_path, size)


@pytest.mark.parametrize("size", [4, *tiers.long(6, 8, 14)])
def test_ranks_share_the_queries_of_a_kv_head_unevenly(size, tmp_path):
    """Heads as Qwen2.5-0.5B has them; widths that do not divide either."""
    odd = {"num_attention_heads": 14, "hidden_size": 112, "intermediate_size": 100}
    write_model(tmp_path, "qwen2", **odd)
    check_ranks(tmp_path, size)


def check_ranks(folder, size):
    """Each rank of a mesh has the logits of one rank."""
    model_type, config = read_model_config(read_hf_config(folder))
    settings = {"folder": folder, "dtype": torch.float32, "progress": False}
    ids = prompt_of(70, config.vocab)
    want = Stepper(build_model(model_type, config, **settings), config).logits(ids)
    together = Together(size)

    def rank_main(rank):
        mesh = Mesh(tp=size, rank=rank)
        try:
            model = build_model(model_type, config, mesh=mesh, comm=together.of(rank), **settings)
            stepper = Stepper(model, config)
            return torch.cat([stepper.logits(ids[:50]), stepper.logits(ids[50:])])
        except Exception:
            together.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(rank_main, rank) for rank in range(size)]
    for rank in ranks:
        torch.testing.assert_close(rank.result(), want, atol=1e-4, rtol=1e-4)


def test_several_ranks_are_refused_until_there_are_processes():
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2"):
        connect(Mesh(tp=2))
    assert isinstance(connect(Mesh()), SingleProcessCollectives)


def test_the_mesh_has_sizes_and_ranks():
    mesh = Mesh(tp=2, pp=3, dp=2, rank=9)
    assert (mesh.size, mesh.tp_rank, mesh.pp_rank) == (12, 1, 1)
    for wrong in ({"tp": 0}, {"rank": 1}, {"tp": 2, "rank": -1}):
        with pytest.raises(ConfigError):
            Mesh(**wrong)


def test_shares_that_do_not_divide_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="4 does not divide the 6 attention heads"):
        shard_range(6, Mesh(tp=4), what="attention heads")
    assert [list(uneven_shard_range(7, Mesh(tp=2, rank=r))) for r in range(2)] == [
        [0, 1, 2, 3],
        [4, 5, 6],
    ]
