"""beam_search against a plain implementation without cache, forks and rounds."""

import dataclasses
import itertools

import pytest

from quire import LLM, BeamSearchParams, EngineError, RequestError, SamplingParams, Unsupported
from quire.core.params import LoRARequest
from quire.engine.client.beam_search import BeamSearch
from tests.cpu.same_bits import needs_same_bits
from tests.cpu.tiny_models import write_model

PROMPTS = ["Hello, my name is", "The capital of France is", "你好"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("beams") / "llama")
    return LLM(str(folder), max_num_seqs=8, num_gpu_blocks_override=64, max_model_len=128)


@pytest.fixture(autouse=True)
def _clean(llm):
    yield
    stats = llm.llm_engine.engine.stats()
    assert (stats.running, stats.waiting, stats.held_blocks) == (0, 0, 0)
    llm.llm_engine.engine.check()


def best_next(llm, tokens, count):
    """The `count` likeliest next tokens with their logprobs, from scratch."""
    params = SamplingParams(
        temperature=0, max_tokens=1, logprobs=count, skip_reading_prefix_cache=True
    )
    found = (
        llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)[0].outputs[0].logprobs[0]
    )
    ranked = sorted(found.items(), key=lambda pair: pair[1].rank)
    return [(token, entry.logprob) for token, entry in ranked][:count]


def plain_beam_search(llm, prompt, width, length, eos=(), penalty=1.0):
    def score(beam):
        tokens, total, ended = beam
        return total / max(len(tokens) - ended, 1) ** penalty

    live, done = [((), 0.0, False)], []
    for _ in range(length):
        grown = [
            ((*tokens, token), total + value, token in eos)
            for tokens, total, _ in live
            for token, value in best_next(llm, [*prompt, *tokens], 2 * width)
        ]
        done += [beam for beam in grown if beam[2]]
        live = sorted((beam for beam in grown if not beam[2]), key=score, reverse=True)[:width]
    return sorted(done + live, key=score, reverse=True)[:width]


@pytest.mark.parametrize(
    ("width", "length", "penalty"), [(1, 6, 1.0), (3, 6, 1.0), (4, 5, 0.0), (2, 8, 2.0)]
)
def test_beams_are_those_of_a_plain_search(llm, width, length, penalty):
    params = BeamSearchParams(width, length, ignore_eos=True, length_penalty=penalty)
    outputs = llm.beam_search(PROMPTS, params)
    for text, output in zip(PROMPTS, outputs):
        prompt = llm.get_tokenizer().encode(text)
        want = plain_beam_search(llm, prompt, width, length, penalty=penalty)
        assert [s.tokens for s in output.sequences] == [[*prompt, *tokens] for tokens, _, _ in want]
        sums = [s.cum_logprob for s in output.sequences]
        assert sums == pytest.approx([total for _, total, _ in want], abs=1e-4)
        assert all(s.finish_reason == "length" for s in output.sequences)
        assert all(s.text == llm.get_tokenizer().decode(s.tokens, True) for s in output.sequences)


@pytest.mark.parametrize("penalty", [0.0, 0.4, -0.5])
def test_eos_completes_a_beam(llm, monkeypatch, penalty):
    prompt = llm.get_tokenizer().encode(PROMPTS[0])
    # Make tokens that the search meets in its second round end a sequence
    second = best_next(llm, [*prompt, best_next(llm, prompt, 1)[0][0]], 2)
    eos = frozenset(token for token, _ in second)
    monkeypatch.setattr(llm.llm_engine.inputs, "eos_ids", eos)
    found = llm.beam_search(PROMPTS[0], BeamSearchParams(3, 4, length_penalty=penalty))[0].sequences
    whole = BeamSearchParams(3, 4, length_penalty=penalty, include_stop_str_in_output=True)
    kept = llm.beam_search(PROMPTS[0], whole)[0].sequences
    want = plain_beam_search(llm, prompt, 3, 4, eos=eos, penalty=penalty)
    assert [s.tokens for s in kept] == [[*prompt, *tokens] for tokens, _, _ in want]
    assert [s.tokens for s in found] == [
        [*prompt, *tokens[: len(tokens) - ended]] for tokens, _, ended in want
    ]
    assert [s.finish_reason == "stop" for s in found] == [ended for _, _, ended in want]
    assert any(s.stop_reason in eos for s in found)


