"""LLM on a tiny random model: prompt forms, results, errors, and what stays clean afterwards."""

import logging
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire import LLM, RequestError, SamplingParams, TooLong, Unsupported
from quire.config.engine_args import EngineArgs
from quire.core.params import LoRARequest
from quire.llm import LLMEngine, compat
from quire.llm.metrics import Counter, Gauge
from quire.outputs import RequestOutput
from tests.cpu.tiny_models import write_model

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    generation = {"temperature": 0.5, "top_k": 7, "eos_token_id": 2}
    return write_model(tmp_path_factory.mktemp("models") / "llama", generation=generation)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), max_num_seqs=16, num_gpu_blocks_override=512, use_tqdm_on_load=False)


@pytest.fixture(autouse=True)
def _clean(request):
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").llm_engine
        stats = engine.engine.stats()
        assert (stats.running, stats.waiting, stats.held_blocks) == (0, 0, 0)
        assert not engine.has_unfinished_requests()
        engine.engine.check()


def ids(outputs):
    return [list(o.outputs[0].token_ids) for o in outputs]


def test_prompts_come_in_many_forms(llm):
    text = "Hello, my name is"
    tokens = llm.get_tokenizer().encode(text)
    want = ids(llm.generate(text, GREEDY))
    for given in (
        [text],
        {"prompt": text},
        tokens,
        [tokens],
        {"prompt_token_ids": tokens},
        [{"prompt_token_ids": tokens, "prompt": text}],
    ):
        assert ids(llm.generate(given, GREEDY, use_tqdm=False)) == want
    assert ids(llm.generate(prompt_token_ids=[tokens], sampling_params=GREEDY)) == want
    assert ids(llm.generate([text], GREEDY, prompt_token_ids=[tokens])) == want


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = [f"{i} " * (i % 7 + 1) for i in range(40)]
    lengths = [SamplingParams(max_tokens=40 - i, ignore_eos=True) for i in range(40)]
    outputs = llm.generate(prompts, lengths, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(40, 0, -1))
    assert all(isinstance(o, RequestOutput) and o.finished for o in outputs)


def test_a_prompt_gets_the_same_tokens_alone_and_among_others(llm):
    prompts = ["Hello", "The capital of France is", "What is"] * 5
    seeded = SamplingParams(seed=5, max_tokens=8)
    together = ids(llm.generate(prompts, seeded, use_tqdm=False))
    assert together == [ids(llm.generate(p, seeded, use_tqdm=False))[0] for p in prompts]


def test_no_parameters_means_the_generation_config(llm):
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 7, 16)
    assert len(llm.generate("Hello", use_tqdm=False)[0].outputs[0].token_ids) <= 16
    params.top_k = 3
    assert llm.get_default_sampling_params().top_k == 7


def test_the_callers_parameters_are_not_changed(llm):
    params = SamplingParams(temperature=0, max_tokens=2)
    before = params.clone()
    llm.generate(["Hello", "The"], params, use_tqdm=False)
    assert params == before


def test_one_bad_prompt_among_many_raises_before_anything_runs(llm):
    before = llm.get_metrics()
    for bad in ("", [10**6], "word " * 2000, {"prompt_token_ids": []}, {"promt": "x"}):
        with pytest.raises(RequestError):
            llm.generate(["Hello", bad, "The"], GREEDY, use_tqdm=False)
    with pytest.raises(TooLong):
        llm.generate(["Hello", list(range(3, 300)) * 2], GREEDY, use_tqdm=False)
    assert llm.get_metrics() == before
    assert len(llm.generate("Hello", GREEDY, use_tqdm=False)) == 1


