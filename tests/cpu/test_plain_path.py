"""The plain path against transformers' logits and a few lines of plain Python.

test_paths.py holds every other path to this one.
"""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from tests.cpu.tiny_models import write_model

PROMPTS = ["The capital of France is Paris, and the future of AI is not yet", "What", [70, 70, 5]]
EOS = 2
ENDS = [EOS, *range(60, 130)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), dtype="float32", max_model_len=128, max_logprobs=-1)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs_of(model, ids):
    """[len(ids), V] as lists of floats: the logits of the next token at each position."""
    return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def changed(x, prompt, outputs, words, said):
    """The logits from which the next token is taken. Any constant may be added to a row."""
    x = x.clone()
    if said.get("allowed_token_ids"):
        kept = x[said["allowed_token_ids"]]
        x[:] = -math.inf
        x[said["allowed_token_ids"]] = kept
    for word in words:
        if [*outputs, word[-1]][-len(word) :] == word:
            x[word[-1]] = -math.inf
    if len(outputs) < said.get("min_tokens", 0):
        x[[EOS, *said.get("stop_token_ids", ())]] = -math.inf
    for token, bias in said.get("logit_bias", {}).items():
        x[token] += max(-100.0, min(100.0, bias))
    r = said.get("repetition_penalty", 1.0)
    for token in {*prompt, *outputs}:
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(outputs):
        x[token] -= said.get("frequency_penalty", 0.0) * outputs.count(token)
        x[token] -= said.get("presence_penalty", 0.0)
    return x


@torch.no_grad()
def answer(model, tokenizer, prompt, said, most=20):
    """(tokens, raw logprobs at each, finish)."""
    outputs, raws = [], []
    words = [
        tokenizer.encode(text, add_special_tokens=False)
        for word in said.get("bad_words", ())
        for text in (word, " " + word)
    ]
    while len(outputs) < most:
        logits = model(torch.tensor([prompt + outputs])).logits[0, -1].double()
        raws.append(logits.log_softmax(-1))
        token = int(changed(logits, prompt, outputs, words, said).argmax())
        outputs.append(token)
        ends = [EOS, *said.get("stop_token_ids", ())]
        if token in ends and len(outputs) >= said.get("min_tokens", 0):
            return outputs, raws, "stop", None if token == EOS else token
    return outputs, raws, "length", None


CASES = {
    "greedy": {},
    "repetition penalty": {"repetition_penalty": 1.7},
    "repetition reward": {"repetition_penalty": 0.6},
    "frequency penalty": {"frequency_penalty": 1.5},
    "frequency reward": {"frequency_penalty": -1.5},
    "presence penalty": {"presence_penalty": 2.0},
    "all penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
    },
    "bias": {"logit_bias": {70: 3.0, 81: 250.0, 82: 99.0, 5: -101.0}, "frequency_penalty": 2.0},
    "allowed ids": {"allowed_token_ids": [65, 70, 80, 90, 300], "frequency_penalty": 2.0},
    "bad words": {"bad_words": ["a", "the", "e is", "ing", "é"]},
    "min tokens": {"min_tokens": 7, "stop_token_ids": ENDS[1:]},
    "stop ids": {"stop_token_ids": ENDS[1:]},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(llm, model, name):
    said = CASES[name]
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=4, **said)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for output in outputs:
        found = output.outputs[0]
        ids, raws, finish, reason = answer(
            model, llm.get_tokenizer(), output.prompt_token_ids, said
        )
        assert list(found.token_ids) == ids
        assert (found.finish_reason, found.stop_reason) == (finish, reason)
        total = sum(float(raw[token]) for raw, token in zip(raws, ids))
        assert found.cumulative_logprob == pytest.approx(total, abs=1e-3)
        for entry, raw, token in zip(found.logprobs, raws, ids, strict=True):
            best = raw.argsort(descending=True, stable=True)[:4].tolist()
            assert list(entry) == list(dict.fromkeys([token, *best]))
            for one, logprob in entry.items():
                assert logprob.logprob == pytest.approx(float(raw[one]), abs=1e-4)
                assert logprob.rank == 1 + int((raw > raw[one]).sum())
                assert logprob.decoded_token is not None


def test_prompt_logprobs_are_those_of_transformers(llm, model):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        ids = output.prompt_token_ids
        rows = logprobs_of(model, ids)
        assert output.prompt_logprobs[0] is None
        for i, entry in enumerate(output.prompt_logprobs[1:], 1):
            raw = rows[i - 1]
            best = raw.argsort(descending=True, stable=True)[:3].tolist()
            assert list(entry) == list(dict.fromkeys([ids[i], *best]))
            for one, logprob in entry.items():
                assert logprob.logprob == pytest.approx(float(raw[one]), abs=1e-4)
                assert logprob.rank == 1 + int((raw > raw[one]).sum())
        assert len(output.prompt_logprobs) == len(ids)


def test_chosen_ids_are_scored_in_their_order(llm, model):
    params = SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=[9, 70, 5])
    output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    found = output.outputs[0]
    rows = logprobs_of(model, [*output.prompt_token_ids, *found.token_ids])
    for i, (entry, token) in enumerate(zip(found.logprobs, found.token_ids, strict=True)):
        raw = rows[len(output.prompt_token_ids) + i - 1]
        assert list(entry) == list(dict.fromkeys([token, 9, 70, 5]))
        for one, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(raw[one]), abs=1e-4)
            assert logprob.rank == 1 + int((raw > raw[one]).sum())


@pytest.mark.parametrize(
    "cut", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.4}, {"top_k": 40, "top_p": 0.5}]
)
@torch.no_grad()
def test_drawn_tokens_lie_within_the_cut(llm, model, cut):
    params = SamplingParams(n=12, seed=3, temperature=1.3, max_tokens=6, ignore_eos=True, **cut)
    output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    drawn = set()
    for found in output.outputs:
        ids = [*output.prompt_token_ids, *found.token_ids]
        rows = model(torch.tensor([ids])).logits[0].double() / 1.3
        for i, token in enumerate(found.token_ids):
            p = rows[len(output.prompt_token_ids) + i - 1].softmax(-1)
            better = p[p > p[token]]
            assert len(better) < cut.get("top_k", len(p))
            if "top_k" in cut:
                p = p / p.topk(cut["top_k"]).values.sum()
                better = p[p > p[token]]
            assert float(better.sum()) < cut.get("top_p", 1.0) + 1e-5
            assert float(p[token] / p.max()) >= cut.get("min_p", 0.0) - 1e-5
            drawn.add(token)
    assert len(drawn) > 3
