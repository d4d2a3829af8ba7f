"""Heads in engines as users start them: ranks, sleep, adapters, requests that go on."""

import json

import pytest

from quire import LLM, LoRARequest, SamplingParams
from tests.cpu.drafters.heads import (
    TARGET,
    check_drafts,
    recorded_drafts,
    target_tensors,
    write,
)
from tests.cpu.drafters.test_eagle3 import PLAIN, head_tensors, prompts, reference_of
from tests.cpu.drafters.test_paths import head_of
from tests.cpu.engine_of import request
from tests.cpu.gguf_files.test_engine import write_model as write_gguf_model
from tests.cpu.lora_folders import ALL_LINEAR, write_adapter
from tests.cpu.tiny_models import write_model

SETTINGS = {
    "dtype": "float32", "skip_tokenizer_init": True, "device": "cpu", "max_model_len": 256,
    "use_tqdm_on_load": False,
}  # fmt: skip
HEAD = head_tensors("midlayer.")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("engines")
    return write(made / "target", TARGET, target_tensors()), write(made / "head", PLAIN, HEAD)


def engine_of_llm(folders, **options):
    given = {"model": str(folders[1]), "num_speculative_tokens": 4, "adaptive": False}
    return LLM(str(folders[0]), **SETTINGS, **options, speculative_config=given)


@pytest.mark.usefixtures("forked")
@pytest.mark.slow("an engine of two processes")
def test_two_ranks_draft_as_one(folders):
    llm = engine_of_llm(folders, tensor_parallel_size=2)
    reference = reference_of(HEAD, target_tensors(), "midlayer.")
    _, whole = check_drafts(llm.llm_engine.engine, prompts(), reference)
    assert whole > 0.9


def test_drafts_after_sleep(folders):
    llm = engine_of_llm(folders)
    ids = [{"prompt_token_ids": [*range(20, 60)]}]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    before = llm.generate(ids, params, use_tqdm=False)[0].outputs[0].token_ids
    llm.sleep(level=1)
    llm.wake_up()
    reference = reference_of(HEAD, target_tensors(), "midlayer.")
    got, _ = check_drafts(llm.llm_engine.engine, prompts(), reference)
    assert got["b", 0][:20] == list(before)


@pytest.mark.parametrize("depth", [1, 2])
def test_adapters_beside_a_head(tmp_path, depth):
    """Rows with an adapter are verified with it, also one of embedding and output head."""
    base = write_model(tmp_path / "base")
    hf = json.loads((base / "config.json").read_text())
    head = write(tmp_path / "head", *head_of({"head_dim": 8} | hf))
    targets = [*ALL_LINEAR, "embed_tokens", "lm_head"]
    adapter = LoRARequest("one", 1, str(write_adapter(base, tmp_path / "one", targets=targets)))
    options = SETTINGS | {"enable_lora": True, "max_lora_rank": 8, "steps_in_flight": depth}
    options |= {"skip_tokenizer_init": False}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
    found = []
    for given in (None, {"model": str(head), "num_speculative_tokens": 3, "adaptive": False}):
        llm = LLM(str(base), **options, speculative_config=given)
        ids = [{"prompt_token_ids": [*range(3, 20)]}] * 3
        outs = llm.generate(ids, params, lora_request=[adapter, None, adapter], use_tqdm=False)
        found.append([one.outputs[0] for one in outs])
    plain, drafted = ([list(one.token_ids) for one in outs] for outs in found)
    assert drafted == plain
    assert plain[0] != plain[1]
    assert all(one.spec_decode_metrics.num_draft_tokens > 20 for one in found[1])


def test_a_head_beside_a_gguf_file(tmp_path):
    """Embedding and output head are the file's, in 8 bits; the head is stored in bfloat16."""
    file, dense = write_gguf_model(tmp_path)
    hf = json.loads((dense / "config.json").read_text())
    own, tensors = head_of(hf)
    halves = {name: one.bfloat16() for name, one in tensors.items()}
    given = {"model": str(write(tmp_path / "head", own, halves)), "num_speculative_tokens": 4}
    work = [request("a", range(5, 45), 12), request("b", [7, 8] * 9, 12)]
    found = []
    for model in (file, dense):
        llm = LLM(str(model), **SETTINGS, speculative_config=given | {"adaptive": False})
        found.append(recorded_drafts(llm.llm_engine.engine, work))
    assert len(found[0]) > 10
    assert found[0] == found[1]
