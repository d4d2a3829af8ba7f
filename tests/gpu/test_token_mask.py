"""Masks of tokens at the sizes of real steps, on the device."""

import pytest
import torch

from quire.kernels.token_mask import token_mask

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [128_256, 151_936, 50_257])
def test_allowed_logits_keep_their_bits_and_the_others_are_lost(vocab, dtype):
    rows = 256
    logits = torch.randn(rows, vocab, device=CUDA).to(dtype)
    logits[0, :64], logits[1, :64], logits[2, :64] = torch.nan, torch.inf, -0.0
    words = torch.randint(-(2**31), 2**31, (rows // 2, -(-vocab // 32)), device=CUDA).int()
    at = torch.randperm(rows, device=CUDA)[: rows // 2].int()
    before = logits.clone()
    assert token_mask(logits, words, at) is logits
    bits = words[:, :, None] >> torch.arange(32, device=CUDA) & 1
    allowed = torch.ones(rows, vocab, dtype=torch.bool, device=CUDA)
    allowed[at.long()] = bits.flatten(1)[:, :vocab] != 0
    whole = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(logits.view(whole)[allowed], before.view(whole)[allowed])
    assert (logits[~allowed] == -torch.inf).all()


def test_padding_rows_are_unchanged():
    logits = torch.randn(8, 1000, device=CUDA)
    before = logits.clone()
    words = torch.zeros((3, 32), dtype=torch.int32, device=CUDA)
    token_mask(logits, words, torch.tensor([-1, 5, -1], dtype=torch.int32, device=CUDA))
    assert (logits[5] == -torch.inf).all()
    logits[5] = before[5]
    assert torch.equal(logits, before)
