"""A model on two GPUs answers as on one, in float32; and what a rank that fails leaves behind."""

import os
import signal
import threading

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import EngineDead
from quire.platform import cuda
from tests import tiers
from tests.cpu.drafters import heads
from tests.cpu.lora_folders import write_adapter
from tests.cpu.models.peers import peer, prompt_of
from tests.cpu.test_rank_features import FEATURES
from tests.cpu.tiny_models import write_model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

COMMON = {
    "device": "cuda", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8,
    "use_tqdm_on_load": False,
}  # fmt: skip
SETTINGS = {
    "graphs": {"num_gpu_blocks_override": 400},
    "chunks, preemption": {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 24},
    "eager, swap": {
        "enforce_eager": True, "num_gpu_blocks_override": 24, "kv_offloading_size": 0.01,
    },
    "NCCL": {"num_gpu_blocks_override": 400, "disable_custom_all_reduce": True},
    "one step at a time": {"num_gpu_blocks_override": 400, "steps_in_flight": 1},
}  # fmt: skip
EXACT = [name for name in FEATURES if name not in ("logprobs", "pooling", "beams")]
"""The others print numbers, whose last digits differ."""
DAILY = ["llama", "gemma2", "olmo2", "qwen3", "qwen3_moe", "deepseek_v2_lite", "gpt_oss"]
MORE = ["mixtral", "phi3", "glm4", "cohere2", "deepseek_v3", "falcon_new", "gpt_neox", "bloom",
        "qwen2_moe", "minimax_m2", "exaone4", "granite", "starcoder2", "mpt"]  # fmt: skip


def shut_down(llm):
    llm.llm_engine.engine.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = write_model(tmp_path_factory.mktemp("models") / "llama")
    write_adapter(base, base.parent / "adapter")
    return base


@pytest.fixture(scope="module", params=SETTINGS)
def engines(folder, request):
    more = {"enable_lora": True, "max_lora_rank": 8, "enable_prompt_embeds": True,
            "scheduling_policy": "priority"}  # fmt: skip
    settings = COMMON | more | SETTINGS[request.param]
    llms = [LLM(str(folder), **settings, tensor_parallel_size=ranks) for ranks in (1, 2)]
    yield llms
    shut_down(llms[1])


@pytest.mark.parametrize("feature", EXACT)
def test_two_gpus_answer_as_one_does(engines, feature):
    one, two = (FEATURES[feature](llm) for llm in engines)
    assert one == two
    for llm in engines:
        engine = llm.llm_engine.engine
        assert not engine.stats().held_blocks
        engine.check()


def test_logprobs_are_those_of_one_gpu(engines):
    one, two = (FEATURES["logprobs"](llm) for llm in engines)
    assert [token for token, _ in one] == [token for token, _ in two]
    for (_, value), (_, other) in zip(one, two):
        assert value == pytest.approx(other, abs=2e-3)


def test_nothing_is_compiled_or_captured_after_the_start(engines):
    FEATURES["plain"](engines[1])
    counts = engines[1].llm_engine.engine.executor.late_work()
    assert (counts.kernel_compilations, counts.graph_captures) == (0, 0)


def ids_of(llm, prompts, tokens=24):
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": one} for one in prompts]
    return [out.outputs[0].token_ids for out in llm.generate(given, params, use_tqdm=False)]


@pytest.mark.parametrize("variant", [*DAILY, *tiers.long(*MORE)])
def test_every_architecture_gives_the_tokens_of_one_gpu(variant, tmp_path):
    theirs = peer(variant, tmp_path)
    prompts = [prompt_of(length, theirs.config.vocab_size, i)
               for i, length in enumerate((1, 17, 100, 33))]  # fmt: skip
    found = {}
    for ranks in (1, 2):
        llm = LLM(str(tmp_path), **COMMON, skip_tokenizer_init=True, num_gpu_blocks_override=400,
                  tensor_parallel_size=ranks)  # fmt: skip
        found[ranks] = ids_of(llm, prompts)
        shut_down(llm)
    assert found[1] == found[2]


@pytest.mark.parametrize("quantization", ["fp8", "int4", *tiers.long("int8", "mxfp4")])
def test_quantized_weights_give_the_logprobs_of_one_gpu(tmp_path, quantization):
    """Activations are quantized after the cut, so bits differ."""
    folder = write_model(tmp_path, hidden_size=256, intermediate_size=512)  # groups of 128 fit
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found = []
    for ranks in (1, 2):
        llm = LLM(str(folder), **COMMON | {"dtype": "bfloat16"}, quantization=quantization,
                  num_gpu_blocks_override=400, tensor_parallel_size=ranks)  # fmt: skip
        (out,) = llm.generate("The capital of France is Paris, and", params, use_tqdm=False)
        found.append([next(iter(one.values())).logprob for one in out.prompt_logprobs[1:]])
        shut_down(llm)
    apart = [abs(one - two) for one, two in zip(*found, strict=True)]
    assert sum(apart) / len(apart) < 0.4, apart


