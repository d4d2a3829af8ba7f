"""Products of 4 bits and many rows by the Gluon kernel of tiles, whose body runs as Python here."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from quire.kernels.formats.tiled_weight import pack_tiles
from tests import tiers
from tests.cpu.gpu_kernels import gluon_on_torch, gluon_partitions
from tests.cpu.gpu_kernels.test_grouped_linear import check, codes_of

pytest.importorskip("triton.experimental.gluon", reason="Triton with Gluon is not installed")


def decode_half(words, scale, minus, x, half, layout):
    """What the assembly does."""
    slices = [words.int() >> (8 * half + at) & 15 for at in (0, 4)]
    return torch.cat([(128 + q) * scale + minus for q in slices], 1).to(x.data.dtype)


@pytest.fixture
def in_python(monkeypatch):
    """The kernel runs as Python, on a device of six multiprocessors."""
    from quire.kernels.gpu.linear import grouped_gemm_tiles as tiles

    body = tiles._grouped_gemm_tiles
    functions = {
        "launch_dependents": lambda: None,
        "wait_for_previous_kernel": lambda: None,
        "float_of": lambda raw, form: raw.float(),
        "_decode_half": decode_half,
        "BLOCK": tiles.BLOCK.value,
    }

    def launch(grid, tensors, numbers, consts, pdl, tiles, maxnreg):
        gluon_on_torch.run(
            body, grid, tensors, numbers, consts, functions, tiles, gluon_partitions.language
        )

    monkeypatch.setattr(tiles, "_grouped_gemm_tiles", launch)
    monkeypatch.setattr(tiles, "sm_count", lambda device: 6)
    return tiles


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        ((32, 1, False, 2), 70),
        ((32, 2, True, 2), 40),
        *tiers.long(
            ((8, 1, False, 3), 50),
            ((32, 2, False, 2), 11),
            ((64, 3, False, 2), 100),
        ),
    ],
)
def test_each_tile_and_part_is_multiplied_once(plan, rows, in_python):
    torch.manual_seed(1)
    outputs, inputs = 512, 6 * 128
    weight = pack_tiles(codes_of(outputs, inputs, 4, 128, 1), torch.bfloat16)
    weight = replace(weight, perm=None)
    x, bias = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs).bfloat16()
    y = torch.full((rows, outputs), float("nan")).bfloat16()
    in_python.launch(y, x, weight, bias, in_python.GroupedTilesPlan(*plan))
    check(y, x, weight, bias)
    assert not weight.counters.any()


def test_a_plan_fits_the_weight_and_changes_at_multiples_of_128_rows():
    from quire.kernels.gpu.linear import grouped_gemm_tiles as tiles

    for outputs, inputs in ((6144, 4096), (384, 1024), (28672, 4096), (4096, 14336)):
        weight = SimpleNamespace(shape=(outputs, inputs), blocks=inputs // 128)
        for rows in (65, 127, 128, 129, 300, 385, 512, 640, 1000, 2048):
            plan = tiles.plan_grouped_tiles(rows, weight, 132)
            assert plan == tiles.plan_grouped_tiles(-(-rows // 128) * 128, weight, 132)
            assert weight.blocks % plan.parts == 0
            assert weight.blocks // plan.parts >= plan.stages
            assert plan.parts == 1 or rows <= 8 * plan.rows