def test_a_request_the_cache_cannot_hold_takes_the_others_back(folder):
    llm = LLM(str(folder), num_gpu_blocks_override=4)
    params = SamplingParams(max_tokens=2)
    with pytest.raises(TooLong):
        llm.generate(["Hello", list(range(3, 200))], params, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.engine.idle
    assert len(llm.generate("Hello", params, use_tqdm=False)) == 1


def test_a_step_runs_while_other_prompts_are_queued(folder, monkeypatch):
    llm = LLM(str(folder), max_num_batched_tokens=64, num_gpu_blocks_override=512)
    prompts = [list(range(5 + i, 45 + i)) for i in range(12)]
    llm.enqueue(prompts, GREEDY, use_tqdm=False)
    want = ids(llm.wait_for_completion(use_tqdm=False))
    engine, added = llm.llm_engine.engine, []
    add, submit, refused = engine.add, engine.executor.submit, []

    def note_step(plan):
        added.append("step")
        return submit(plan)

    def note_request(request):
        if len(added) - added.count("step") in refused:
            raise RequestError("full")
        added.append(request.id)
        return add(request)

    monkeypatch.setattr(engine.executor, "submit", note_step)
    monkeypatch.setattr(engine, "add", note_request)
    assert ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == want
    assert added.index("step") == 2  # of 64 tokens
    added.clear()
    refused.append(9)
    with pytest.raises(RequestError, match="full"):
        llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    assert "step" in added
    assert engine.idle
    assert not engine.stats().held_blocks
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_lists_must_have_the_length_of_the_prompts(llm):
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="priority"):
        llm.generate(["a", "b"], GREEDY, priority=[1], use_tqdm=False)
    with pytest.raises(RequestError, match="got a int"):
        llm.generate(5, GREEDY)
    with pytest.raises(ValueError, match="equally many"):
        llm.generate(["a", "b"], GREEDY, prompt_token_ids=[[1]], use_tqdm=False)


def test_a_priority_without_the_policy_has_no_effect_and_is_logged(llm, caplog, monkeypatch):
    monkeypatch.setattr(compat, "_logged", set())
    outputs = llm.generate(["a", "a"], GREEDY, priority=[3, 0], use_tqdm=False)
    assert outputs[0].outputs[0].text == outputs[1].outputs[0].text
    assert "priority has no effect with scheduling_policy='fcfs'" in caplog.text


def test_what_is_not_built_is_refused(llm):
    for call in (
        lambda: llm.generate("a", GREEDY, lora_request=LoRARequest("a", 1, "folder")),
        lambda: llm.generate("a", GREEDY, mm_processor_kwargs={"a": 1}),
        lambda: llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}}, GREEDY),
        lambda: llm.embed("a", lora_request=LoRARequest("a", 1, "folder")),
        lambda: llm.sleep(level=2),
    ):
        with pytest.raises(Unsupported):
            call()


def test_an_unsupported_method_names_its_feature(llm):
    assert not hasattr(llm, "update_weights")
    with pytest.raises(AttributeError, match="does not support weight transfer"):
        llm.update_weights({})
    with pytest.raises(AttributeError, match="no 'genrate'"):
        llm.genrate("a")


def test_vectors_of_ids_are_prompts(llm):
    import numpy as np
    import torch

    want = ids(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False))
    for given in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), list(np.array([5, 6, 7]))):
        assert ids(llm.generate(given, GREEDY, use_tqdm=False)) == want
    assert ids(llm.generate(np.array([[5, 6, 7], [5, 6, 7]]), GREEDY, use_tqdm=False)) == want * 2
    assert ids(llm.generate(iter(["Hello"]), GREEDY, use_tqdm=False))
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_priorities_go_first_under_their_policy(folder):
    llm = LLM(str(folder), scheduling_policy="priority", max_num_seqs=1, max_model_len=64)
    ended = []
    engine = llm.llm_engine
    for name, priority in [("late", 5), ("soon", 1), ("first", 0)]:
        engine.add_request(name, "Hello", SamplingParams(max_tokens=2), priority=priority)
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended == ["first", "soon", "late"]
    assert len(llm.generate(["a", "b"], GREEDY, priority=[2, 1], use_tqdm=False)) == 2