def test_a_request_gives_the_same_alone_and_among_255_others(folder):
    settings = COMMON | {"max_num_seqs": 256, "num_gpu_blocks_override": 6000}
    prompts = [prompt_of(1 + i % 60, 250, i) for i in range(256)]
    found = {}
    for ranks in (1, 2):
        llm = LLM(str(folder), **settings, tensor_parallel_size=ranks)
        found[ranks] = ids_of(llm, prompts[77:78]), ids_of(llm, prompts)
        shut_down(llm)
    for alone, together in found.values():
        assert alone[0] == together[77]
    same = sum(one == two for one, two in zip(found[1][1], found[2][1], strict=True))
    assert same >= 250, "of 6,144 tokens a few have a rival within the last digits of a sum"


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_drafts_of_a_model_change_no_token(tmp_path, method):
    """Both ranks draft; the steps behind do not wait for the host."""
    target, head = heads.agreeing_pair(tmp_path)
    prompts = [prompt_of(length, heads.V, i) for i, length in enumerate((1, 17, 100, 33))]
    settings = COMMON | {"skip_tokenizer_init": True, "num_gpu_blocks_override": 400}
    one = LLM(str(target), **settings)
    want = ids_of(one, prompts)
    shut_down(one)
    options = {"method": method, "model": str(head if method == "eagle" else target),
               "num_speculative_tokens": 4, "adaptive": False}  # fmt: skip
    two = LLM(str(target), **settings, tensor_parallel_size=2, speculative_config=options)
    try:
        plans = heads.watch_plans(two.llm_engine.engine)
        assert ids_of(two, prompts) == want
        assert any(plan.continues for plan in plans)
        counts = two.llm_engine.engine.snapshot().counters.draft_counts
        assert sum(counts.accepted) / counts.tokens > 0.2
    finally:
        shut_down(two)


def test_an_engine_that_slept_answers_as_before(folder):
    llm = LLM(str(folder), **COMMON, num_gpu_blocks_override=400, tensor_parallel_size=2)
    before = FEATURES["plain"](llm)
    llm.sleep(level=1)
    llm.wake_up()
    assert FEATURES["plain"](llm) == before
    shut_down(llm)


def processes_on(index):
    return {pid for pid, _ in cuda.memory_by_process(index)}


def monitors():
    return {one for one in threading.enumerate() if one.name == "quire-rank-monitor"}


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "killed by signal 9"), (signal.SIGSTOP, "was stopped")]
)
@pytest.mark.parametrize("options", [{}, {"disable_custom_all_reduce": True}], ids=["own", "NCCL"])
def test_a_rank_that_fails_while_it_decodes_is_named_and_nothing_is_left(
    folder, monkeypatch, number, name, options
):
    before = monitors()
    settings = COMMON | {"max_model_len": 512, "num_gpu_blocks_override": 400} | options
    llm = LLM(str(folder), **settings, tensor_parallel_size=2)
    executor, steps = llm.llm_engine.engine.executor, []
    pid = executor.group.monitor.processes[0].pid
    submit = executor.submit

    def submit_and_fail(plan):
        steps.append(plan.step)
        if len(steps) == 40:
            os.kill(pid, number)
        return submit(plan)

    monkeypatch.setattr(executor, "submit", submit_and_fail)
    with pytest.raises(EngineDead, match=rf"rank 1 \(process {pid}, cuda:1\) .*{name}"):
        ids_of(llm, [[5, 6, 7]] * 4, tokens=400)
    executor.shutdown()
    assert not os.path.exists(f"/proc/{pid}")
    assert pid not in processes_on(1)
    assert not monitors() - before  # an engine of another test may live still
    again = LLM(str(folder), **settings, tensor_parallel_size=2)  # in the same process
    assert len(ids_of(again, [[5, 6, 7]])[0]) == 24
    shut_down(again)


def test_a_rank_that_dies_before_the_captures_ends_the_start(folder, monkeypatch):
    """In the trace before them. The next engine of the process computes all of its products."""
    from quire.engine.startup import warmup

    settings, prompts = COMMON | {"num_gpu_blocks_override": 400}, [prompt_of(9, 250, 1)]
    want = ids_of(LLM(str(folder), **settings), prompts)
    capture_graphs, found = warmup.capture_graphs, []

    def capture_and_kill(half, config, captured_bytes):
        run_worst_step = warmup._run_worst_step

        def kill_and_run(half, config):
            found.append(half[1].group.monitor.processes[0].pid)
            os.kill(found[0], signal.SIGKILL)
            run_worst_step(half, config)

        patch.setattr(warmup, "_run_worst_step", kill_and_run)
        capture_graphs(half, config, captured_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(warmup, "capture_graphs", capture_and_kill)
        with pytest.raises(EngineDead, match=r"rank 1 .*killed by signal 9"):
            LLM(str(folder), **settings, tensor_parallel_size=2)
    assert not os.path.exists(f"/proc/{found[0]}")
    assert ids_of(LLM(str(folder), **settings), prompts) == want
