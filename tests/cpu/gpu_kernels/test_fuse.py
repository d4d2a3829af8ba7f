"""Fused neighbours give what the ops alone give, and only those are fused that may be."""

import pytest
import torch

from quire.kernels.formats.fp8_weight import quantize_blocks, quantize_channels
from quire.kernels.formats.int8_weight import quantize_outputs
from quire.kernels.formats.tiled_weight import pack_tiles
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.framework import lazy_fusion
from tests import tiers
from tests.fused import Sizes, both, call, inputs, layer, quantized

pytest.importorskip("triton", reason="triton is not installed")
ONE = Sizes(T=1, E=48, F=40, H=2, K=1, D=16)
FEW = Sizes(T=3, E=48, F=24, H=3, K=1, D=16)


@pytest.fixture
def started(monkeypatch):
    """Names of the fused kernels that were started."""
    return started_names(monkeypatch)


@pytest.fixture
def chosen(monkeypatch):
    """The same, of kernels that are not run: a test of which they are needs no results."""
    return started_names(monkeypatch, run=False)


def started_names(monkeypatch, run=True):
    from quire.kernels.gpu.attention import norm_rope_write
    from quire.kernels.gpu.linear import gemv, gemv_rows, small_m_gemm

    names = []
    for module in (gemv, gemv_rows, small_m_gemm, norm_rope_write):
        real, name = module.launch, module.__name__.rpartition(".")[2]

        def launch(*args, real=real, name=name, **kwargs):
            names.append(name)
            if run:
                real(*args, **kwargs)

        monkeypatch.setattr(module, "launch", launch)
    return names


OTHER = {"head_norms": False, "bias": True, "act": "gelu_tanh"}


@pytest.mark.parametrize(
    ("sizes", "how"), [(ONE, {}), (FEW, OTHER), *tiers.long((ONE, OTHER), (FEW, {}))]
)
def test_a_fused_layer_is_the_layer(sizes, how):
    torch.manual_seed(3)
    fused, plain = both(sizes, inputs(sizes, "cpu"), **how)
    for name, want in plain.items():
        torch.testing.assert_close(fused[name], want, atol=3e-2, rtol=3e-2, msg=name)


