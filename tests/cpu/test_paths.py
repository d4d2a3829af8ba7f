"""Every sampling feature gives the same answer on every path through the engine.

A table of features times a table of paths, through the public LLM, on a tiny random model. The
plain path runs each request alone, whole, uncached and without tapes; a few lines of plain Python
over transformers' logits check the plain path itself.
"""

import dataclasses
import json
import math
import re

import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.params import RequestOutputKind, StructuredOutputsParams
from quire.engine import build
from quire.sampling.processors import AdapterLogitsProcessor
from tests import tiers
from tests.cpu.inline_grammars import Grammars
from tests.cpu.same_bits import needs_same_bits
from tests.cpu.tiny_models import write_model

pytestmark = needs_same_bits

LONG = "The capital of France is Paris, and the future of AI is not yet written. " * 2
SHORT = "The largest ocean"
EOS = 2


def never(tokens):
    """A processor of one request: these ids are out."""

    def change(output_ids, logits):
        logits[tokens] = -math.inf
        return logits

    return change


def no_repeats(prompt_ids, output_ids, logits):
    logits[list({*prompt_ids, *output_ids})] -= 5.0
    return logits


def spoils(output_ids, logits):
    return logits * math.nan if len(output_ids) == 3 else logits


def raises(output_ids, logits):
    if len(output_ids) == 3:
        raise ZeroDivisionError("a bug of the user's")
    return logits


