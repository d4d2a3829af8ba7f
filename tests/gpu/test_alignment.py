"""Tokens of an answer find their times on a GPU as on a CPU."""

import pytest

from tests.cpu.encoder_decoder import speech
from tests.cpu.encoder_decoder.test_alignment import AUDIOS, HEADS, aligned, answers_of, llm_of


@pytest.mark.slow("engines on both devices, and kernels that are compiled")
def test_weights_of_alignment_are_those_of_a_cpu(tmp_path):
    model = speech.write_model(tmp_path)
    model.generation_config.alignment_heads = HEADS
    model.generation_config.save_pretrained(tmp_path)
    answers = [answers_of(i, n) for i, n in enumerate((20, 55, 4))]
    want, got = (
        aligned(llm_of(tmp_path, device=device), AUDIOS, answers) for device in ("cpu", "cuda")
    )
    for one, other in zip(want, got, strict=True):
        assert abs(one - other).max() < 1e-2
