"""Every compiled kernel against its reference, and the promises about bits."""

import platform

import pytest
import torch

from quire.kernels import (
    act,
    copy_blocks,
    embedding,
    encoder_attention,
    linear,
    moe_router,
    paged_attention,
    rms_norm,
)
from quire.kernels.formats.packed_weight import PackedWeight, pack_panels
from quire.kernels.framework.op import OPS
from tests.op_cases import all_ops, copied, written_cache, written_state

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
NATIVE = [name for name in all_ops() if OPS[name].native]

pytestmark = pytest.mark.usefixtures("seeded", "poisoned")


def tensors(result):
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


def run(body, case):
    """The results of one body, the cache included where it is written."""
    case = copied(case)
    out = body(**case)
    if out is NotImplemented:
        return None
    return (tensors(out) or written_cache(case)) + written_state(case)


def agree(op):
    """Compare native and reference over the cases; the number the native body took."""
    taken = 0
    for case in op.cases(CPU):
        got, want = run(op.native, case), run(op.reference, case)
        taken += got is not None
        for g, w in zip(got or (), want):
            tol = 1e-4 if g.dtype == FP32 else op.atol
            if g.element_size() == 1:  # codes: torch compares no 8-bit floats
                g, w, tol = g.float(), w.float(), 0
            torch.testing.assert_close(g, w, atol=tol, rtol=tol, equal_nan=True)
    return taken


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", NATIVE)
def test_a_kernel_agrees_with_its_reference(name):
    assert agree(OPS[name]) >= 2


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.long("compiles the library for lesser CPUs: `make isa` runs it")
@pytest.mark.parametrize("narrow", ["sse2", "avx2", "avx512"], indirect=True)
def test_kernels_for_lesser_cpus_agree_too(narrow, request):
    wanted = request.node.callspec.params["narrow"]
    assert narrow.features == {"sse2": "generic"}.get(wanted, wanted)
    for name in NATIVE:
        assert agree(OPS[name]) >= 2, name


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", [(64, 64), (33, 101), (1, 2), (70, 7), (512, 96)])
def test_native_packing_equals_the_plain_packing(shape, dtype):
    weight = torch.randn(shape).to(dtype)
    packed = linear.pack(weight)
    assert isinstance(packed, PackedWeight)
    assert torch.equal(packed.data, pack_panels(weight).data)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (101, 70), (1040, 130)])
def test_linear_gives_a_row_the_same_bits_whatever_the_rows_beside_it(inputs, outputs, dtype):
    weight = linear.pack((torch.randn(outputs, inputs) / inputs**0.5).to(dtype))
    x = torch.randn(70, inputs).to(dtype)
    want = weight.dequantize().float()
    alone = torch.cat([linear.linear(x[i : i + 1], weight) for i in range(70)])
    tol = 1e-4 if dtype == FP32 else 2e-2
    torch.testing.assert_close(alone.float(), x.float() @ want.T, atol=tol, rtol=tol)
    for rows in range(1, 71):
        assert torch.equal(linear.linear(x[:rows], weight), alone[:rows]), rows


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_row_is_routed_alike_whatever_the_rows_beside_it(dtype):
    x, weight = torch.randn(70, 101).to(dtype), (torch.randn(30, 101) / 10).to(dtype)
    routing = moe_router.RoutingMethod(4, renormalise=True, groups=5, top_groups=2)
    whole = moe_router.moe_router(x, weight, routing)
    for rows in (x[:1], x[3:4], x[:7], x[5:64]):
        at = (rows.data_ptr() - x.data_ptr()) // (x.stride(0) * x.element_size())
        for got, want in zip(moe_router.moe_router(rows, weight, routing), whole, strict=True):
            assert torch.equal(got, want[at : at + len(rows)])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_equal_scores_and_nan_choose_the_first_experts(score):
    routing = moe_router.RoutingMethod(3, score)
    x = torch.zeros(2, 16)
    x[1, 0] = torch.nan
    ids, weights = moe_router.moe_router(x, torch.randn(9, 16), routing)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert weights[1].isnan().all()
    assert weights[0].isfinite().all()


@pytest.mark.usefixtures("native")
def test_linear_reads_rows_that_are_far_apart():
    weight = linear.pack(torch.randn(64, 32))
    wide = torch.randn(9, 100)
    got = linear.linear(wide[:, 40:72], weight)
    assert torch.equal(got, linear.linear(wide[:, 40:72].contiguous(), weight))


@pytest.mark.usefixtures("native")
def test_linear_of_more_rows_than_a_block_of_them():
    weight = linear.pack(torch.randn(40, 18).bfloat16())
    x = torch.randn(2500, 18).bfloat16()
    want = torch.cat([linear.linear(part, weight) for part in x.split(500)])
    assert torch.equal(linear.linear(x, weight), want)


@pytest.mark.usefixtures("native")
def test_no_rows_give_no_rows():
    weight = linear.pack(torch.randn(64, 32))
    assert linear.linear(torch.empty(0, 32), weight).shape == (0, 64)
    assert rms_norm.rms_norm(torch.empty(0, 32), torch.ones(32), 1e-6)[0].shape == (0, 32)


