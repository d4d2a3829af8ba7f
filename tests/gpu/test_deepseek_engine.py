"""A whole engine on the GPU with latent attention: outputs do not depend on how steps are cut."""

import pytest

from quire import LLM
from tests.cpu.models.test_deepseek_engine import CUTS, SETTINGS, asked_of, says

ON_GPU = {**SETTINGS, "device": "cuda", "gpu_memory": "4GiB"}


@pytest.fixture(scope="module", params=["deepseek_v2_lite", "deepseek_v3"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, *asked_of(request.param, folder, "cuda")


@pytest.mark.parametrize("cut", CUTS)
def test_greedy_tokens_are_those_of_transformers(model, cut):
    folder, prompts, want = model
    llm = LLM(str(folder), **ON_GPU, **CUTS[cut])
    for _ in range(2):  # the second time with graphs, and prefix hits if there are any
        assert says(llm, prompts) == want
