"""Grammars from end to end, in this process: a real worker, the embedded model."""

from __future__ import annotations

import json
import time

import psutil
import pytest

from quire import LLM, SamplingParams
from quire.core.params import StructuredOutputsParams
from quire.errors import ConfigError, RequestError

NUMBER = StructuredOutputsParams(regex="[0-9]{3}")


@pytest.fixture(scope="module")
def llm():
    return LLM("embedded", max_model_len=512, disable_log_stats=True)


def asked(max_tokens=40, **more):
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=1, **more)


def workers():
    names = [(one, one.name()) for one in psutil.Process().children()]
    return [one for one, name in names if name == "quire-grammars"]


def test_nothing_is_started_for_requests_without_constraints(llm):
    before = workers()
    llm.generate(["a"], asked(), use_tqdm=False)
    assert workers() == before
    assert llm.llm_engine.engine.snapshot().grammars.compiled == 0


def test_constrained_and_free_requests_run_together(llm):
    free, bound = llm.generate(
        ["a", "b"], [asked(), asked(structured_outputs=NUMBER)], use_tqdm=False
    )
    assert bound.outputs[0].text.isdigit()
    assert len(bound.outputs[0].text) == 3
    assert bound.outputs[0].finish_reason == "stop"
    assert free.outputs[0].text
    figures = llm.llm_engine.engine.snapshot().grammars
    assert (figures.compiled, figures.waiting) == (1, 0)


def test_a_free_request_does_not_wait_for_the_grammar_of_one_before_it(llm):
    engine = llm.llm_engine
    slow = "|".join(f"(a{i}|b{i})" * 3 for i in range(40))
    bound = asked(structured_outputs=StructuredOutputsParams(regex=slow))
    engine.add_request("bound", "a", bound)
    engine.add_request("free", "b", asked(5))
    first = next(one for _ in range(10_000) for one in engine.step() if one.finished)
    assert first.request_id == "free"
    engine.abort_request("bound")
    assert engine.engine.empty
    engine.engine.check()


def test_a_text_that_cannot_be_whole_is_refused_by_name(llm):
    with pytest.raises(RequestError, match="has 3 tokens") as caught:
        llm.generate(["a", "b"], [asked(), asked(2, structured_outputs=NUMBER)], use_tqdm=False)
    assert caught.value.param == "max_tokens"
    assert llm.llm_engine.engine.empty
    assert llm.generate(["a"], asked(3), use_tqdm=False)


def test_the_time_it_waited_has_a_name_and_all_times_add_up(llm):
    engine = llm.llm_engine.engine
    schema = {"type": "object", "properties": {"waited": {"type": "boolean"}}}
    params = asked(structured_outputs=StructuredOutputsParams(json=schema))
    prepared = llm.llm_engine.inputs.process("a", params, request_id="t")
    llm.llm_engine.engine.add(prepared.request)
    updates = []
    while not engine.empty:
        if engine.idle:
            engine.wait(0.01)
        updates += engine.step()
    timing = updates[-1].timing
    assert timing.grammar > 0
    assert sum(timing.breakdown) == pytest.approx(timing.total)


def test_an_llm_that_waits_for_a_grammar_does_not_spin(llm):
    engine = llm.llm_engine
    schema = {"properties": {"spun": {"type": "boolean"}}, "additionalProperties": False}
    schema["type"] = "object"
    engine.add_request("a", "a", asked(structured_outputs=StructuredOutputsParams(json=schema)))
    began, cpu, naps = time.monotonic(), time.thread_time(), 0
    while engine.engine.idle:
        engine.step()
        naps += 1
    waited = time.monotonic() - began
    assert naps <= waited / 0.04 + 2
    assert time.thread_time() - cpu < max(waited / 2, 0.1)
    while engine.has_unfinished_requests():
        last = engine.step()
    assert set(json.loads(last[-1].outputs[0].text)) <= {"spun"}


def test_the_workers_end_with_the_engine_that_started_them():
    own = LLM("embedded", max_model_len=256, disable_log_stats=True)
    before = workers()
    own.generate(["a"], asked(structured_outputs=NUMBER), use_tqdm=False)
    [worker] = [one for one in workers() if one not in before]
    own.llm_engine.engine.shutdown()
    assert not worker.is_running()


def test_without_a_tokenizer_structure_is_refused():
    own = LLM("embedded", skip_tokenizer_init=True, max_model_len=256, disable_log_stats=True)
    with pytest.raises(RequestError, match="tokenizer"):
        own.generate(
            [{"prompt_token_ids": [5]}],
            asked(detokenize=False, structured_outputs=NUMBER),
            use_tqdm=False,
        )


def test_a_backend_that_is_not_installed_is_found_out_at_the_start(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="outlines"):
        LLM("embedded", structured_outputs_config={"backend": "outlines"})