def test_n_answers_differ_and_best_of_returns_the_likeliest(llm):
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=5)
    outputs = llm.generate("Hello", params, use_tqdm=False)[0].outputs
    assert [o.index for o in outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in outputs}) > 1
    wide = SamplingParams(n=8, seed=1, max_tokens=5, logprobs=0)
    sums = [o.cumulative_logprob for o in llm.generate("Hello", wide, use_tqdm=False)[0].outputs]
    best = SamplingParams(n=2, best_of=8, seed=1, max_tokens=5)
    found = llm.generate("Hello", best, use_tqdm=False)[0].outputs
    assert [o.cumulative_logprob for o in found] == sorted(sums, reverse=True)[:2]


def test_a_stop_string_ends_the_request_and_frees_it(llm):
    text = llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = text[2]
    params = SamplingParams(temperature=0, max_tokens=6, stop=[stop])
    output = llm.generate("Hello", params, use_tqdm=False)[0].outputs[0]
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_logprobs_are_returned(llm):
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=3, prompt_logprobs=1)
    output = llm.generate("The capital of France", params, use_tqdm=False)[0]
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    first = output.outputs[0].logprobs[0]
    assert first[output.outputs[0].token_ids[0]].rank == 1
    assert len(first) == 3


def test_chat_applies_the_template(llm):
    talk = [{"role": "user", "content": "hi"}]
    output = llm.chat(talk, GREEDY, use_tqdm=False)[0]
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert len(llm.chat([talk, talk], GREEDY, use_tqdm=False)) == 2
    output = llm.chat(talk, GREEDY, chat_template="{{ messages[0].content }}!", use_tqdm=False)[0]
    assert output.prompt == "hi!"
    open_ended = [*talk, {"role": "assistant", "content": "I am"}]
    output = llm.chat(
        open_ended, GREEDY, add_generation_prompt=False, continue_final_message=True, use_tqdm=False
    )[0]
    assert output.prompt.endswith("assistant\nI am")
    for bad in ("hi", [], [talk, talk[0]]):
        with pytest.raises(RequestError):
            llm.chat(bad, GREEDY, use_tqdm=False)


def test_the_first_token_is_written_once(tmp_path):
    llm = LLM(str(write_model(tmp_path, bos=True)), max_model_len=64)
    assert llm.generate("hi", GREEDY, use_tqdm=False)[0].prompt_token_ids[0] == 0
    template = "{{ bos_token }}{{ messages[0].content }}"
    talk = [{"role": "user", "content": "hi"}]
    prompt = llm.chat(talk, GREEDY, chat_template=template, use_tqdm=False)[0].prompt_token_ids
    assert prompt.count(0) == 1


def test_tools_and_template_arguments_reach_the_template(llm):
    template = "{{ tools[0].function.name }} {{ mood }}: {{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    output = llm.chat(
        [{"role": "user", "content": "hi"}], GREEDY, chat_template=template, tools=tools,
        chat_template_kwargs={"mood": "glad"}, use_tqdm=False,
    )[0]  # fmt: skip
    assert output.prompt == "f glad: hi"


def test_enqueued_requests_wait_for_completion(llm):
    first = llm.enqueue(["Hello", "The"], GREEDY, use_tqdm=False)
    second = llm.enqueue_chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    between = llm.generate("What", GREEDY, use_tqdm=False)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [o.request_id for o in outputs] == first + second
    assert between[0].request_id not in first + second
    assert llm.wait_for_completion() == []
    with pytest.raises(Unsupported):
        llm.wait_for_completion(output_type=int)


