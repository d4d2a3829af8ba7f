"""A rank's share of e4m3 weights has its share of the scales."""

import torch

from quire.distributed.collectives import SingleProcessCollectives
from quire.distributed.mesh import Mesh
from tests.cpu.quant.checkpoints import CHANNELS, load, quantized


def of_rank(folder, rank, said, style):
    (folder / str(rank)).mkdir()
    mesh = Mesh() if rank is None else Mesh(tp=2, rank=rank)
    comm = None if rank is None else SingleProcessCollectives()
    return load(folder / str(rank), quantized(style), said, mesh=mesh, comm=comm).layers[0]


def test_columns_cut_the_scales_and_rows_keep_them(tmp_path):
    whole, *ranks = (of_rank(tmp_path, rank, CHANNELS, {"channel": 2}) for rank in (None, 0, 1))
    for rank, layer in enumerate(ranks):
        mine = slice(64 * rank, 64 * (rank + 1))
        up, want = layer.self_attn.qkv_proj.weight, whole.self_attn.qkv_proj.weight
        rows = torch.cat([torch.arange(128)[mine] + 128 * part for part in range(3)])
        assert torch.equal(up.scale, want.scale[rows])
        assert torch.equal(up.data.float(), want.data.float()[rows])
        down, want = layer.self_attn.o_proj.weight, whole.self_attn.o_proj.weight
        assert torch.equal(down.scale, want.scale)
        assert torch.equal(down.data.float(), want.data.float()[:, mine])
