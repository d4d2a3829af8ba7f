"""A method that nothing in quire names: int8, packed four to a word and transposed on disk.

It is found by the plug-in registry, owns its parameters in linear layers, banks of experts and the
embedding, multiplies with its own code, and is wrapped by another method.
"""

import types
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

from quire.config.quant.facts import QuantFacts, WeightFormat, unquantized
from quire.distributed.collectives import SingleProcessCollectives
from quire.distributed.mesh import Mesh
from quire.errors import ConfigError, WeightError
from quire.kernels.formats.weight import ExpertBank, StoredWeight
from quire.kernels.moe_experts import moe_experts
from quire.models.build import build_model, read_model_config
from quire.quant.base import ParamSpec
from quire.registry import PluginRegistry
from tests.cpu.models.harness import Stepper

GROUP = 16
HF = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "mlp_only_layers": [0],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyFormat(WeightFormat):
    method: ClassVar[str] = "toy_int8"


FACTS = QuantFacts(quant_method="toy_int8", rules=unquantized(["gate"]), default=ToyFormat())


@dataclass(frozen=True, slots=True, eq=False)
class ToyWeight(StoredWeight):
    codes: torch.Tensor  # [O, I] int8
    scales: torch.Tensor  # [O, I / GROUP]
    kind: ClassVar[str] = "toy_int8"

    @property
    def shape(self):
        return self.codes.shape

    def dequantize(self, dtype=None):
        return (self.codes * self.scales.repeat_interleave(GROUP, 1)).to(dtype or torch.float32)

    def product(self, x, bias=None):
        y = x @ self.dequantize(x.dtype).t()
        return y if bias is None else y + bias

    def rows(self, ids, scale=1.0):
        return self.dequantize()[ids.long()] * scale


@dataclass(frozen=True, slots=True, eq=False)
class ToyExperts(ExpertBank):
    ones: tuple[ToyWeight, ...]
    kind: ClassVar[str] = "toy_int8"

    def __len__(self):
        return len(self.ones)

    def __getitem__(self, i):
        return self.ones[i]

    def mlp(self, x, ids, weights, down, *further):
        return moe_experts(x, ids, weights, self, down, *further)


class ToyMethod:
    name = "toy_int8"
    is_stored = True

    def __init__(self, form):
        assert form == ToyFormat()

    def accepts(self, layer):
        return layer.role != "head"

    def params(self, layer, matrix):
        return {
            "qweight": ParamSpec(dtype=torch.int32, inputs_per=4, transposed=True),
            "scales": ParamSpec(dtype=torch.float32, inputs_per=GROUP, transposed=True),
        }

    def process_after_load(self, layer, dtype):
        for matrix in layer.matrices:
            values = layer.take_params(matrix)
            codes, scales = values["qweight"].contiguous().view(torch.int8), values["scales"]
            if layer.role == "experts":
                made = ToyExperts(tuple(ToyWeight(*pair) for pair in zip(codes, scales)))
            else:
                made = ToyWeight(codes, scales)
            layer.set_param(matrix, made)


@dataclass(frozen=True, slots=True, eq=False)
class Shifted(StoredWeight):
    """What an adapter does: the inner weight's product, and something more."""

    inner: StoredWeight
    by: float
    kind: ClassVar[str] = "shifted"

    def product(self, x, bias=None):
        return self.inner.product(x, bias) + self.by


class Wrapping(ToyMethod):
    def process_after_load(self, layer, dtype):
        super().process_after_load(layer, dtype)
        if layer.role == "linear":
            layer.set_param("weight", Shifted(layer.weight, 0.5))


@pytest.fixture
def method(monkeypatch):
    """The toy method in the registry, as an entry point would put it there."""
    plugin, real = types.SimpleNamespace(Method=ToyMethod), PluginRegistry.load
    monkeypatch.setattr(
        PluginRegistry, "load", lambda r, name: plugin if name == "toy_int8" else real(r, name)
    )
    return plugin


def plain_tensors():
    model_type, config = read_model_config(HF)
    blank = build_model(model_type, config, load_format="dummy", dtype=torch.float32)
    found = {}
    for name, value in blank.named_parameters():
        found[f"model.{name}" if not name.startswith("lm_head") else name] = value.detach()
    return found, blank


def quantized(value):
    """codes [O, I] int8 and scales [O, I / GROUP] of a matrix."""
    groups = value.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1) / 127
    codes = (groups / scales[..., None]).round().to(torch.int8).flatten(-2)
    return codes, scales


