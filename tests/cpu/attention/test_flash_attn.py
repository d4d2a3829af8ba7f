"""What the optional backend hands to its package, with a stand-in that attends by our reference."""

import sys
import types

import pytest
import torch

from quire.attention.base import AttentionMetadata
from quire.attention.flash_attn import CAPS, Backend
from quire.attention.paged import Backend as Paged
from quire.attention.select import BackendRequirements, unmet_requirement
from quire.errors import ConfigError
from quire.kernels.paged_attention import paged_attention


class Layer:
    scale, window, softcap = 0.2, 7, 3.0
    sinks, alibi, position_bias, k_scale, v_scale = None, None, None, 1.0, 1.0
    head_scales, group, place, spans = None, 0, 0, True


def stand_in(q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q,
             softmax_scale, causal, window_size, softcap):  # fmt: skip
    assert causal
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert (page_table >= 0).all()
    cache = torch.stack([k_cache, v_cache], 1).transpose(2, 3).contiguous()
    window = None if window_size[0] < 0 else window_size[0] + 1
    return paged_attention(
        q, cache, page_table, cu_seqlens_q, cache_seqlens, softmax_scale, window, softcap or None
    )


@pytest.fixture
def package(monkeypatch):
    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = stand_in
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)


def step():
    torch.manual_seed(0)
    cache = torch.randn(6, 2, 1, 4, 16)
    tables = torch.tensor([[5, 5], [0, 1], [2, -1]], dtype=torch.int32)
    ints = {"dtype": torch.int32}
    batch = AttentionMetadata(
        torch.tensor([0, 2, 3], **ints),
        torch.tensor([6, 1], **ints),
        (tables,),
        (torch.tensor([4, 5, 8]),),
        max_query=2,
        max_context=6,
        rows=torch.tensor([1, 2], **ints),
    )
    return cache, batch, (torch.randn(3, 2, 16), torch.randn(3, 1, 16), torch.randn(3, 1, 16))


@pytest.mark.parametrize(("window", "softcap"), [(7, 3.0), (2, None), (None, None)])
@pytest.mark.usefixtures("package")
def test_it_answers_as_the_paged_backend_does(monkeypatch, window, softcap):
    monkeypatch.setattr(Layer, "window", window)
    monkeypatch.setattr(Layer, "softcap", softcap)
    cache, batch, qkv = step()
    want = Paged([cache.clone()]).plan(batch).run(*qkv, Layer())
    got = Backend([cache]).plan(batch).run(*qkv, Layer())
    torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("package")
def test_sinks_are_refused_not_ignored(monkeypatch):
    monkeypatch.setattr(Layer, "sinks", torch.zeros(2))
    cache, batch, qkv = step()
    with pytest.raises(ConfigError, match="neither sinks nor ALiBi"):
        Backend([cache]).plan(batch).run(*qkv, Layer())


def test_without_the_package_the_error_names_the_install_command():
    with pytest.raises(ConfigError, match="flash-attn-3"):
        Backend([])


def test_it_is_chosen_on_cuda_only():
    assert "not on cpu" in unmet_requirement(CAPS, BackendRequirements("cpu", torch.bfloat16, 128))
    assert (
        unmet_requirement(
            CAPS, BackendRequirements("cuda", torch.bfloat16, 128, window=True, softcap=True)
        )
        == ""
    )
    assert "8 bits" in unmet_requirement(
        CAPS, BackendRequirements("cuda", torch.bfloat16, 128, coded_cache=True)
    )
