"""Mixes of block types: which matrix has which, and what rows of odd sizes have."""

import pytest

from quire.config.quant.ggml import TYPE_BY_NAME
from quire.config.quant.ggml_mixes import MIXES, ggml_type, nbytes
from quire.errors import ConfigError


def layers_of(mix, matrix, kind, layers=32):
    return [i for i in range(layers) if ggml_type(mix, matrix, 4096, i, layers) == kind]


def test_a_medium_mix_gives_values_more_bits_in_half_of_the_layers():
    more = [*range(4), *[i for i in range(4, 28) if (i - 4) % 3 == 2], *range(28, 32)]
    for matrix in ("attn_v", "ffn_down", "ffn_down_exps"):
        assert layers_of("Q4_K_M", matrix, "Q6_K") == more
        assert layers_of("Q5_K_M", matrix, "Q6_K") == more
    assert layers_of("Q4_K_M", "attn_q", "Q4_K") == [*range(32)]
    assert layers_of("Q5_K_M", "token_embd", "Q5_K") == [*range(32)]


def test_a_small_mix_gives_the_first_layers_more_bits():
    assert layers_of("Q4_K_S", "attn_v", "Q5_K") == [0, 1, 2, 3]
    assert layers_of("Q4_K_S", "ffn_down", "Q5_K", 48) == [*range(6)]


@pytest.mark.parametrize("mix", MIXES)
def test_the_output_head_has_six_bits_or_more(mix):
    assert ggml_type(mix, "output", 4096) == ("Q8_0" if mix == "Q8_0" else "Q6_K")


@pytest.mark.parametrize(
    ("mix", "inputs", "kind"),
    [
        ("Q4_K_M", 288, "Q5_0"),
        ("Q2_K", 96, "Q4_0"),
        ("Q5_K", 32, "Q5_1"),
        ("Q6_K", 160, "Q8_0"),
        ("Q4_0", 40, "F16"),
        ("Q4_K_M", 100, "F16"),
        ("Q3_K", 512, "Q3_K"),
    ],
)
def test_rows_that_are_not_whole_blocks_have_another_type(mix, inputs, kind):
    assert ggml_type(mix, "attn_q", inputs) == kind


def test_an_unknown_mix_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"no GGUF type 'Q4_K_X'; there are Q4_0, .*Q5_K_M"):
        ggml_type("Q4_K_X", "attn_q", 256)


def test_sizes_are_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    for kind, form in TYPE_BY_NAME.items():
        if kind in gguf.GGMLQuantizationType.__members__:
            known = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
            assert known == (form.values, form.nbytes), kind
    assert nbytes("Q6_K", 512) == 420
