"""W8A8 integers: the rows that the format quantizes, the same sums, on every path."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from quire.errors import WeightError
from quire.kernels.formats.weight import ExpertBank, StoredWeight
from quire.kernels.moe_experts import moe_experts
from tests.cpu.quant.oracle import build, check_ranks, tiny, write_pair

fake = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward").fake_quantize
from compressed_tensors.quantization import QuantizationArgs  # noqa: E402

from tests.cpu.models.harness import Stepper  # noqa: E402
from tests.cpu.models.peers import prompt_of  # noqa: E402

CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel"}
FIXED = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
SCALE, ZERO = 0.04, 11


@dataclass(frozen=True, slots=True, eq=False)
class FakeWeight(StoredWeight):
    """A dense weight whose rows are quantized and dequantized first, in float64."""

    weight: torch.Tensor
    inputs: dict
    kind: ClassVar[str] = "fake"

    def product(self, x, bias=None):
        return (self.rounded(x.double()) @ self.weight.double().t()).to(x.dtype)

    def rounded(self, x):
        args = QuantizationArgs(**self.inputs)
        if args.dynamic and args.symmetric:
            scale, zero = x.abs().amax(1, keepdim=True) / 127, None
        elif args.dynamic:
            low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
            scale = (high - low) / 255
            zero = (-128 - low / scale).round()
        else:
            scale = torch.tensor([SCALE], dtype=torch.float64)
            zero = None if args.symmetric else torch.tensor([ZERO])
        return fake(x, scale, zero, args)


class FakeExperts(ExpertBank):
    kind = "fake"

    def __init__(self, bank, inputs):
        self.ones = [FakeWeight(one, inputs) for one in bank]

    def __len__(self):
        return len(self.ones)

    def __getitem__(self, i):
        return self.ones[i]

    def mlp(self, x, ids, weights, down, *further):
        return moe_experts.__wrapped__(x, ids, weights, self, down, *further)


def settings(inputs, **changes):
    group = {"targets": ["Linear"], "weights": CHANNEL, "input_activations": inputs}
    found = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    return found | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]} | changes


def quantizer(inputs):
    """A function for write_pair."""

    def quantize(name, weight):
        if name == "lm_head":
            return None
        scale = weight.abs().amax(1, keepdim=True) / 127
        data = (weight / scale).round().to(torch.int8)
        made = {"weight": data, "weight_scale": scale}
        if not inputs.get("dynamic"):
            made["input_scale"] = torch.tensor([SCALE])
            if not inputs.get("symmetric", True):
                made["input_zero_point"] = torch.tensor([ZERO], dtype=torch.int8)
        return made, data * scale

    return quantize


def pair_of(folder, inputs, model="llama", edit=None, **changes):
    hf = tiny(model, **changes)
    return write_pair(folder, hf, quantizer(inputs), settings(inputs), edit=edit)


def fake_model(pair, inputs):
    """The dense model with rows rounded where the other one's are."""
    model, config = build(pair.dense)
    for name, module in model.named_modules():
        for matrix in getattr(module, "matrices", ()):
            plain = getattr(module, "role", "") not in ("linear", "experts")
            if plain or name.endswith("kv_b_proj"):
                continue
            wide = getattr(module, matrix).dequantize()
            make = FakeExperts if wide.dim() == 3 else FakeWeight
            module.set_param(matrix, make(wide, inputs))
    return model, config


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize(
    "inputs", [ROWS, FIXED, ROWS | {"symmetric": False}, FIXED | {"symmetric": False}]
)
def test_it_computes_what_rounded_rows_do(tmp_path, inputs, model):
    pair = pair_of(tmp_path, inputs, model)
    built = build(pair.folder)
    kinds = {m.weight.kind for m in built[0].modules() if getattr(m, "role", "") == "linear"}
    assert kinds & {"int8", "panel_int8"}
    ids = prompt_of(30, 96)
    got = Stepper(*built).logits(ids)
    want = Stepper(*fake_model(pair, inputs)).logits(ids)
    # a row's number near the middle of two codes may take the other one
    error = (got - want).abs() / want.std()
    assert float(error.median()) < 1e-4
    assert float(error.mean()) < 0.02
    parts = Stepper(*built)
    chunks = torch.cat([parts.logits(ids[:11]), parts.logits(ids[11:])])
    torch.testing.assert_close(chunks, got, atol=2e-3, rtol=0)


def test_ranks_with_a_fixed_scale_compute_the_same(tmp_path):
    pair = pair_of(tmp_path, FIXED | {"symmetric": False})
    check_ranks(replace(pair, dense=pair.folder))


def test_parts_of_a_fused_layer_share_the_range_of_all(tmp_path):
    def edit(tensors):
        at = "model.layers.0.self_attn"
        tensors[f"{at}.k_proj.input_scale"] = torch.tensor([0.02])
        tensors[f"{at}.k_proj.input_zero_point"] = torch.tensor([-100], dtype=torch.int8)

    inputs = FIXED | {"symmetric": False}
    weight = (
        build(pair_of(tmp_path, inputs, edit=edit).folder)[0].layers[0].self_attn.qkv_proj.weight
    )
    low = min(SCALE * (-128 - ZERO), 0.02 * (-128 + 100))
    high = max(SCALE * (127 - ZERO), 0.02 * (127 + 100))
    scale, zero = float(weight.input_scale), int(weight.input_zero_point)
    assert scale * (-128 - zero) == pytest.approx(low, abs=scale)
    assert scale * (127 - zero) == pytest.approx(high, abs=scale)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weight": lambda t: t.float()}, "weight is float32; .* need int8"),
        ({"weight": lambda t: t[:, :-1]}, r"down_proj\.weight is \[64, 127\]"),
        ({"weight_scale": lambda t: None}, r"missing .*down_proj\.weight_scale"),
        ({"weight_scale": lambda t: t[:-1]}, r"weight_scale is \[63, 1\]"),
        ({"input_scale": lambda t: None}, "missing .*input_scale"),
        ({"input_zero_point": lambda t: None}, "missing .*input_zero_point"),
        ({"input_zero_point": lambda t: t.float()}, "input_zero_point is float32"),
        ({"weight_zero_point": lambda t: torch.zeros(64, 1)}, "1 unexpected .*weight_zero_point"),
    ],
)
def test_a_broken_tensor_is_named(tmp_path, changes, says):
    def edit(tensors):
        for suffix, change in changes.items():
            name = f"model.layers.0.mlp.down_proj.{suffix}"
            if (made := change(tensors.pop(name, None))) is not None:
                tensors[name] = made

    pair = pair_of(tmp_path, FIXED | {"symmetric": False}, edit=edit, num_hidden_layers=1)
    with pytest.raises(WeightError, match=says):
        build(pair.folder)
