"""Models that run through transformers' classes give the same tokens on a GPU, from graphs too."""

import pytest

from quire import LLM, SamplingParams
from tests.cpu.models.peers import continued, prompt_of
from tests.cpu.models.test_fallback import MODELS, VOCAB, peer

NAMES = sorted(MODELS.keys() - {"llama_tied_longrope"})  # short prompts differ in transformers
LENGTHS = (1, 40, 40, 70, 33, 200)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_those_of_transformers(name, tmp_path):
    theirs = peer(name, tmp_path)
    prompts = [prompt_of(n, VOCAB, seed=i) for i, n in enumerate(LENGTHS)]
    want = [continued(theirs, ids, 24) for ids in prompts]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for settings in ({"max_num_batched_tokens": 64, "max_num_seqs": 8}, {"enforce_eager": True}):
        llm = LLM(
            str(tmp_path),
            device="cuda",
            dtype="float32",
            model_impl="transformers",
            skip_tokenizer_init=True,
            max_model_len=256,
            num_gpu_blocks_override=200,
            **settings,
        )
        batch = [{"prompt_token_ids": ids} for ids in prompts]
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate(batch, params, use_tqdm=False)
            assert [list(one.outputs[0].token_ids) for one in outputs] == want, settings
        del llm
