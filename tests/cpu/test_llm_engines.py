"""LLM with several engines: the same outputs as one, wherever they run and whichever engine dies."""

import json
import signal
import threading

import psutil
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.core.params import BeamSearchParams, LoRARequest, StructuredOutputsParams
from quire.errors import RequestError, Unsupported

pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.slow("two engines in processes of their own"),
]

OPTIONS = {"kv_cache_memory_bytes": 1 << 26, "max_num_batched_tokens": 256}
OPTIONS |= {"enable_lora": True, "max_cpu_loras": 2}
PROMPTS = ["Once upon a time", "The capital of France is", "Paris is", "1, 2, 3,"] * 4
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=1, seed=7, max_tokens=20, n=3, logprobs=2),
    SamplingParams(temperature=0, max_tokens=12, stop=[" the"], prompt_logprobs=1),
    SamplingParams(
        temperature=0.8,
        seed=4,
        max_tokens=12,
        structured_outputs=StructuredOutputsParams(regex="[a-z ]{5,20}"),
    ),
] * 4


@pytest.fixture(scope="module")
def several():
    return LLM("embedded", data_parallel_size=2, **OPTIONS)


@pytest.fixture(scope="module")
def one():
    return LLM("embedded", **OPTIONS)


def plain(outputs):
    """What callers compare."""
    return [
        (
            output.prompt_token_ids,
            output.prompt_logprobs,
            [(o.token_ids, o.text, o.logprobs, o.finish_reason) for o in output.outputs],
        )
        for output in outputs
    ]


def engines_of_this_process():
    """Those of LLM with several engines, in the order of their start."""
    children = psutil.Process().children()
    return [child for child in children if "quire.engine.core.process_main" in child.cmdline()]


def test_outputs_are_those_of_one_engine(several, one):
    bars = []

    def bar(iterable=None, **named):
        bars.append(named.get("desc"))
        return Bar(iterable)

    class Bar:
        postfix, n = "", 0

        def __init__(self, items):
            self.items = items

        def __iter__(self):
            return iter(self.items)

        def update(self, count):
            self.n += count
            counted.append(count)

        def set_postfix_str(self, *given, **named):
            pass

        def refresh(self):
            pass

        def close(self):
            pass

    counted = []
    want = plain(one.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert plain(several.generate(PROMPTS, PARAMS, use_tqdm=bar)) == want
    assert bars == ["Adding requests", "Processed prompts"]
    assert sum(counted) == len(PROMPTS)
    metrics = several.get_metrics()
    tokens = {m.labels["engine"]: m.value for m in metrics if m.name == "vllm:prompt_tokens"}
    assert sorted(tokens) == ["0", "1"]
    assert min(tokens.values()) > max(tokens.values()) / 4
    assert {m.labels["engine"] for m in metrics if m.name == "vllm:request_success"} == {"all"}
    assert several.get_world_size() == 2
    assert repr(several) == "LLM('embedded', data_parallel_size=2)"


def test_beams_and_vectors_are_those_of_one_engine(several, one):
    beam = BeamSearchParams(beam_width=3, max_tokens=6)
    want, got = (
        [b.tokens for b in llm.beam_search(PROMPTS[:4], beam)[0].sequences]
        for llm in (one, several)
    )
    assert got == want
    for mine, other in zip(several.embed(PROMPTS), one.embed(PROMPTS)):
        assert mine.outputs.embedding == other.outputs.embedding


def test_adapters_are_loaded_in_all_engines(several, one, tmp_path):
    generator = torch.Generator().manual_seed(0)
    shapes = {"lora_A": (4, 256), "lora_B": (768, 4)}
    weights = {
        f"base_model.model.model.layers.{i}.mlp.up_proj.{part}.weight": torch.randn(
            shape, generator=generator
        )
        / 4
        for i in range(8)
        for part, shape in shapes.items()
    }
    save_file(weights, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 64, "target_modules": ["up_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    each = [None, LoRARequest("a", 1, str(tmp_path))] * 4
    found = [
        plain(llm.generate(PROMPTS[:8], PARAMS[0], lora_request=each, use_tqdm=False))
        for llm in (one, several)
    ]
    assert found[0] == found[1]
    plainly = plain(several.generate(PROMPTS[:8], PARAMS[0], use_tqdm=False))
    assert [a == b for a, b in zip(plainly, found[1])] == [True, False] * 4
    assert several.llm_engine.list_loras() == {1}
    assert several.llm_engine.pin_lora(1)
    assert several.llm_engine.remove_lora(1)
    assert not several.llm_engine.remove_lora(1)


def test_sleep_frees_and_wakes_all(several):
    first = several.generate(PROMPTS[:4], PARAMS[0], use_tqdm=False)
    several.sleep(1)
    with pytest.raises(RequestError, match="sleeps"):
        several.generate("a")
    several.wake_up()
    assert plain(several.generate(PROMPTS[:4], PARAMS[0], use_tqdm=False)) == plain(first)
    assert several.reset_prefix_cache()


def test_what_cannot_run_on_several_engines_is_refused(several):
    function = SamplingParams(logits_processors=[lambda ids, logits: logits])
    with pytest.raises(Unsupported, match="need one engine"):
        several.generate("a", function)
    for call in (lambda: several.apply_model(repr), lambda: several.collective_rpc("x")):
        with pytest.raises(Unsupported, match="data_parallel_size=1"):
            call()
    with pytest.raises(Unsupported, match="AsyncLLM"):
        several.start_profile()
    refused = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    with pytest.raises(RequestError):
        several.generate(["a", "b"], [PARAMS[0], refused], use_tqdm=False)
    assert not several.llm_engine.has_unfinished_requests()
    assert len(several.generate("a", PARAMS[0], use_tqdm=False)) == 1


def test_outputs_are_the_same_when_an_engine_dies(several, one):
    params = SamplingParams(temperature=1, seed=3, max_tokens=60, n=2, ignore_eos=True)
    want = plain(one.generate(PROMPTS, params, use_tqdm=False))
    victim = engines_of_this_process()[1]
    threading.Timer(0.05, victim.send_signal, [signal.SIGKILL]).start()
    assert plain(several.generate(PROMPTS, params, use_tqdm=False)) == want
    victim.wait(20)


def test_interrupted_requests_are_gone(several):
    long = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        several.generate(PROMPTS, long, use_tqdm=False)
    assert several.llm_engine.engine._unfinished == set()
    assert len(several.generate(PROMPTS, PARAMS[0], use_tqdm=False)) == len(PROMPTS)