def attention_of_last(case, count):
    """The same sequences, asking only for the last `count` rows of each that has as many."""
    starts, rows, keep = case["q_starts"].tolist(), [], []
    for s in range(len(starts) - 1):
        n = min(count, starts[s + 1] - starts[s])
        keep += range(starts[s + 1] - n, starts[s + 1])
        rows.append(n)
    q_starts = torch.tensor([0, *rows]).cumsum(0).int()
    return {**case, "q": case["q"][keep], "q_starts": q_starts}, keep


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("window", "features"),
    [(None, ""), (70, ""), (None, "alibi"), (None, "int8_token"), (70, "fp8_token")],
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1), (14, 2)])
def test_attention_gives_a_row_the_same_bits_in_any_chunk_of_its_prompt(
    heads, dtype, window, features
):
    rows = [(200, 200), (90, 1300), (1, 77), (40, 2100)]
    case = paged_attention._case(CPU, (*heads, 48, 16), rows, dtype, window, features=features)
    whole = paged_attention.paged_attention(**case)
    for count in (1, 2, 7, 64):
        part, keep = attention_of_last(case, count)
        assert torch.equal(paged_attention.paged_attention(**part), whole[keep]), count


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("features", ["", "int8_token", "e5m2"])
def test_attention_gives_a_row_the_same_bits_alone_and_in_a_batch(features):
    rows = [(1, 3000), (1, 5), (1, 1024), (1, 1025), (1, 64), (1, 65)]
    case = paged_attention._case(CPU, (4, 2, 64, 16), rows, BF16, features=features)
    whole = paged_attention.paged_attention(**case)
    for s in range(len(rows)):
        alone = {
            **case,
            "q": case["q"][s : s + 1],
            "tables": case["tables"][s : s + 1],
            "contexts": case["contexts"][s : s + 1],
            "q_starts": torch.tensor([0, 1], dtype=torch.int32),
        }
        assert torch.equal(paged_attention.paged_attention(**alone), whole[s : s + 1])


@pytest.mark.usefixtures("native")
def test_attention_does_not_depend_on_the_block_size():
    case = paged_attention._case(CPU, (4, 2, 32, 16), [(9, 150), (1, 64)], BF16)
    blocks = torch.stack([case["cache"][i // 2, :, :, i % 2 * 8 :][..., :8, :] for i in range(2)])
    halves = case["cache"].unflatten(3, (2, 8)).permute(0, 3, 1, 2, 4, 5).flatten(0, 1)
    assert blocks.shape[1:] == halves.shape[1:]
    tables = torch.stack([2 * case["tables"], 2 * case["tables"] + 1], -1).flatten(1)
    halved = {**case, "cache": halves.contiguous(), "tables": tables}
    whole = paged_attention.paged_attention(**case)
    assert torch.equal(paged_attention.paged_attention(**halved), whole)


@pytest.mark.usefixtures("native")
def test_a_padding_sequence_without_context_gives_zeros_and_reads_nothing():
    case = paged_attention._case(CPU, (4, 2, 64, 16), [(1, 20), (1, 20)], BF16)
    case["contexts"][1] = 0
    case["tables"][1] = -1
    got = paged_attention.paged_attention(**case)
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    assert got[0].isfinite().all()


@pytest.mark.usefixtures("native")
def test_a_token_id_outside_the_vocabulary_is_not_read():
    ids = torch.tensor([0, 64, -1], dtype=torch.int32)
    got = embedding.embedding(ids, linear.pack(torch.randn(64, 32)))
    assert got[0].isfinite().all()
    assert got[1:].isnan().all()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", act.ACTIVATION_KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_activations_hold_at_the_edges(kind, dtype):
    x = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 90.0, -90.0, 1e4, -1e4, 0.6, -0.7]).to(dtype)[None]
    torch.testing.assert_close(act.act(x, kind), OPS["act"].reference(x, kind))


def test_copy_blocks_copies_each_pair_in_every_place():
    sources = [torch.randn(5, 2, 1, 4, 8) for _ in range(3)]
    targets = [torch.zeros(7, 2, 1, 4, 8) for _ in range(3)]
    for pairs in ([(0, 6)], [(4, 1), (2, 3)], []):
        copy_blocks.copy_blocks(sources, targets, pairs)
        for source, target in zip(sources, targets):
            for src, dst in pairs:
                assert torch.equal(target[dst], source[src])
    assert not targets[0][[0, 2, 4, 5]].any()


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("features", [{}, {"window": 40}, {"alibi": True}, {"reach": 30}])
@pytest.mark.parametrize("shape", [(12, 12, 32), (6, 2, 48)])
def test_encoder_attention_gives_a_text_the_same_bits_alone_and_in_company(shape, features, dtype):
    lengths = [1, 300, 16, 64, 65, 1100, 7, 130]
    case = encoder_attention._case(CPU, lengths, shape, dtype, **features)
    whole = encoder_attention.encoder_attention(**case)
    for low, high in zip(case["starts"].tolist(), case["starts"].tolist()[1:]):
        alone = {x: case[x][low:high].contiguous() for x in "qkv"}
        alone |= {"starts": torch.tensor([0, high - low]).int(), "longest": high - low}
        assert torch.equal(
            encoder_attention.encoder_attention(**{**case, **alone}), whole[low:high]
        )


@pytest.mark.usefixtures("native")
def test_encoder_attention_reads_no_other_text():
    case = encoder_attention._case(CPU, [20, 9, 40], (4, 2, 16), FP32)
    want = encoder_attention.encoder_attention(**case)
    case = {**case, "k": case["k"].clone(), "v": case["v"].clone()}
    case["k"][20:29], case["v"][20:29] = float("nan"), float("inf")
    got = encoder_attention.encoder_attention(**case)
    assert torch.equal(got[:20], want[:20])
    assert torch.equal(got[29:], want[29:])
