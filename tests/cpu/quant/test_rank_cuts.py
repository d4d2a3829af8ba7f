"""Ranks that cut inside of blocks which share a scale or a word: the outputs of one rank.

Widths are multiples of the blocks, and their shares are not; heads do not divide evenly either.
"""

import pytest
import torch

from quire.distributed.collectives import SingleProcessCollectives
from quire.distributed.mesh import Mesh
from quire.errors import ConfigError
from quire.layers import Linear
from tests import tiers
from tests.cpu.quant.oracle import check_ranks, tiny, write_pair
from tests.cpu.quant.stored_formats import ALL, FORMATS, SIDES, WITH_OUTLIERS

pytestmark = pytest.mark.sampled(2)

MODELS = ("llama", "phi3", "qwen3_moe", "deepseek_v2")
EVERYDAY = [("gptq", "llama", 4), ("compressed w4 group asymmetric", "qwen3_moe", 2)]
EVERYDAY += [("compressed fp8 block", "llama", 2), ("compressed w4 group asymmetric", "phi3", 4)]


def can_be_made(name, model, tp):
    experts = model in ("qwen3_moe", "deepseek_v2")
    latent = model == "deepseek_v2" and (name in SIDES or name == "gptq 3")
    return not (latent or (experts and (tp == 4 or name in WITH_OUTLIERS)))


CELLS = [
    (name, model, tp) for name in ALL for model in MODELS for tp in (2, 3, 4)
    if can_be_made(name, model, tp)
]  # fmt: skip


def pair_of(folder, name, model, tp):
    quantize, config = ALL[name]()
    unit = 128 if name in SIDES else 32
    changes = {"intermediate_size": 5 * unit, "moe_intermediate_size": 5 * unit, "vocab_size": 130}
    if model == "deepseek_v2":
        changes |= {"num_attention_heads": 6 if tp == 3 else 4}
        return write_pair(folder, tiny(model, 64, **changes), quantize, config)
    heads = {2: (6, 2), 3: (6, 3), 4: (6, 2)}[tp]
    changes |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    changes |= {"head_dim": unit // 2 if tp != 3 else unit}
    if name in SIDES:
        changes |= {"head_dim": unit}
    return write_pair(folder, tiny(model, 2 * unit, **changes), quantize, config)


def check_parts(pair, tp):
    """The weights of all ranks are those of one, cut."""
    whole, _ = pair.build(pair.folder)
    layers = dict(whole.named_modules())
    for rank in range(tp):
        comm = SingleProcessCollectives()
        model, _ = pair.build(pair.folder, mesh=Mesh(tp=tp, rank=rank), comm=comm)
        for name, layer in model.named_modules():
            if not isinstance(layer, Linear):
                continue
            want = layers[name].weight.dequantize(torch.float32)
            sizes = [out.rows for out in layer.outputs]
            columns = layer.rank_columns()
            parts = zip(want.split(sizes), layer.rank_rows(), strict=True)
            want = torch.cat([part[rows.start : rows.stop] for part, rows in parts])
            want = want[:, columns.start : columns.stop]
            torch.testing.assert_close(layer.weight.dequantize(torch.float32), want)


@pytest.mark.slow("a model and ranks of it")
@pytest.mark.parametrize(
    ("name", "model", "tp"), [*EVERYDAY, *tiers.long(*sorted({*CELLS} - {*EVERYDAY}))]
)
def test_ranks_compute_what_one_does(tmp_path, name, model, tp):
    pair = pair_of(tmp_path, name, model, tp)
    check_parts(pair, tp)
    if name in FORMATS:  # elsewhere rows are rounded by what a rank has of them
        check_ranks(pair, tp)


def test_fewer_blocks_than_ranks_share_an_expert_are_refused(tmp_path):
    pair = pair_of(tmp_path, "compressed w4 group", "qwen3_moe", 2)
    with pytest.raises(ConfigError, match="use at most 5, or for experts enable_expert_parallel"):
        pair.build(pair.folder, mesh=Mesh(tp=6), comm=SingleProcessCollectives())