class Forbids(AdapterLogitsProcessor):
    """Engine-wide: a request names the ids that it excludes."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        ids = (params.extra_args or {}).get("forbidden")
        return never(ids) if ids else None


THING = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
VECTORS = 0.3 * torch.randn(41, 32, generator=torch.Generator().manual_seed(4))
SOME = [i % 9 < 4 for i in range(41)]
RANDOM = {"temperature": 0.9, "seed": 11}
GREEDY = {"temperature": 0.0}
FEATURES = {
    "greedy": (LONG, GREEDY),
    "greedy, one token of prompt": ([70], GREEDY),
    "temperature": (LONG, RANDOM),
    "temperature, short": (SHORT, RANDOM),
    "top_p": (LONG, RANDOM | {"top_p": 0.7}),
    "top_k": (SHORT, RANDOM | {"top_k": 9}),
    "min_p": (LONG, RANDOM | {"min_p": 0.05}),
    "all cuts": (LONG, RANDOM | {"min_p": 0.01, "top_k": 50, "top_p": 0.9}),
    "bias": (LONG, GREEDY | {"logit_bias": {70: 9.0, 80: -100.0, 71: 8.5}}),
    "allowed": (LONG, RANDOM | {"allowed_token_ids": [65, 66, 67, 68, 300]}),
    "min tokens": (SHORT, GREEDY | {"min_tokens": 9, "stop_token_ids": [*range(70, 190)]}),
    "stop ids": (LONG, RANDOM | {"stop_token_ids": [*range(100, 140)], "ignore_eos": True}),
    "ignore eos": (LONG, RANDOM | {"logit_bias": {EOS: 6.0}, "ignore_eos": True}),
    "eos": (LONG, RANDOM | {"logit_bias": {EOS: 7.0}}),
    "special tokens shown": (
        SHORT,
        RANDOM | {"logit_bias": {1: 6.0}, "skip_special_tokens": False},
    ),
    "special tokens hidden": (SHORT, RANDOM | {"logit_bias": {1: 6.0}}),
    "logprobs 0": (LONG, RANDOM | {"logprobs": 0}),
    "logprobs 3": (SHORT, GREEDY | {"logprobs": 3, "repetition_penalty": 1.3}),
    "logprobs of all": (LONG, RANDOM | {"logprobs": -1, "max_tokens": 4}),
    "flat logprobs": (LONG, RANDOM | {"logprobs": 2, "flat_logprobs": True}),
    "logprobs of ids": (LONG, RANDOM | {"logprob_token_ids": [5, 70, 6]}),
    "prompt logprobs": (LONG, GREEDY | {"prompt_logprobs": 2}),
    "prompt logprobs of all": (SHORT, RANDOM | {"prompt_logprobs": -1, "max_tokens": 3}),
    "prompt logprobs of one token": ([70], GREEDY | {"prompt_logprobs": 2, "logprobs": 1}),
    "n": (LONG, RANDOM | {"n": 3, "logprobs": 1}),
    "n with prompt logprobs": (LONG, RANDOM | {"n": 2, "prompt_logprobs": 1}),
    "best of": (LONG, RANDOM | {"n": 2, "best_of": 4}),
    "to the end": (LONG, RANDOM | {"max_tokens": None, "ignore_eos": True}),
    "truncated prompt": (LONG, GREEDY | {"truncate_prompt_tokens": 17}),
    "no text": (LONG, RANDOM | {"detokenize": False}),
    "not a number": (LONG, GREEDY | {"logits_processors": [spoils]}),
    "a processor that fails": (LONG, RANDOM | {"logits_processors": [raises]}),
    "vectors": ({"prompt_embeds": VECTORS}, GREEDY | {"logprobs": 2}),
    "vectors among ids": (
        {"prompt_embeds": VECTORS, "prompt_token_ids": [70] * 41, "prompt_is_token_ids": SOME},
        RANDOM | {"n": 2, "repetition_penalty": 1.3},
    ),
    "salted": ({"prompt": LONG, "cache_salt": "mine"}, GREEDY),
    "no reading of the cache": (LONG, GREEDY | {"skip_reading_prefix_cache": True}),
    # those with a history come last: the youngest are preempted
    "repetition penalty": (LONG, GREEDY | {"ignore_eos": True, "repetition_penalty": 1.6}),
    "frequency penalty": (SHORT, GREEDY | {"ignore_eos": True, "frequency_penalty": 1.9}),
    "presence penalty": (
        LONG,
        RANDOM | {"ignore_eos": True, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    ),
    "bad words": (LONG, RANDOM | {"ignore_eos": True, "bad_words": ["a", "the", "e is", "ing"]}),
    "own processor": (
        LONG,
        GREEDY | {"ignore_eos": True, "logits_processors": [never([70, 71]), no_repeats]},
    ),
    "engine's processor": (
        LONG,
        GREEDY | {"ignore_eos": True, "extra_args": {"forbidden": list(range(3, 200))}},
    ),
    "JSON": (LONG, RANDOM | {"structured_outputs": {"json": THING}, "logprobs": 1}),
    "JSON, penalised, n": (
        SHORT,
        RANDOM | {"structured_outputs": {"json": THING}, "frequency_penalty": 0.8, "n": 3},
    ),
    "regex": (LONG, GREEDY | {"structured_outputs": {"regex": "[a-z ]{5,}(!|[?])"}}),
    "regex, min tokens": (
        LONG,
        GREEDY
        | {"structured_outputs": {"regex": "[a-f]+"}, "min_tokens": 9, "logit_bias": {EOS: 30.0}},
    ),
    "choice": (SHORT, RANDOM | {"structured_outputs": {"choice": ["the ocean", "the future"]}}),
    "grammar": (
        LONG,
        GREEDY | {"structured_outputs": {"grammar": 'root ::= "(" root ")" | [a-c]+'}},
    ),
}
FAILS = ("not a number", "a processor that fails")
BASE = {
    "max_model_len": 128,
    "max_logprobs": -1,
    "logits_processors": [Forbids],
    "enable_prompt_embeds": True,
    "use_tqdm_on_load": False,
}
PLAIN = BASE | {"enable_prefix_caching": False, "enforce_eager": True}
TIGHT = {"num_gpu_blocks_override": 18, "enable_prefix_caching": False}
CACHED = TIGHT | {"enable_prefix_caching": True}
HOST = CACHED | {"kv_offloading_size": 0.005, "block_size": 4, "num_gpu_blocks_override": 72}
PATHS = {
    "in a batch": {},
    "in small chunks": {"max_num_batched_tokens": 5},
    "one prompt in parts": {"max_num_partial_prefills": 1, "long_prefill_token_threshold": 16},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    "uncached": {"enable_prefix_caching": False},
    "eager": {"enforce_eager": True},
    "blocks of 8": {"block_size": 8},
    "two seats": {"max_num_seqs": 2},
    "by priority": {"scheduling_policy": "priority"},
    "preempted": TIGHT,
    "preempted, with a prefix cache": CACHED,
    "preempted, with a host tier": HOST,
    "overlapped": {"steps_in_flight": 2},
    "overlapped, in small chunks": {"steps_in_flight": 2, "max_num_batched_tokens": 9},
    "overlapped, preempted": {"steps_in_flight": 2} | TIGHT,
    "overlapped, with a host tier": {"steps_in_flight": 2} | HOST,
    "three steps in flight": {"steps_in_flight": 3} | TIGHT,
}
CONTAINED = ("preempted", "overlapped", "overlapped, preempted")
"""Paths of which others are harder: with chunks, a host tier, three steps in flight."""
EVERYDAY = [path for path in PATHS if path not in CONTAINED]
BF16_PATHS = ("in a batch", "in small chunks", "blocks of 8", "overlapped, with a host tier")
IN_BF16 = [name for name in FEATURES if name not in FAILS][:: tiers.amount(2, 1)]


@pytest.fixture(autouse=True, scope="module")
def grammars_at_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_grammars", Grammars)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def prompt_of(name):
    return FEATURES[name][0]


def params_of(name, **more):
    given = {"max_tokens": 30} | FEATURES[name][1] | more
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given)


def seen(output):
    """All that a caller can see of an output, but for its id, its times and the cached tokens."""
    shown = dataclasses.asdict(output)
    for name in ("request_id", "metrics", "num_cached_tokens"):
        del shown[name]
    shown["prompt_logprobs"] = listed(output.prompt_logprobs)
    for one, answer in zip(shown["outputs"], output.outputs, strict=True):
        one["logprobs"] = listed(answer.logprobs)
        one["token_ids"] = list(answer.token_ids)
    return shown


def listed(logprobs):
    return None if logprobs is None else [entry or None for entry in logprobs]


def together(llm, names=tuple(FEATURES)):
    given = {"priority": [i % 3 for i in range(len(names))]} if by_priority(llm) else {}
    prompts, params = [prompt_of(n) for n in names], [params_of(n) for n in names]
    outputs = llm.generate(prompts, params, use_tqdm=False, **given)
    return dict(zip(names, outputs, strict=True))


def by_priority(llm):
    return llm.llm_engine.config.scheduler.policy == "priority"


def alone(folder, dtype, names=FEATURES):
    llm = LLM(str(folder), dtype=dtype, **PLAIN)
    return {
        name: seen(llm.generate([prompt_of(name)], params_of(name), use_tqdm=False)[0])
        for name in names
    }


@pytest.fixture(scope="module")
def plain(folder):
    return alone(folder, "float32")


@pytest.mark.slow("its fixture runs each feature alone")
def test_constrained_texts_match_their_constraint(plain):
    texts = {name: [one["text"] for one in out["outputs"]] for name, out in plain.items()}
    for text in texts["JSON"] + texts["JSON, penalised, n"]:
        assert set(json.loads(text)) == {"name", "sizes"}
    assert re.fullmatch("[a-z ]{5,}(!|[?])", texts["regex"][0])
    assert re.fullmatch("[a-f]{2,}", texts["regex, min tokens"][0])
    assert texts["choice"][0] in ("the ocean", "the future")
    assert re.fullmatch(r"\(*[a-c]+\)*", texts["grammar"][0])
    ids = plain["regex, min tokens"]["outputs"][0]["token_ids"]
    assert (len(ids), ids[-1]) == (10, EOS)


def assert_same(outputs, want):
    wrong = {name: out for name, out in outputs.items() if seen(out) != want[name]}
    shown = {n: ([o.token_ids for o in out.outputs], want[n]) for n, out in wrong.items()}
    assert not wrong, f"{sorted(wrong)}: {str(shown)[:2000]}"


def assert_clean(llm):
    engine = llm.llm_engine.engine
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.held_host_blocks, stats.held_blocks) == (0, 0, 0, 0)
    engine.check()
    assert llm.reset_prefix_cache()
    assert engine.stats().free_blocks == stats.blocks


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", [*EVERYDAY, *tiers.long(*CONTAINED)])
def test_a_feature_gives_the_same_answer(folder, plain, path):
    llm = LLM(str(folder), dtype="float32", **BASE | PATHS[path])
    outputs = together(llm)
    assert_same(outputs, plain)
    if "num_gpu_blocks_override" in PATHS[path]:
        assert llm.llm_engine.engine.stats().preemptions > 5
    if "kv_offloading_size" in PATHS[path]:
        assert llm.llm_engine.engine.stats().host_loaded_blocks > 30
    assert_clean(llm)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_feature_gives_the_same_answer_as_a_prefix_hit(folder, plain, depth):
    llm = LLM(str(folder), dtype="float32", steps_in_flight=depth, **BASE)
    together(llm)
    outputs = together(llm)
    assert_same(outputs, plain)
    for name, output in outputs.items():
        hit = output.num_cached_tokens
        skips = output.prompt_logprobs is not None or "no reading" in name
        full = (len(output.prompt_token_ids) - 1) // 16 * 16
        assert hit == (0 if skips else full), name
    assert_clean(llm)


STOPPED = "The largest ocean is the Pacific"


def stop_cases(text):
    """Stop strings from the model's output: in a token, over tokens, never, and two at once."""
    first, over = text[3:4], text[2:9]
    return [
        {"stop": first},
        {"stop": [over]},
        {"stop": [over], "include_stop_str_in_output": True, "logprobs": 1},
        {"stop": [text[8:12], over]},
        {"stop": [first], "min_tokens": 12},
        {"stop": ["never said", over], "n": 2},
        {"stop": ["never said"], "best_of": 2},
        {"stop": [over], "stop_token_ids": [*range(60, 90)]},
    ]


