"""The references are the oracle of everything else, so they are held to plain formulas here."""

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.formats.packed_weight import PackedWeight, pack_panels
from quire.kernels.framework.op import OPS
from quire.kernels.moe_experts import multiply_all_experts
from quire.kernels.paged_attention import _case, paged_attention
from tests.op_cases import all_ops

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (33, 101), (1, 2), (70, 7)])
def test_unpacking_a_packed_weight_gives_the_weight_back(shape, dtype):
    weight = torch.randn(shape).to(dtype)
    packed = pack_panels(weight)
    assert isinstance(packed, PackedWeight)
    assert torch.equal(packed.dequantize(), weight)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("rows", [(1, 1), (1, 40), (17, 17), (9, 300)])
def test_paged_attention_of_one_sequence_is_plain_attention(heads, rows):
    (h, k), (queries, context) = heads, rows
    case = _case(torch.device("cpu"), (h, k, 32, 16), [rows], torch.float32)
    blocks = case["cache"][case["tables"][0, : -(-context // 16)].long()]
    both = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
    mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
    want = F.scaled_dot_product_attention(
        case["q"].transpose(0, 1)[None], both[0][None], both[1][None], mask, enable_gqa=True
    )[0].transpose(0, 1)
    got = OPS["paged_attention"].reference(**case)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_window_as_long_as_the_context_changes_nothing():
    case = _case(torch.device("cpu"), (4, 2, 32, 16), [(5, 60), (1, 9)], torch.float32)
    reference = OPS["paged_attention"].reference
    assert torch.equal(reference(**case), reference(**{**case, "window": 60}))


def test_a_window_of_one_returns_the_own_value():
    case = _case(torch.device("cpu"), (2, 2, 32, 16), [(3, 60)], torch.float32)
    got = paged_attention(**{**case, "window": 1})
    last = case["cache"][case["tables"][0, 59 // 16], 1, :, 59 % 16]
    torch.testing.assert_close(got[-1], last)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", all_ops())
def test_every_reference_runs_its_cases_in_their_dtype(name):
    for case in OPS[name].cases(torch.device("cpu")):
        OPS[name].reference(**case)


def test_all_experts_give_what_the_chosen_ones_do():
    for case in OPS["moe_experts"].cases(torch.device("cpu")):
        given = dict(case)
        given.pop("absent", None)
        biases = given.pop("gate_up_bias", None), given.pop("down_bias", None)
        got = multiply_all_experts(**given, biases=biases)
        torch.testing.assert_close(
            got.float(), OPS["moe_experts"].reference(**case).float(), atol=4e-2, rtol=4e-2
        )
