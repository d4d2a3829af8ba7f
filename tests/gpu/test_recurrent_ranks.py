"""Models with recurrent layers on two GPUs, by heads and in stages: the tokens of one, in float32.

pytest -n 0 -q tests/gpu/test_recurrent_ranks.py
"""

import pytest
import torch

from tests.cpu.models.peers import peer
from tests.cpu.test_recurrent_ranks import answers
from tests.cpu.tiny_models import write_ascii_tokenizer
from tests.gpu.test_stages import make
from tests.gpu.test_tp import shut_down

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

RANKS = {
    "tensor": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "stages, eager": {"pipeline_parallel_size": 2, "enforce_eager": True},
}
KINDS = ["jamba", "bamba", "lfm2", "qwen3_next"]
ROOM = {"max_model_len": 512, "max_num_seqs": 4, "num_gpu_blocks_override": 80}


@pytest.mark.parametrize("kind", KINDS)
def test_two_gpus_give_the_tokens_of_one(kind, tmp_path):
    config = peer(kind, tmp_path).config.get_text_config()
    write_ascii_tokenizer(tmp_path, config.vocab_size)
    one = make(tmp_path, **ROOM)
    want = answers(one, temperature=0)[0]
    shut_down(one)
    predicted = [[5 if i % 7 == 6 else token for i, token in enumerate(each)] for each in want]
    for ranks in RANKS.values():
        two = make(tmp_path, **ROOM, **ranks)
        assert answers(two, temperature=0)[0] == want
        assert answers(two, predicted, temperature=0)[0] == want, "drafts, from checkpoints"
        shut_down(two)
