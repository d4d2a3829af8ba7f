"""e4m3 weights on the device: products against float64, and bits where the CPU promises them."""

import pytest
import torch

from quire.kernels.act import act_mul
from quire.kernels.formats.fp8_weight import Fp8Weight, quantize_blocks, quantize_channels
from quire.kernels.fp8_linear import fp8_linear
from quire.kernels.framework import lazy_fusion
from quire.kernels.linear import linear
from quire.kernels.quantize_fp8 import quantize_fp8
from quire.kernels.rms_norm import rms_norm
from quire.models.build import read_model_config
from quire.quant.fp8 import _with_kernel_buffers
from tests.cpu.models.harness import Stepper
from tests.cpu.quant import test_fp8_experts as experts
from tests.cpu.quant.checkpoints import BLOCKS, CHANNELS, LLAMA, load, plain, quantized
from tests.cpu.quant.test_fp8 import same, small

CUDA = torch.device("cuda", 0)
MAKE = {
    "channels": lambda weight: _with_kernel_buffers(quantize_channels(weight)),
    "blocks": lambda weight: _with_kernel_buffers(quantize_blocks(weight)),
}
SCALES = pytest.mark.parametrize("scales", MAKE)


def exact(q, scale, weight):
    wide = (
        scale.t().repeat_interleave(128, 1)[:, : q.shape[1]]
        if weight.block_size
        else scale[:, None]
    )
    return (q.double() * wide.double()) @ weight.dequantize(torch.float64).t()


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@SCALES
@pytest.mark.parametrize("rows", [1, 2, 7, 33, 64, 65, 100, 256, 2048])
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 4096), (576, 2048), (200, 320)])
def test_products_of_all_sizes_are_near_float64(scales, rows, outputs, inputs):
    weight = MAKE[scales](torch.randn(outputs, inputs, device=CUDA) / inputs**0.5)
    x = torch.randn(rows, inputs, device=CUDA).bfloat16()
    bias = torch.randn(outputs, device=CUDA).bfloat16()
    want = exact(*quantize_fp8(x, weight.block_size), weight)
    for b in (None, bias):
        got = fp8_linear(x, weight, b)
        same = linear(x, weight, b)
        lazy_fusion.flush()
        for y in (got, same):
            assert error(y, want if b is None else want + b.double()) < 3e-3


def test_sums_of_one_sign_lose_a_known_share():
    """The library adds in fewer bits than float32 where that is faster: a bias, not noise."""
    x, w = torch.rand(128, 4096, device=CUDA).bfloat16(), torch.rand(256, 4096, device=CUDA)
    weight = quantize_channels(w)
    assert error(fp8_linear(x, weight), exact(*quantize_fp8(x), weight)) < 0.1
    few = x[:16]
    assert error(fp8_linear(few, weight), exact(*quantize_fp8(few), weight)) < 3e-3


@pytest.mark.parametrize("block", [0, 128])
def test_rows_have_the_cpu_s_bits(block):
    x = torch.randn(300, 4096, device=CUDA).bfloat16()
    x[3] = 0
    got, want = quantize_fp8(x, block), quantize_fp8(x.cpu(), block)
    assert torch.equal(got[0].cpu().view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1].cpu(), want[1])


@SCALES
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_fused_with_their_neighbours_they_are_the_same(scales, rows):
    e, f = 512, 768
    up = MAKE[scales](torch.randn(2 * f, e, device=CUDA) / e**0.5)
    down = MAKE[scales](torch.randn(e, f, device=CUDA) / f**0.5)
    norm = torch.rand(e, device=CUDA).bfloat16()
    x, residual = torch.randn(2, rows, e, device=CUDA).bfloat16()

    def block():
        y, r = rms_norm(x, norm, 1e-5, residual)
        z = linear(act_mul(linear(y, up), "silu"), down)
        lazy_fusion.flush()
        return z, r

    z, r = block()
    with lazy_fusion.disabled():
        want, same = block()
    assert torch.equal(r, same)
    assert error(z, want) < 3e-2  # what lies at a tie rounds to a neighbour, a sixteenth away