@pytest.fixture(scope="module")
def stopped_alone(folder):
    """(parameters, outputs) of requests with stop strings."""
    quiet = RANDOM | {"max_tokens": 30, "ignore_eos": True}
    plain = LLM(str(folder), dtype="float32", **PLAIN)
    whole = plain.generate([STOPPED], SamplingParams(**quiet), use_tqdm=False)[0].outputs[0]
    params = [SamplingParams(**quiet | more) for more in stop_cases(whole.text)]
    want = [plain.generate([STOPPED], one, use_tqdm=False)[0] for one in params]
    assert [o.stop_reason for o in want[1].outputs] == [whole.text[2:9]]
    assert want[1].outputs[0].text == whole.text[: whole.text.index(whole.text[2:9])]
    return params, want


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", [*EVERYDAY, *tiers.long(*CONTAINED)])
def test_stop_strings_end_the_text_at_the_same_place(folder, stopped_alone, path):
    params, want = stopped_alone
    llm = LLM(str(folder), dtype="float32", **BASE | PATHS[path])
    outputs = llm.generate([STOPPED] * len(params), params, use_tqdm=False)
    assert [seen(o) for o in outputs] == [seen(o) for o in want]
    assert_clean(llm)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("depth", [1, 2])
def test_streamed_outputs_add_up_to_the_whole(folder, plain, kind, depth):
    llm = LLM(str(folder), dtype="float32", steps_in_flight=depth, **BASE)
    engine = llm.llm_engine
    for name in FEATURES:
        prompt, params = prompt_of(name), params_of(name, output_kind=kind)
        engine.add_request(name, prompt, params)
    parts = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            parts.setdefault(output.request_id, []).append(output)
    for name in FEATURES:
        whole = added_up(parts[name], kind)
        want = [
            (a["index"], a["text"], a["token_ids"], a["finish_reason"], a["logprobs"])
            for a in plain[name]["outputs"]
        ]
        assert whole == want, name
        assert [o.finished for o in parts[name]] == [False] * (len(parts[name]) - 1) + [True]
        told = [listed(o.prompt_logprobs) for o in parts[name] if o.prompt_logprobs is not None]
        if plain[name]["prompt_logprobs"] is not None:
            assert told[0] == plain[name]["prompt_logprobs"]


def added_up(outputs, kind):
    """index -> (text, ids, finish, logprobs), from a stream."""
    answers = {}
    for output in outputs:
        for one in output.outputs:
            logprobs = listed(one.logprobs)
            now = [one.text, list(one.token_ids), one.finish_reason, logprobs]
            if kind is RequestOutputKind.DELTA and one.index in answers:
                text, ids, _, before = answers[one.index]
                both = None if logprobs is None else before + logprobs
                now = [text + one.text, ids + now[1], one.finish_reason, both]
            answers[one.index] = now
    return [(index, *answers[index]) for index in sorted(answers)]


@pytest.fixture(scope="module")
def plain_in_bfloat16(folder):
    return alone(folder, "bfloat16", IN_BF16)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", BF16_PATHS)
def test_a_feature_gives_the_same_answer_in_bfloat16(folder, plain_in_bfloat16, path):
    outputs = together(LLM(str(folder), dtype="bfloat16", **BASE | PATHS[path]), IN_BF16)
    assert_same(outputs, plain_in_bfloat16)
