"""What engines on the CPU prepare after they are ready is counted, in this process and in ranks."""

import pytest

from quire import LLM, SamplingParams
from quire.core.sequence_timing import BREAKDOWN_FIELDS
from quire.kernels.framework import late_work
from quire.kernels.native import library
from quire.sampling.processors import AdapterLogitsProcessor
from tests.cpu.tiny_models import write_model

SIZES = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 20, "device": "cpu"}
STEPS = 4


class Lazy(AdapterLogitsProcessor):
    """Prepares two things when it is made, and one in each step with extra_args."""

    def __init__(self, *args):
        super().__init__(*args)
        late_work.note_kernel("at start-up", 0.5)
        late_work.note_graph_capture("at start-up", 0.5)

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        return prepare if params.extra_args else None


def prepare(ids, logits):
    if ids:
        late_work.note_kernel("in a step", 0.5)
    else:
        late_work.note_graph_capture("in a step", 0.5)
    return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    """A recorder that no other test of this process has used."""
    monkeypatch.setattr(late_work, "_recorder", late_work.LateWorkRecorder())


def counters_of(llm):
    names = ("kernel_compilations", "graph_captures")
    found = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [found[f"quire:{name}_after_ready"] for name in names]


def compile_seconds_of(llm):
    seconds = llm.llm_engine.engine.snapshot().counters.breakdown_seconds
    return dict(zip(BREAKDOWN_FIELDS, seconds))["compile"]


def generate(llm, **extra):
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True, extra_args=extra or None)
    llm.generate("Hello", params, use_tqdm=False)


@pytest.mark.slow("an engine over a model in this process")
@pytest.mark.parametrize("depth", [1, 2])
def test_the_process_of_the_engine_counts_from_ready_on(folder, caplog, depth):
    llm = LLM(folder, **SIZES, logits_processors=[Lazy], async_scheduling=depth > 1)
    generate(llm)
    assert counters_of(llm) == [0, 0]
    assert compile_seconds_of(llm) == 0.0
    assert not [record for record in caplog.records if "after start-up" in record.getMessage()]
    generate(llm, lazy=1)
    assert counters_of(llm) == [STEPS - 1, 1]
    assert compile_seconds_of(llm) > 0.0
    logged = [r.getMessage() for r in caplog.records if "after start-up" in r.getMessage()]
    assert len(logged) == STEPS
    assert logged[0].startswith("CUDA graph in a step was captured after start-up: 500 ms")


@pytest.mark.usefixtures("forked")
@pytest.mark.slow("an engine of two ranks")
def test_the_executor_sums_the_counts_of_ranks(folder):
    llm = LLM(folder, **SIZES, logits_processors=[Lazy], tensor_parallel_size=2)
    try:
        generate(llm)
        assert counters_of(llm) == [0, 0]
        generate(llm, lazy=1)
        assert counters_of(llm) == [2 * (STEPS - 1), 2]
        seconds = llm.llm_engine.engine.executor.late_work().seconds
        assert seconds == 0.5 * STEPS, "ranks prepare side by side"
        assert compile_seconds_of(llm) > 0.0
    finally:
        llm.llm_engine.engine.shutdown()


def test_a_library_of_kernels_that_is_built_or_loaded_late_counts():
    if library.load_library.__wrapped__() is None:
        pytest.skip("no native kernels here")
    assert late_work.counts().kernel_compilations == 0
    late_work.set_ready(True)
    library.load_library.__wrapped__()
    assert late_work.counts().kernel_compilations == 1