def test_bars_show_what_users_know(llm, capsys):
    llm.generate(["Hello", "The"], GREEDY)
    said = capsys.readouterr().err
    assert "Adding requests: 100%" in said
    assert "Processed prompts: 100%" in said
    assert "est. speed input: " in said
    assert " toks/s, output: " in said
    llm.generate(["Hello"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_bar_may_be_brought(llm):
    from tqdm import tqdm

    made = []

    def bar(*given, **named):
        made.append(named["desc"])
        return tqdm(*given, disable=True, **named)

    llm.generate("Hello", GREEDY, use_tqdm=bar)
    assert made == ["Adding requests", "Processed prompts"]


def test_ctrl_c_aborts_what_runs_and_nothing_else(llm):
    waiting = llm.enqueue("Hello", GREEDY, use_tqdm=False)
    before = signal.getsignal(signal.SIGINT)

    def interrupt(tokens, logits):  # in the middle of a step
        if len(tokens) == 3:
            signal.raise_signal(signal.SIGINT)
        return logits

    params = SamplingParams(max_tokens=400, ignore_eos=True, logits_processors=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x", "y"], params, use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is before
    assert [o.request_id for o in llm.wait_for_completion(use_tqdm=False)] == waiting


def test_a_failing_step_ends_only_its_requests(llm, caplog):
    calls = []

    def broken(tokens, logits):
        calls.append(len(tokens))
        raise ZeroDivisionError("a bug in a user's processor")

    params = SamplingParams(max_tokens=4, logits_processors=[broken])
    output = llm.generate("Hello", params, use_tqdm=False)[0]
    assert calls
    assert output.outputs[0].finish_reason == "error"
    assert "ZeroDivisionError" in output.error
    assert len(llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6


def test_functions_reach_the_model_and_the_workers(llm):
    assert llm.apply_model(lambda m: type(m).__name__) == ["Model"]
    assert llm.collective_rpc(lambda worker, x: (worker.rank, x), args=(3,)) == [(0, 3)]
    assert llm.collective_rpc("check_health") == [True]
    assert llm.collective_rpc("list_parameters")[0]
    with pytest.raises(RequestError, match="no method 'nonsense'"):
        llm.collective_rpc("nonsense")
    assert "embed_tokens" in repr(llm)
    assert llm.get_world_size() == 1


def test_the_prefix_cache_is_used_and_can_be_forgotten(llm):
    prompt = "The capital of France is Paris, and the future of AI is not yet written. " * 2
    llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_a_sleeping_engine_refuses_work_until_it_is_woken(llm):
    waiting = llm.enqueue("Hello", GREEDY, use_tqdm=False)
    llm.sleep(level=0, mode="keep")
    with pytest.raises(RequestError, match="wake_up"):
        llm.generate("Hello", GREEDY)
    with pytest.raises(RequestError, match="wake_up"):
        llm.wait_for_completion(use_tqdm=False)
    assert llm.wake_up()
    assert [o.request_id for o in llm.wait_for_completion(use_tqdm=False)] == waiting
    llm.sleep()
    assert not llm.wake_up(tags=["weights"])
    assert llm.wake_up(tags=["kv_cache"])
    llm.generate("Hello", GREEDY, use_tqdm=False)
    with pytest.raises(RequestError):
        llm.wake_up(tags=["nonsense"])
    with pytest.raises(RequestError):
        llm.sleep(mode="nonsense")


def test_metrics_count(llm):
    def values():
        single = [one for one in llm.get_metrics() if isinstance(one, Counter | Gauge)]
        return {(one.name, one.labels.get("finished_reason")): one.value for one in single}

    before = values()
    llm.generate(["Hello", "The"], GREEDY, use_tqdm=False)
    after = values()
    assert after["vllm:generation_tokens", None] - before["vllm:generation_tokens", None] == 12
    key = ("vllm:request_success", "length")
    assert after[key] - before[key] == 2
    assert after["vllm:num_requests_running", None] == 0


def test_a_profile_is_written(llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llm.start_profile("mine")
    llm.generate("Hello", SamplingParams(max_tokens=1), use_tqdm=False)
    llm.stop_profile()
    assert [p.name.startswith("mine") for p in (tmp_path / "quire_profile").iterdir()] == [True]
    with pytest.raises(RequestError):
        llm.stop_profile()


def test_the_engine_can_be_stepped_by_hand(llm):
    engine = llm.llm_engine
    engine.add_request("a", "Hello", SamplingParams(temperature=0, max_tokens=3))
    engine.add_request("b", "Hello", SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
    assert engine.get_num_unfinished_requests() == 2
    seen = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "a":
                seen.append(len(output.outputs[0].token_ids))
                if output.finished:
                    engine.abort_request("b")
    assert seen == [1, 2, 3]
    assert engine.model_config.max_model_len == 512


def test_an_engine_is_made_from_arguments(folder, caplog):
    args = EngineArgs(model=str(folder), max_model_len=64, worker_use_ray=True, swap_space=1)
    with caplog.at_level(logging.INFO, "quire"):
        llm = LLM.from_engine_args(args)
    assert llm.llm_engine.model_config.max_model_len == 64
    assert "worker_use_ray=True has no effect" in caplog.text
    assert LLMEngine.from_engine_args(args).get_tokenizer().eos_token == "<|im_end|>"


def test_pickled_weights_are_loaded_too(folder, tmp_path):
    import torch
    from safetensors.torch import load_file

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    made = [LLM(str(one), max_model_len=64) for one in (folder, tmp_path)]
    want, got = (ids(llm.generate("Hello", GREEDY, use_tqdm=False)) for llm in made)
    assert got == want


def test_weights_may_be_random(folder):
    llm = LLM(str(folder), load_format="dummy", dtype="bfloat16", max_model_len=64)
    assert ids(llm.generate("Hello", GREEDY, use_tqdm=False))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_too_little_memory_for_all_at_once_changes_nothing(folder, mode):
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    prompts = ["Hello", "The capital of France is", "What"] * 4
    wide = LLM(str(folder), max_model_len=128)
    tight = LLM(
        str(folder), max_model_len=128, num_gpu_blocks_override=20, preemption_mode=mode,
        swap_space=0.01, async_scheduling=True, block_size=8,
    )  # fmt: skip
    want = ids(wide.generate(prompts, params, use_tqdm=False))
    assert ids(tight.generate(prompts, params, use_tqdm=False)) == want
    counted = {m.name: m.value for m in tight.get_metrics() if isinstance(m, Counter)}
    assert counted["vllm:num_preemptions"] > 0


def test_ids_alone_will_do(folder):
    llm = LLM(str(folder), skip_tokenizer_init=True, max_model_len=64)
    output = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids
    with pytest.raises(RequestError, match="tokenizer"):
        llm.generate("text", GREEDY, use_tqdm=False)
    with pytest.raises(Unsupported):
        llm.get_tokenizer()


def test_threads_may_call_one_llm(llm):
    """As web frameworks do, which answer each visitor in a thread of his own."""
    prompts = [f"Hello, my name is {name}" for name in "abcdefgh"]
    want = [ids(llm.generate(one, GREEDY, use_tqdm=False)) for one in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(
            pool.map(
                lambda one: ids(llm.generate(one, GREEDY, use_tqdm=False)), prompts, timeout=60
            )
        )
    assert found == want


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sampling_params": {"temperature": 0}}, "sampling_params must be SamplingParams"),
        ({"sampling_params": "greedy"}, "sampling_params must be SamplingParams"),
        ({"sampling_params": SamplingParams}, "sampling_params must be SamplingParams"),
        ({"sampling_params": [5]}, "sampling_params must be SamplingParams"),
        ({"priority": "7"}, "priority must be an integer, got '7'"),
        ({"priority": [None]}, "priority must be an integer, got None"),
    ],
)
def test_arguments_of_wrong_types_are_named(llm, arguments, words):
    with pytest.raises(RequestError, match=words):
        llm.generate("a", **arguments, use_tqdm=False)


def test_tools_of_wrong_types_are_named(llm):
    with pytest.raises(RequestError, match=r"tools\[0\] must be a dict"):
        llm.chat([{"role": "user", "content": "a"}], tools=[5])
