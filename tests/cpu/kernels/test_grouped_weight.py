"""Codes of two to eight bits: packing loses nothing, and every way to the values agrees."""

from dataclasses import replace

import pytest
import torch

from quire.kernels.formats.grouped_weight import PLANES, pack_plane, pack_planes, unpack_plane
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.grouped_linear import one_expert, pack, pack_experts, random_codes
from quire.kernels.moe_experts import ExpertActivation

pytestmark = pytest.mark.usefixtures("seeded")
CPU = torch.device("cpu")


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("inputs", [1, 7, 64, 129])
def test_a_plane_gives_its_values_back(bits, inputs):
    values = torch.randint(0, 1 << bits, (3, 5, inputs), dtype=torch.uint8)
    packed = pack_plane(values, bits)
    assert packed.shape == (3, 5, -(-inputs * bits // 8))
    assert torch.equal(unpack_plane(packed, bits)[..., :inputs], values)


@pytest.mark.parametrize("bits", sorted(PLANES))
def test_a_packed_weight_has_the_values_of_its_codes(bits):
    for codes in random_codes(33, 96, bits, 32, CPU):
        weight = pack_planes(codes, torch.float32)
        assert weight.shape == (33, 96)
        assert torch.equal(weight.dequantize(), codes.dequantize())
        assert weight.planes[0].nbytes * 8 // PLANES[bits][0] == 33 * 96


def test_values_are_what_the_definition_says():
    q = torch.tensor([[0, 3, 1, 2]], dtype=torch.uint8)
    scale = GroupFactors(torch.tensor([[0.5]]), torch.tensor([[2, 4]], dtype=torch.uint8))
    zero, offset = torch.tensor([[1, 2]], dtype=torch.uint8), GroupFactors(torch.tensor([[8.0]]))
    codes = WeightCodes(q=q, bits=2, group=2, scale=scale, zero=zero, offset=offset)
    assert codes.dequantize().tolist() == [[8 - 1, 8 + 2, 8 - 2, 8 + 0]]
    turned = replace(codes, perm=torch.tensor([2, 0, 3, 1], dtype=torch.int32))
    assert turned.dequantize().tolist() == [[10, 8, 7, 6]]
    table = torch.tensor([-1.0, 0.0, 5.0, 7.0])
    named = WeightCodes(q=q, bits=2, group=2, table=table, scale=scale)
    assert named.dequantize().tolist() == [[-1, 7, 0, 10]]


def test_rows_and_products_and_experts_are_those_of_the_plain_matrix():
    for codes in random_codes(24, 64, 4, 16, CPU):
        weight, plain = pack(codes, torch.float32), codes.dequantize()
        x, bias = torch.randn(5, 64), torch.randn(24)
        torch.testing.assert_close(weight.product(x, bias), x @ plain.t() + bias)
        ids = torch.tensor([3, 3, 0], dtype=torch.int32)
        torch.testing.assert_close(weight.rows(ids, 2.0), plain[ids.long()] * 2)


def test_a_bank_is_its_experts():
    up, down = (next(iter(random_codes(4 * n, 32, 4, 32, CPU))) for n in (64, 32))
    up, down = (
        replace(
            one,
            q=one.q.unflatten(0, (4, -1)),
            scale=GroupFactors(one.scale.values.unflatten(0, (4, -1))),
        )
        for one in (up, down)
    )
    banks = [pack_experts(one, torch.float32) for one in (up, down)]
    assert torch.equal(banks[0][2].dequantize(), one_expert(up, 2).dequantize())
    assert torch.equal(banks[0].dequantize(), up.dequantize())
    x, ids = torch.randn(3, 32), torch.tensor([[0, 2], [3, 1], [2, 3]], dtype=torch.int32)
    shares, gate = torch.rand(3, 2), ExpertActivation()
    got = banks[0].mlp(x, ids, shares, banks[1], gate)
    for t in range(3):
        want = sum(
            w * (gate(up.dequantize()[i] @ x[t]) @ down.dequantize()[i].t())
            for i, w in zip(ids[t].tolist(), shares[t])
        )
        torch.testing.assert_close(got[t], want)