def rotated_and_cached(s, t, qkv, interleaved):
    """Heads normed, rotated and written, without the rest of a layer."""
    q, k, v = torch.split(qkv, [s.H, s.K, s.K], dim=1)
    q, k = (call("rms_norm", x, t[name], 1e-6)[0] for x, name in ((q, "q_norm"), (k, "k_norm")))
    cache = t["cache"].clone()
    q, k = call("rope", q, k, t["positions"], t["table"], interleaved)
    call("kv_write", k, v, cache, t["slots"])
    lazy_fusion.flush()
    return q, k, cache


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dims", [16, 8, 6], ids=["whole heads", "half of each", "a part"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_any_part_of_heads_is_fused(interleaved, dims, started):
    s, t = FEW, inputs(FEW, "cpu")
    cos, sin = t["table"].chunk(2, 1)
    t["table"] = torch.cat([cos[:, : dims // 2], sin[:, : dims // 2]], 1)
    qkv = torch.randn(s.T, s.H + 2 * s.K, s.D).bfloat16()
    fused = rotated_and_cached(s, t, qkv, interleaved)
    assert started == ["norm_rope_write"]
    with lazy_fusion.disabled():
        plain = rotated_and_cached(s, t, qkv, interleaved)
        others = rotated_and_cached(s, t, qkv, not interleaved)
    for got, want, other in zip(fused, plain, others, strict=True):
        torch.testing.assert_close(got, want, atol=3e-2, rtol=3e-2)
        assert not torch.allclose(other, want, atol=0.1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("quantize", [quantize_channels, quantize_blocks, quantize_outputs])
def test_a_fused_row_over_weights_of_a_byte_is_the_row(quantize):
    s = Sizes(T=1, E=128, F=160, H=2, K=1, D=32)
    torch.manual_seed(3)
    fused, plain = both(s, quantized(inputs(s, "cpu"), quantize), bias=True)
    for name, want in plain.items():
        torch.testing.assert_close(fused[name], want, atol=3e-2, rtol=3e-2, msg=name)


@pytest.mark.parametrize("quantize", [quantize_channels, quantize_outputs])
def test_no_rows_give_no_rows(quantize):
    x, weight = torch.randn(0, 64).bfloat16(), quantize(torch.randn(32, 64))
    out = call("linear", x, weight)
    lazy_fusion.flush()
    assert out.shape == (0, 32)


def in_tiles(weight):
    """A weight of 4 bits with a scale, a zero and a place of their own for its columns."""
    most, group = 15, 16
    parts = weight.float().unflatten(1, (-1, group))
    low, high = parts.amin(2), parts.amax(2)
    scale = ((high - low) / most).bfloat16()
    zero = (-low / scale.float()).round().clamp(0, most)
    q = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(0, most).flatten(1)
    perm = torch.randperm(weight.shape[1]).int()
    codes = WeightCodes(q=q.byte(), bits=4, group=group, scale=GroupFactors(scale),
                        zero=zero.byte(), perm=perm)  # fmt: skip
    return pack_tiles(codes, torch.bfloat16)


@pytest.mark.parametrize("quantize", [quantize_channels, quantize_outputs])
def test_rows_over_weights_of_a_byte_are_made_and_quantized_in_one_pass(quantize, monkeypatch):
    from quire.kernels.gpu.linear import quantize_fused

    s, calls = FEW, []
    for name in ("rms_norm_quantize", "act_mul_quantize"):
        real = getattr(quantize_fused, name)
        monkeypatch.setattr(
            quantize_fused, name, lambda *a, real=real, name=name: calls.append(name) or real(*a)
        )
    torch.manual_seed(3)
    fused, plain = both(s, quantized(inputs(s, "cpu"), quantize))
    assert calls == ["rms_norm_quantize", "rms_norm_quantize", "act_mul_quantize"]
    for name, want in plain.items():
        torch.testing.assert_close(fused[name], want, atol=3e-2, rtol=3e-2, msg=name)


@pytest.mark.parametrize(
    ("cached", "per_token", "step"),
    [
        (torch.float8_e4m3fn, False, 0.1),
        (torch.int8, True, 2.01),
        *tiers.long(
            (torch.float8_e4m3fn, True, 1.0),
            (torch.int8, False, 1.01),
            (torch.float8_e5m2, False, 0.2),
        ),
    ],
)
def test_a_cache_of_codes_is_written_as_the_op_writes_it(cached, per_token, step):
    t = inputs(FEW, "cpu", cached=cached)
    scales = torch.zeros(t["cache"].shape[:4]) if per_token else None
    fused, plain = both(FEW, t | {"scales": scales})
    near = {"atol": step, "rtol": 0.13}
    torch.testing.assert_close(fused["cache"].float(), plain["cache"].float(), **near)
    if per_token:
        torch.testing.assert_close(fused["scales"], plain["scales"], atol=0, rtol=2e-2)
        assert (plain["scales"] > 0).sum() == 2 * FEW.K * FEW.T


def test_one_row_is_four_products_and_one_pass_over_heads(chosen):
    layer(ONE, inputs(ONE, "cpu"))
    assert chosen == ["gemv", "norm_rope_write", "gemv", "gemv", "gemv"]


def test_a_few_rows_are_multiplied_and_activated_together(chosen):
    layer(FEW, inputs(FEW, "cpu"))
    assert chosen == ["gemv_rows", "norm_rope_write", "gemv_rows", "small_m_gemm", "gemv_rows"]


def test_a_norm_with_another_reference_is_stored(started):
    s, t = FEW, inputs(FEW, "cpu")
    qkv = call("linear", t["x"], t["qkv"])
    q, k, v = torch.split(qkv.view(s.T, -1, s.D), [s.H, s.K, s.K], dim=1)
    q_normed = call("rms_norm", q, t["q_norm"], 1e-6)[0]
    k_normed = call("rms_norm", k, t["k_norm"], 1e-6)[0]
    q2, k2 = call("rope", q_normed, k_normed, t["positions"], t["table"])
    call("kv_write", k2, v, t["cache"], t["slots"])
    lazy_fusion.flush()
    assert "norm_rope_write" not in started
    assert not q_normed.isnan().any()
    assert not q2.isnan().any()


def test_a_view_of_a_norm_keeps_it(started):
    s, t = FEW, inputs(FEW, "cpu")
    qkv = call("linear", t["x"], t["qkv"])
    q, k, v = torch.split(qkv.view(s.T, -1, s.D), [s.H, s.K, s.K], dim=1)
    views = []

    def normed(heads, weight):
        y = call("rms_norm", heads, weight, 1e-6)[0]
        views.append(y.view(-1))
        return y

    _, k2 = call("rope", normed(q, t["q_norm"]), normed(k, t["k_norm"]), t["positions"], t["table"])
    call("kv_write", k2, v, t["cache"], t["slots"])
    lazy_fusion.flush()
    assert "norm_rope_write" not in started
    assert not any(view.isnan().any() for view in views)


def test_what_a_chain_made_can_be_read_by_any_op_after_it():
    t = inputs(ONE, "cpu")
    x, res = call("rms_norm", t["x"], t["norm"], 1e-6, t["res"])
    call("linear", x, t["qkv"])
    again = call("linear", x, t["gate_up"])
    total = call("add", x, res)
    doubled = call("add", again, again)
    y, _ = call("rms_norm", t["x"], t["norm2"], 1e-6)
    twice = call("add", y, y)
    lazy_fusion.flush()
    torch.testing.assert_close(doubled, again + again)
    torch.testing.assert_close(twice, y + y)
    assert not twice.isnan().any()
    want = (t["x"] + t["res"]).float()
    assert torch.equal(res.float(), want)
    torch.testing.assert_close(total.float(), (x + res).float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(again, x @ t["gate_up"].t(), atol=3e-2, rtol=3e-2)


def test_nothing_is_pending_after_a_flush_and_all_is_before(started):
    t = inputs(ONE, "cpu")
    y, _ = call("rms_norm", t["x"], t["norm"], 1e-6)
    assert y.isnan().all()
    lazy_fusion.flush()
    assert not y.isnan().any()
    z = call("linear", t["x"], t["gate_up"])
    assert z.isnan().all()
    assert started == []
    lazy_fusion.flush()
    assert started == ["gemv"]
    assert not z.isnan().any()