@SCALES
@pytest.mark.parametrize("rows", [1, 32, 200])
def test_a_captured_product_replays(scales, rows):
    weight = MAKE[scales](torch.randn(512, 1024, device=CUDA))
    x = torch.randn(rows, 1024, device=CUDA).bfloat16()
    want = fp8_linear(x, weight)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fp8_linear(x, weight)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            got = fp8_linear(x, weight)
        fresh = torch.randn_like(x)
        x.copy_(fresh)
        graph.replay()
        stream.synchronize()
    assert not torch.equal(got, want)
    assert torch.equal(got, fp8_linear(fresh, weight))


def test_a_fixed_scale_is_used():
    made = quantize_channels(torch.randn(256, 512, device=CUDA))
    weight = Fp8Weight(made.data, made.scale, torch.tensor([0.01], device=CUDA))
    for rows in (1, 40, 90):
        x = torch.randn(rows, 512, device=CUDA).bfloat16()
        want = exact(*quantize_fp8(x, 0, weight.input_scale), weight)
        assert error(fp8_linear(x, weight), want) < 3e-3


def logprobs(model, config, ids, device, dtype):
    stepper = Stepper(model, config, dtype=dtype, max_tokens=96, device=device)
    whole = stepper.logits(ids[:40])
    ones = [stepper.logits(ids[i : i + 1]) for i in range(40, len(ids))]
    return torch.cat([whole, *ones]).log_softmax(-1)


def both(tmp_path, tensors_of, loaded, asked, dtype, devices=("cuda", "cpu")):
    """Log-probabilities of one model on each device."""
    ids, found = torch.randint(3, 96, (48,), generator=torch.Generator().manual_seed(1)), []
    for device in devices:
        folder = tmp_path / f"{device}-{asked}"
        folder.mkdir()
        model, config = loaded(folder, tensors_of(dtype), dtype=dtype, device=device, quant=asked)
        found.append(logprobs(model, config, ids.tolist(), device, dtype))
    return found


def llama(folder, tensors, **settings):
    return load(folder, tensors, **settings), read_model_config(LLAMA)[1]


ASKED = pytest.mark.parametrize("asked", ["fp8", "fp8_block"])


@ASKED
def test_a_model_gives_the_outputs_of_the_cpu(tmp_path, asked):
    there, here = both(tmp_path, plain, llama, asked, torch.float32)
    assert (there - here).abs().mean() < 5e-3  # a number at a tie may round otherwise


@ASKED
def test_drift_from_bfloat16_is_that_of_eight_bits(tmp_path, asked, record_property):
    small_ones, whole = (
        both(tmp_path, plain, llama, quant, torch.bfloat16, ("cuda",))[0] for quant in (asked, None)
    )
    drift = (small_ones - whole).abs().mean().item()
    record_property("mean drift of log-probabilities", drift)
    print(f"mean drift of log-probabilities, {asked}: {drift:.4f}")
    assert drift < 0.2


@ASKED
def test_experts_give_the_outputs_of_the_cpu(tmp_path, asked):
    there, here = both(tmp_path, experts.plain, experts.load, asked, torch.float32)
    # a router's choice may turn on a rounding: most positions agree, not all
    assert (there - here).abs().mean(-1).median() < 5e-3


@pytest.mark.parametrize(
    ("said", "style"),
    [
        (CHANNELS, {"channel": 2}),
        (BLOCKS, {"block": 1, "name": "weight_scale_inv"}),
        ({"quant_method": "fp8", "activation_scheme": "static"}, {"tensor": (), "static": 1}),
    ],
)
def test_a_checkpoint_lands_on_the_device_bit_for_bit(tmp_path, said, style):
    found = {}
    for device in ("cuda", "cpu"):
        (tmp_path / device).mkdir()
        found[device] = small(load(tmp_path / device, quantized(style), said, device=device))
    there = {
        name: Fp8Weight(
            w.data.cpu(), w.scale.cpu(), None if w.input_scale is None else w.input_scale.cpu()
        )
        for name, w in found["cuda"].items()
    }
    same(there, found["cpu"])


@pytest.mark.parametrize("asked", ["fp8", "fp8_block"])
def test_quantizing_on_load_gives_the_cpu_s_bits(tmp_path, asked):
    found = {}
    for device in ("cuda", "cpu"):
        (tmp_path / device).mkdir()
        found[device] = small(load(tmp_path / device, plain(), device=device, quant=asked))
    there = {n: Fp8Weight(w.data.cpu(), w.scale.cpu()) for n, w in found["cuda"].items()}
    same(there, found["cpu"])
