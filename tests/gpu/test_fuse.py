"""Fused neighbours on the device: the unfused layer's values, and the same bits from a graph."""

import pytest
import torch

from quire.kernels.formats.fp8_weight import quantize_blocks, quantize_channels
from quire.kernels.formats.int8_weight import quantize_outputs
from quire.kernels.fp8_linear import multiply_quantized
from quire.kernels.framework.op import OPS
from tests.fused import Sizes, both, inputs, layer, quantized

LLAMA = Sizes(T=1, E=4096, F=14336, H=32, K=8, D=128)
QWEN = Sizes(T=1, E=1024, F=3072, H=16, K=8, D=128)
ODD = Sizes(T=1, E=896, F=4864, H=14, K=2, D=64)
SIZES = [LLAMA, QWEN, ODD, LLAMA._replace(T=3), QWEN._replace(T=8), QWEN._replace(T=300)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("how", [{}, {"head_norms": False, "bias": True, "act": "gelu_tanh"}])
def test_a_fused_layer_is_the_layer(sizes, how):
    torch.manual_seed(3)
    fused, plain = both(sizes, inputs(sizes, "cuda"), **how)
    for name, want in plain.items():
        got, want = fused[name].float(), want.float()
        off = (got - want).norm() / want.norm()
        assert off < 6e-3, (name, off)


@pytest.mark.parametrize("sizes", [LLAMA, QWEN, LLAMA._replace(T=5), QWEN._replace(T=300)], ids=str)
@pytest.mark.parametrize("quantize", [quantize_channels, quantize_blocks, quantize_outputs])
def test_a_fused_layer_over_weights_of_a_byte_is_the_layer(sizes, quantize):
    torch.manual_seed(3)
    fused, plain = both(sizes, quantized(inputs(sizes, "cuda"), quantize))
    for name, want in plain.items():
        got, want = fused[name].float(), want.float()
        off = (got - want).norm() / want.norm()
        # tensor cores add e4m3 with few bits; what then lies at a tie rounds to a neighbour, a
        # sixteenth away, and three more products follow
        assert off < 6e-2, (name, off)


@pytest.mark.parametrize("outputs", [6144, 28672])
@pytest.mark.parametrize("inputs", [1024, 4096, 14336])
@pytest.mark.parametrize("quantize", [quantize_channels, quantize_blocks])
def test_one_row_over_e4m3_weights_is_exact_to_its_rounding(outputs, inputs, quantize):
    from quire.kernels.gpu.linear import gemv_bytes

    torch.manual_seed(4)
    x = torch.randn(1, inputs, device="cuda").bfloat16()
    weight = quantize(torch.randn(outputs, inputs, device="cuda") * inputs**-0.5)
    z = torch.full((1, outputs), float("nan"), device="cuda").bfloat16()
    gemv_bytes.launch(z, x, weight)
    q, scale = OPS["quantize_fp8"].reference(x, weight.block_size)
    want = multiply_quantized(q, scale, weight)
    assert (z.float() - want).norm() / want.norm() < 3e-3  # bfloat16 alone gives 2e-3


@pytest.mark.parametrize("outputs", [6144, 28672])
@pytest.mark.parametrize("inputs", [1024, 4096, 14336])
def test_one_row_over_weights_in_bytes_has_the_bits_of_many(outputs, inputs):
    from quire.kernels.gpu.linear import gemv_bytes

    torch.manual_seed(4)
    x = torch.randn(1, inputs, device="cuda").bfloat16()
    weight = quantize_outputs(torch.randn(outputs, inputs, device="cuda") * inputs**-0.5)
    z = torch.full((1, outputs), float("nan"), device="cuda").bfloat16()
    gemv_bytes.launch(z, x, weight)
    assert torch.equal(z, OPS["int8_linear"].reference(x, weight))


@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
def test_a_replayed_graph_gives_the_same_bits(sizes):
    torch.manual_seed(3)
    t = inputs(sizes, "cuda")
    eager = {k: v.clone() for k, v in layer(sizes, t).items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(sizes, t)
    for _ in range(3):
        t["cache"].zero_()
        graph.replay()
        for name, want in eager.items():
            assert torch.equal(captured[name], want), name
