"""A whole engine with latent attention: outputs do not depend on how steps are cut."""

import pytest

from quire import LLM, SamplingParams
from tests.cpu.models.peers import continued, peer, prompt_of

pytestmark = pytest.mark.sampled(3)

COUNT = 20
SETTINGS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "device": "cpu",
    "max_model_len": 512,
    "max_num_seqs": 8,
}
CUTS = {
    "at once": {},
    "chunks and prefix hits": {"max_num_batched_tokens": 150, "enable_prefix_caching": True},
    "eager": {"enforce_eager": True, "max_num_batched_tokens": 300},
    "few blocks": {"num_gpu_blocks_override": 34, "max_num_batched_tokens": 100},
}


def asked_of(variant, folder, device):
    """(prompts, transformers' output for each); its weights are in the folder then."""
    theirs = peer(variant, folder).to(device)
    prompts = [prompt_of(n, 199) for n in (5, 60, 330, 7, 33, 190)]
    prompts.append([*prompts[2][:250], 5, 6, 7])
    return prompts, [continued(theirs, ids, COUNT) for ids in prompts]


def says(llm, prompts):
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    outs = llm.generate(asked, params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outs]


@pytest.fixture(scope="module", params=["deepseek_v2_lite", "deepseek_v3"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, *asked_of(request.param, folder, "cpu")


@pytest.mark.parametrize("cut", CUTS)
def test_greedy_tokens_are_those_of_transformers(model, cut):
    folder, prompts, want = model
    llm = LLM(str(folder), **SETTINGS, **CUTS[cut])
    for _ in range(2):  # the second time with prefix hits if there are any
        assert says(llm, prompts) == want
