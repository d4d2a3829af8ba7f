"""Steps with adapters on the GPU's worker, with fake graphs: captured at start, replayed for any mix."""

import functools

import pytest

pytest.importorskip("triton")

from quire import LLM, SamplingParams
from quire.engine.startup import executor_setup
from quire.kernels import lora
from quire.runner.adapters import linear
from quire.runner.adapters.adapted_layer import SlotSizes
from quire.runner.gpu.cuda_graphs import DecodeGraph
from quire.runner.gpu.mixed_batch_graphs import GraphShape
from quire.sampling.sampler import Sampler
from tests import tiers
from tests.cpu.gpu_kernels.test_cuda_worker import acted, no_capture, replayed  # noqa: F401
from tests.cpu.lora_steps import PATHS, SETTINGS, run, write_adapters

pytestmark = pytest.mark.slow("two engines a case")
EVERYDAY = ["chunked prompts"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return write_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def gpu(acted, monkeypatch):  # noqa: F811
    """Makes an engine with the CUDA worker over CPU tensors, in which no step may capture."""
    worker = "quire.runner.gpu.cuda_worker", "CudaWorker"
    monkeypatch.setitem(executor_setup._WORKERS, "cpu", worker)
    monkeypatch.setattr(executor_setup, "Sampler", functools.partial(Sampler, asynchronous=True))

    def make(**settings):
        llm = LLM("embedded", **SETTINGS | settings)
        llm.llm_engine.engine.executor.call("capture_graphs", 0)
        llm.llm_engine.engine.executor.runner.worker._graphs._capture = no_capture
        return llm

    return make


@pytest.mark.parametrize("path", [*EVERYDAY, *tiers.long(*(p for p in PATHS if p not in EVERYDAY))])
def test_graphs_give_the_tokens_of_eager_steps(adapters, gpu, path, replayed):  # noqa: F811
    alike = [*adapters[:4], adapters[0]]
    want = run(gpu(enforce_eager=True, **PATHS[path]), alike)
    replayed.clear()
    llm = gpu(**PATHS[path])
    assert run(llm, alike) == want
    assert all(captured for _, captured in replayed)
    keys = {key for key, _ in replayed}
    decodes = {key for key in keys if isinstance(key, DecodeGraph)}
    assert {key.part for key in decodes if key.variant} == {"whole"}
    assert any(key.variant for key in keys if isinstance(key, GraphShape))
    if path == "preempted":
        assert llm.llm_engine.engine.stats().preemptions


def test_graphs_of_adapters_are_captured_only_where_there_are_banks(gpu, adapters, replayed):  # noqa: F811
    with_banks, without = (
        set(gpu(**some).llm_engine.engine.executor.runner.worker._graphs._captured)
        for some in ({}, {"enable_lora": False})
    )
    assert {key for key in with_banks if not key.variant} == without
    more = {key._replace(variant="") for key in with_banks if key.variant}
    assert more == without  # sampling too: the head is one of the layers that adapters change


def test_steps_of_few_ranks_have_graphs_of_their_own(adapters, gpu, replayed, monkeypatch):  # noqa: F811
    """With kernels chosen by the ranks of the step's adapters, not by the largest allowed."""
    alike = [*adapters[:4], adapters[0]]
    want = run(gpu(enforce_eager=True), alike)
    replayed.clear()
    monkeypatch.setattr(SlotSizes, "narrow_rank", 16)
    llm = gpu(max_lora_rank=32)
    ranks, product = [], lora.lora_linear
    banks = llm.llm_engine.engine.executor.runner.model.adapter_banks

    def spy(y, x, bank, rows):
        ranks.append((banks.step.is_wide, bank.rank))
        return product(y, x, bank, rows)

    monkeypatch.setattr(linear, "lora_linear", spy)
    monkeypatch.setattr(banks, "_narrow_rank", 8)
    assert run(llm, alike) == want
    assert {"adapters", "adapters of any rank"} <= {key.variant for key, _ in replayed}
    assert all(captured for _, captured in replayed)
    assert {*ranks} == {(False, 16), (True, 32)}


def test_steps_of_scaled_adapters_are_launched_kernel_by_kernel(gpu, adapters, replayed):  # noqa: F811
    """Kernels that read factors and shifts are in no graph."""
    alike, biased = adapters[0], adapters[-1]
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 9, 11], [6], [7, 7, 8])]
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (7, 3, 4)
    ]

    def answers(llm):
        found = llm.generate(prompts, params, lora_request=[alike, biased, None], use_tqdm=False)
        return [one.outputs[0].token_ids for one in found]

    want = answers(gpu(enforce_eager=True))
    replayed.clear()
    assert answers(gpu(max_num_seqs=3)) == want
    kinds = {(type(key), key.variant) for key, _ in replayed}
    assert {(GraphShape, "scaled adapters"), (DecodeGraph, "scaled adapters")} <= kinds
    assert (DecodeGraph, "adapters") in kinds
    for key, captured in replayed:
        assert captured == (key.variant != "scaled adapters")