def test_beams_stay_within_what_is_allowed(llm):
    allowed = [10, 11, 12]
    found = llm.beam_search(
        "Hello", BeamSearchParams(2, 3, ignore_eos=True, allowed_token_ids=allowed)
    )
    prompt = llm.get_tokenizer().encode("Hello")
    assert len(found[0].sequences) == 2
    assert all(set(s.tokens[len(prompt) :]) <= set(allowed) for s in found[0].sequences)


def test_the_context_ends_a_search(llm):
    prompt = list(range(3, 128))
    found = llm.beam_search({"prompt_token_ids": prompt}, BeamSearchParams(2, 50, ignore_eos=True))
    assert all(len(s.tokens) == 128 for s in found[0].sequences)


@needs_same_bits
def test_requests_that_end_during_a_search_keep_their_outputs(llm):
    params = SamplingParams(temperature=0, max_tokens=3)
    want = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.enqueue(PROMPTS, params, use_tqdm=False)
    llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=12))
    found = llm.wait_for_completion(use_tqdm=False)
    assert [one.outputs for one in found] == [one.outputs for one in want]


def test_a_limit_at_once_changes_nothing(llm):
    params = BeamSearchParams(2, 4)
    assert llm.beam_search(PROMPTS, params) == llm.beam_search(PROMPTS, params, concurrency_limit=1)


def test_bad_prompts_and_later_features_are_refused(llm):
    with pytest.raises(RequestError):
        llm.beam_search(["ok", ""], BeamSearchParams(2, 2))
    with pytest.raises(Unsupported):
        llm.beam_search("a", BeamSearchParams(2, 2, watermarking=True))
    with pytest.raises(Unsupported):
        llm.beam_search("a", BeamSearchParams(2, 2), lora_request=LoRARequest("a", 1, "folder"))


def test_generate_takes_beam_search_parameters(llm):
    params = BeamSearchParams(2, 3, ignore_eos=True)
    beams = llm.beam_search("Hello", params)[0].sequences
    output = llm.generate("Hello", params, use_tqdm=False)[0]
    assert output.prompt == "Hello"
    assert [output.prompt_token_ids + o.token_ids for o in output.outputs] == [
        b.tokens for b in beams
    ]
    assert [o.cumulative_logprob for o in output.outputs] == [b.cum_logprob for b in beams]


def test_no_token_of_a_beam_is_computed_twice(llm, tmp_path, monkeypatch):
    own = LLM(str(write_model(tmp_path)), enable_prefix_caching=False, max_model_len=64)
    shared = []
    take = BeamSearch.add_update

    def recording(search, update):
        shared.append(update.cached_tokens)
        take(search, update)

    monkeypatch.setattr(BeamSearch, "add_update", recording)
    output = own.beam_search(PROMPTS[0], BeamSearchParams(2, 4, ignore_eos=True))[0]
    prompt = len(output.sequences[0].tokens) - 4
    assert shared == [0] + [prompt + i for i in (0, 0, 1, 1, 2, 2)]


def test_a_failed_search_loses_nothing_else(llm, monkeypatch):
    waiting = llm.enqueue("Hello", SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    submit, count = llm.llm_engine.engine._executor.submit, itertools.count()

    def failing(plan):
        result = submit(plan)
        if next(count) == 2:
            result = type(result)(
                dataclasses.replace(result.wait(), errors={len(plan.rows) - 1: "bad luck"})
            )
        return result

    monkeypatch.setattr(llm.llm_engine.engine._executor, "submit", failing)
    with pytest.raises(EngineError, match="bad luck"):
        llm.beam_search(PROMPTS[0], BeamSearchParams(2, 6, ignore_eos=True))
    assert [o.request_id for o in llm.wait_for_completion(use_tqdm=False)] == waiting
