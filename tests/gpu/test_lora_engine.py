"""Adapters through the engine on a GPU: the tokens of the CPU, beside graphs of base rows."""

import pytest

from quire import LLM, SamplingParams
from quire.kernels.framework import late_work
from quire.runner.gpu.cuda_graphs import CudaGraphCache, DecodeGraph
from quire.runner.gpu.mixed_batch_graphs import GraphShape
from tests.cpu import lora_steps
from tests.cpu.lora_steps import shapes, write_adapter, write_adapters

SETTINGS = {
    "dtype": "float32", "enable_lora": True, "max_loras": 2, "max_lora_rank": 16,
    "num_gpu_blocks_override": 512, "max_num_seqs": 8, "use_tqdm_on_load": False,
    "max_model_len": 512, "enable_prefix_caching": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPTS = [[7 + (i * k) % 90 for k in range(n)] for i, n in enumerate((3, 41, 18, 70, 25, 9))]


@pytest.mark.slow("engines on both devices, and kernels that are compiled")
@pytest.mark.parametrize("eager", [False, True])
def test_tokens_are_those_of_the_cpu(tmp_path, eager):
    cpu = LLM("embedded", device="cpu", **SETTINGS)
    gpu = LLM("embedded", device="cuda", enforce_eager=eager, **SETTINGS)
    (sizes,) = cpu.apply_model(shapes)
    a, b, c = (write_adapter(tmp_path / f"r{r}", sizes, r, r) for r in (4, 9, 16))
    given = [{"prompt_token_ids": one} for one in PROMPTS]
    base = None
    for requests in (None, [a, None, b, a, c, None], None, [c, c, b, b, None, a]):
        found = [
            [one.outputs[0] for one in llm.generate(given, GREEDY, lora_request=requests)]
            for llm in (cpu, gpu)
        ]
        for want, got in zip(*found):
            assert list(got.token_ids) == list(want.token_ids)
            assert abs(got.cumulative_logprob - want.cumulative_logprob) < 2e-2
        if requests is None:
            logprobs = [one.logprobs for one in found[1]]
            assert base in (None, logprobs), "steps without adapters are as before"
            base = logprobs


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return write_adapters(tmp_path_factory.mktemp("adapters"))


def gpu(**settings):
    return LLM("embedded", **lora_steps.SETTINGS | {"device": "cuda"} | settings)


def without_capture(llm):
    """Graphs of this engine run their kernels one by one, with the same padding."""
    llm.llm_engine.engine.executor.runner.worker._graphs._captured.clear()
    return llm


@pytest.mark.slow("two engines a case")
@pytest.mark.parametrize("path", lora_steps.PATHS)
def test_graphs_give_the_bits_of_their_kernels_one_by_one(adapters, path):
    """A replay reads the slots of its step, whatever ran when it was captured."""
    alike = [*adapters[:4], adapters[0]]
    settings = lora_steps.PATHS[path]
    want = lora_steps.run(without_capture(gpu(**settings)), alike, 1)
    llm = gpu(**settings)
    with lora_steps.counted(CudaGraphCache, "run") as ran:
        assert lora_steps.run(llm, alike, 1) == want
        greedy = lora_steps.run(llm, alike)
        assert [tokens for tokens, _ in greedy] == [tokens for tokens, _ in want]
    captured = llm.llm_engine.engine.executor.runner.worker._graphs._captured
    keys = {key for (key,) in ran}
    assert keys <= set(captured)
    assert {key.part for key in keys if isinstance(key, DecodeGraph) and key.variant} == {
        "whole",
        "forward",
    }
    assert any(key.variant for key in keys if isinstance(key, GraphShape))


@pytest.mark.slow("engines and kernels that are compiled")
def test_a_start_compiles_and_captures_all_that_adapters_need(adapters):
    llm = gpu()
    before = late_work.counts()
    lora_steps.run(llm, [*adapters[:4], adapters[0]], 1)
    assert late_work.counts() == before


@pytest.mark.slow("an engine")
def test_scaled_adapters_run_without_graphs(adapters):
    llm, eager = gpu(), gpu(enforce_eager=True)
    found, want = ([tokens for tokens, _ in lora_steps.run(one, adapters)] for one in (llm, eager))
    assert found == want
    assert [tokens for tokens, _ in lora_steps.run(llm, adapters)] == want


@pytest.mark.slow("two engines")
def test_steps_of_the_base_have_the_graphs_of_an_engine_without_adapters(adapters):
    with_banks, without = gpu(), gpu(enable_lora=False)
    captured = [
        set(one.llm_engine.engine.executor.runner.worker._graphs._captured)
        for one in (with_banks, without)
    ]
    assert {key for key in captured[0] if not key.variant} == captured[1]
    lora_steps.run(with_banks, adapters)
    base = [None] * 5
    assert lora_steps.run(with_banks, base, 1) == lora_steps.run(without, base, 1)