def checkpoint(folder):
    """A quantized checkpoint, and the model of its dequantized weights."""
    _, blank = plain_tensors()
    tensors, parts = {}, {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("gate", "up")}
    for name, module in blank.named_modules():
        for matrix in getattr(module, "matrices", ()):
            if name == "lm_head" or name.endswith(".gate"):
                continue
            value = getattr(module, matrix).dequantize(torch.float32)
            codes, scales = quantized(value)
            module.set_param(
                matrix,
                ToyWeight(codes.flatten(0, -2), scales.flatten(0, -2)).dequantize().view_as(value),
            )
            if value.dim() == 3:
                named = {
                    f"{name}.{x}.{p}_proj": (c, s)
                    for x in range(4)
                    for p, c, s in split(matrix, codes[x], scales[x], parts)
                }
            else:
                at, _, leaf = name.rpartition(".")
                named = {
                    f"{at}.{p}_proj" if leaf in parts else name: (c, s)
                    for p, c, s in split(leaf, codes, scales, parts, module)
                }
            for theirs, (c, s) in named.items():
                words = c.contiguous().view(torch.int32)
                tensors[f"model.{theirs}.qweight"] = words.t().contiguous()
                tensors[f"model.{theirs}.scales"] = s.t().contiguous()
    for name, value in blank.named_parameters():
        own = f"model.{name}" if not name.startswith("lm_head") else name
        if value.dim() == 1 or "lm_head" in name or name.endswith("mlp.gate.weight"):
            tensors[own] = value.detach().clone()
    tensors["lm_head.weight"] = blank.lm_head.weight.dequantize(torch.float32)
    save_file(tensors, folder / "model.safetensors")
    return blank, tensors


def split(leaf, codes, scales, parts, module=None):
    names = parts.get(leaf, (leaf.removesuffix("_proj"),))
    sizes = (
        [out.rows for out in module.outputs]
        if module is not None and len(names) > 1
        else len(codes) // len(names)
    )
    return list(zip(names, codes.split(sizes), scales.split(sizes)))


def load(folder, **settings):
    model_type, config = read_model_config(HF)
    config = replace(config, quantized=settings.pop("facts", FACTS))
    settings = {"folder": folder, "dtype": torch.float32, "progress": False, **settings}
    return build_model(model_type, config, **settings), config


def test_it_computes_what_the_dequantized_weights_do(tmp_path, method):
    oracle, _ = checkpoint(tmp_path)
    model, config = load(tmp_path)
    kinds = {
        m.weight.kind for m in model.modules() if getattr(m, "role", "") in ("linear", "embedding")
    }
    assert kinds == {"toy_int8"}
    assert model.layers[1].mlp.experts.down_proj.kind == "toy_int8"
    assert model.lm_head.weight.kind != "toy_int8"
    ids = [5, 9, 2, 40, 17, 3, 3, 8]
    want = Stepper(oracle, config).logits(ids)
    torch.testing.assert_close(Stepper(model, config).logits(ids), want, atol=1e-4, rtol=1e-4)


def test_its_tensors_are_checked_by_name_and_shape(tmp_path, method):
    _, tensors = checkpoint(tmp_path)
    name = "model.layers.0.self_attn.k_proj.scales"
    save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"1 missing .*layers\.0\.self_attn\.k_proj\.scales"):
        load(tmp_path)
    save_file(tensors | {name: tensors[name].t().contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"k_proj\.scales is \[16, 2\], the model has \[2, 16\]"):
        load(tmp_path)


def test_ranks_cut_words_and_groups_with_the_weight(tmp_path, method):
    checkpoint(tmp_path)
    whole = load(tmp_path)[0].layers[0]
    ranks = [
        load(tmp_path, mesh=Mesh(tp=2, rank=r), comm=SingleProcessCollectives())[0].layers[0]
        for r in range(2)
    ]
    for r, layer in enumerate(ranks):
        mine = slice(16 * r, 16 * (r + 1))
        assert torch.equal(
            layer.self_attn.o_proj.weight.codes, whole.self_attn.o_proj.weight.codes[:, mine]
        )
        assert torch.equal(
            layer.self_attn.o_proj.weight.scales, whole.self_attn.o_proj.weight.scales[:, r : r + 1]
        )
    with pytest.raises(ConfigError, match="a width of 32 has 2 blocks of 16"):
        load(tmp_path, mesh=Mesh(tp=4, rank=0), comm=SingleProcessCollectives())


def test_another_method_wraps_it(tmp_path, method):
    checkpoint(tmp_path)
    inner = load(tmp_path)[0].layers[0].self_attn.o_proj
    method.Method = Wrapping
    outer = load(tmp_path)[0].layers[0].self_attn.o_proj
    x = torch.randn(3, 32)
    torch.testing.assert_close(outer(x), inner(x) + 0.5)
