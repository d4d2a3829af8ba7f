"""Pipeline stages and whole experts on two GPUs answer as one GPU, in float32; four have both axes."""

import os
import signal

import pytest
import torch

from quire import LLM
from quire.errors import EngineDead
from tests import tiers
from tests.cpu.models.peers import peer, prompt_of
from tests.cpu.test_rank_features import FEATURES
from tests.cpu.tiny_models import write_model
from tests.gpu.test_tp import COMMON, EXACT, ids_of, shut_down

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

ROOM = {"num_gpu_blocks_override": 400}
TWO = {"pipeline_parallel_size": 2}
SETTINGS = {
    "graphs": TWO | ROOM,
    "chunks, preemption": TWO | {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 24},
    "eager, swap": TWO | {
        "enforce_eager": True, "num_gpu_blocks_override": 24, "kv_offloading_size": 0.01,
    },
    "four steps in flight": TWO | ROOM | {"steps_in_flight": 4},
    "uneven": TWO | ROOM | {"pipeline_layers": "3,1"},
    "two ranks a stage": TWO | ROOM | {"tensor_parallel_size": 2},
}  # fmt: skip
EXPERTS = {
    "whole": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "in turn": {"tensor_parallel_size": 2, "enable_expert_parallel": True,
                "expert_placement_strategy": "round_robin"},
    "moving": {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True,
               "eplb_config": {"step_interval": 8, "window_size": 8}},
    "in stages": {"pipeline_parallel_size": 2},
    "in stages of two ranks": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2,
                               "enable_expert_parallel": True},
}  # fmt: skip


def make(folder, **options):
    ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    if ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    return LLM(str(folder), **COMMON | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def one(folder):
    return make(folder, **ROOM, scheduling_policy="priority", enable_prompt_embeds=True)


@pytest.fixture(scope="module", params=SETTINGS)
def staged(folder, request):
    more = {"scheduling_policy": "priority", "enable_prompt_embeds": True}
    llm = make(folder, **SETTINGS[request.param], **more)
    yield llm
    shut_down(llm)


NO_ADAPTERS = [name for name in EXACT if "adapter" not in name and "lora" not in name]


@pytest.mark.parametrize("feature", NO_ADAPTERS)
def test_stages_on_gpus_answer_as_one_does(one, staged, feature):
    assert FEATURES[feature](one) == FEATURES[feature](staged)
    engine = staged.llm_engine.engine
    assert not engine.stats().held_blocks
    engine.check()


def test_tokens_reach_the_first_stage_without_the_host(staged):
    config = staged.llm_engine.config
    assert config.parallel.sends_tokens
    assert config.scheduler.steps_in_flight > config.parallel.stages


def test_logprobs_come_from_the_last_stage(one, staged):
    found = (FEATURES["logprobs"](llm) for llm in (one, staged))
    for (token, value), (token_too, other) in zip(*found, strict=True):
        assert token == token_too
        assert value == pytest.approx(other, abs=1e-4)


def test_nothing_is_compiled_or_captured_after_the_start_of_stages(staged):
    FEATURES["plain"](staged)
    counts = staged.llm_engine.engine.executor.late_work()
    assert (counts.kernel_compilations, counts.graph_captures) == (0, 0)


def test_stages_that_slept_answer_as_before(folder):
    llm = make(folder, **TWO, **ROOM)
    before = FEATURES["plain"](llm)
    llm.sleep(level=1)
    llm.wake_up()
    assert FEATURES["plain"](llm) == before
    shut_down(llm)


def test_a_stage_that_is_killed_is_named(folder, monkeypatch):
    llm = make(folder, **TWO, **ROOM)
    executor, steps = llm.llm_engine.engine.executor, []
    pid, submit = executor.group.monitor.processes[0].pid, executor.submit

    def submit_and_kill(plan):
        steps.append(plan.step)
        if len(steps) == 20:
            os.kill(pid, signal.SIGKILL)
        return submit(plan)

    monkeypatch.setattr(executor, "submit", submit_and_kill)
    with pytest.raises(EngineDead, match=r"rank 1 .*killed by signal 9"):
        ids_of(llm, [[5, 6, 7]] * 4, tokens=200)
    executor.shutdown()
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("name", ["qwen3_moe", *tiers.long("deepseek_v2_lite", "gpt_oss")])
def test_experts_on_ranks_give_the_tokens_of_one_gpu(name, tmp_path):
    theirs = peer(name, tmp_path)
    vocab = theirs.config.get_text_config().vocab_size
    prompts = [prompt_of(length, vocab, i) for i, length in enumerate((1, 17, 100, 33))]
    common = ROOM | {"skip_tokenizer_init": True}
    llm = make(tmp_path, **common)
    want = ids_of(llm, prompts)
    shut_down(llm)
    for options in EXPERTS.values():
        if torch.cuda.device_count() < 4 and {"pipeline_parallel_size", "tensor_parallel_size"} <= {
            *options
        }:
            continue
        llm = make(tmp_path, **common, **options)
        assert ids_of(llm, prompts) == want, options
        shut_down(llm)
