"""Block types of GGUF files made on load: each matrix has the type that a file of the mix has."""

import pytest
import torch

from quire.config.quant.ggml_mixes import MIXES, ggml_type
from quire.config.quant.ggml_online import GgmlOnlineFormat
from quire.config.quant.held import MatrixFacts
from quire.config.quant.online import find_online
from quire.errors import ConfigError
from quire.kernels.formats.panel_codes import pack_panel_codes
from quire.kernels.quantizers.ggml import LAYOUTS
from quire.quant.online import quantize
from tests.cpu.quant.oracle import Pair, build, check_logits, tiny, tiny_tensors, write_folder


@pytest.mark.parametrize("layers", [2, 24])
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_matrices_have_the_types_of_a_file(mix, layers):
    facts = find_online(f"gguf:{mix}", layers)
    for i in range(layers):
        at = f"model.layers.{i}"
        for name, theirs in [
            (f"{at}.self_attn.q_proj", "attn_q"),
            (f"{at}.self_attn.v_proj", "attn_v"),
            (f"{at}.mlp.down_proj", "ffn_down"),
            (f"{at}.mlp.experts.0.down_proj", "ffn_down_exps"),
            (f"{at}.mlp.experts.1.up_proj", "ffn_up_exps"),
        ]:
            assert facts.format_of([name]).type == ggml_type(mix, theirs, 4096, i, layers), name


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_bits_per_weight_are_those_of_the_type(kind):
    form, weight = GgmlOnlineFormat(type=kind), torch.randn(64, 512)
    made = pack_panel_codes(quantize(weight, form), torch.bfloat16)
    planned = form.held_bits(MatrixFacts("", 64, 512), "cpu")
    assert made.nbytes * 8 / weight.numel() == pytest.approx(planned, rel=0.005)


def test_logits_are_those_of_the_quantized_values(tmp_path):
    hf = tiny("qwen3_moe", 256)
    facts = find_online("gguf:q4_k_m", hf["num_hidden_layers"])
    tensors, dense, types = tiny_tensors(hf), {}, set()
    for key, value in tensors.items():
        path = key.removesuffix(".weight")
        plain = value.dim() == 1 or path.endswith(("embed_tokens", "mlp.gate", "lm_head"))
        form = None if plain else facts.format_of([path])
        types.add(None if form is None else form.type)
        dense[key] = value if form is None else quantize(value, form).dequantize()
    assert types == {None, "Q4_K", "Q6_K"}

    def made(folder, **settings):
        return build(folder, quant="gguf:q4_k_m", **settings)

    folder = write_folder(tmp_path / "plain", hf, tensors)
    check_logits(Pair(folder, write_folder(tmp_path / "dense", hf, dense), hf, made))


def test_an_unknown_mix_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"gguf:Q9_K.*allowed: gguf:Q4_0, .*gguf:Q4_K_M"):
        find_online("gguf:Q9_K", 2)
