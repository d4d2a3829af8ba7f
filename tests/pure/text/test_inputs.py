"""Allowed inputs of requests, and the errors of others."""

import random

import pytest

from quire.core.params import SamplingParams
from quire.errors import RequestError, TooLong, Unsupported
from quire.text.input_processor import InputProcessor
from quire.text.tokenizing.tokenizer import Tokenizer
from tests.pure.text.made import face


def processor(name="byte_level", **options):
    tokenizer = face(name) if name else None
    options = {"max_model_len": 32, "vocab_size": 1000, "max_logprobs": 5} | options
    return InputProcessor(tokenizer, **options)


def made(prompt, inputs=None, request_id="r", **fields):
    params = SamplingParams(**fields)
    return (inputs or processor()).process(prompt, params, request_id=request_id)


# -- prompts -----------------------------------------------------------------------------------


def test_the_forms_of_a_prompt_give_the_same_ids():
    ids = face("byte_level").encode("hello world")
    for prompt in (
        "hello world",
        ids,
        tuple(ids),
        {"prompt": "hello world"},
        {"prompt_token_ids": ids},
    ):
        assert made(prompt).request.prompt == tuple(ids)
    assert made({"prompt": "shown", "prompt_token_ids": ids}).prompt_text == "shown"
    assert made("hello world").prompt_text == "hello world"
    assert made(ids).prompt_text is None
    assert made({"prompt": ids}).request.prompt == tuple(ids)


def test_vectors_of_other_libraries_are_ids():
    numpy = pytest.importorskip("numpy")
    assert made(numpy.array([5, 6, 7])).request.prompt == (5, 6, 7)
    assert {type(i) for i in made(numpy.array([5, 6])).request.prompt} == {int}


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "is empty"),
        ([], "is empty"),
        ({"prompt": ""}, "is empty"),
        ([1, -1], r"holds -1; token ids of this model are in \[0, 1000\)"),
        ([1, 1000], "holds 1000"),
        ([2**63], "holds 9223372036854775808"),
        ([1, "a"], r"\[1\] must be a token id"),
        ([[1, 2]], r"\[0\] must be a token id"),
        ([True], r"\[0\] must be a token id"),
        ([1.0], r"\[0\] must be a token id"),
        (5, "list of token ids"),
        (None, "list of token ids"),
        (b"hello", "list of token ids"),
        ({1, 2}, "list of token ids"),
        ({}, "needs 'prompt'"),
        ({"promt": "x"}, "did you mean 'prompt'"),
        ({"prompt": 5}, "list of token ids"),
        ({"prompt": 5, "prompt_token_ids": [1]}, "must be text"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "cache_salt": "a/b"}, "cache_salt"),
        ({"prompt": "x", "cache_salt": "a" * 129}, "cache_salt"),
        ("\ud800", "surrogate"),
        ("ok \udfff", r"U\+DFFF at character 3"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt, said):
    with pytest.raises(RequestError, match=said):
        made(prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        {"encoder_prompt": "x", "decoder_prompt": "y"},
        {"prompt": "x", "multi_modal_data": {"image": 1}},
        {"prompt_token_ids": [1], "token_type_ids": [0]},
    ],
)
def test_what_this_build_cannot_read_is_refused_by_name(prompt):
    with pytest.raises(Unsupported):
        made(prompt)
    assert made({"prompt": "x", "multi_modal_data": None}).request.prompt


def test_a_prompt_must_leave_room_for_one_token():
    assert made([1] * 31).request.stop.max_tokens == 1
    for n in (32, 33):
        with pytest.raises(TooLong, match=rf"context length is 32 tokens.*has {n} tokens"):
            made([1] * n)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch):
    def encode(self, *args):
        raise AssertionError("tokenized")

    inputs = processor()
    monkeypatch.setattr(Tokenizer, "encode", encode)
    with pytest.raises(TooLong, match="1000000 characters"):
        made("x" * 10**6, inputs)


def test_special_tokens_are_added_unless_a_template_wrote_them():
    inputs = processor("llama", max_model_len=64)
    assert made("hello", inputs).request.prompt[0] == 1
    plain = inputs.process("hello", SamplingParams(), request_id="r", add_special_tokens=False)
    assert plain.request.prompt[0] != 1
    by_hand = inputs.process(
        "hello", SamplingParams(), request_id="r", tokenization={"add_special_tokens": False}
    )
    assert by_hand.request.prompt == plain.request.prompt


def test_bos_twice_is_reported(caplog):
    made("<s>hello", processor("llama", max_model_len=64))
    assert "twice" in caplog.text


@pytest.mark.parametrize(
    ("tokenization", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 2, 3]),
        ({"truncation": True, "max_length": 2}, [8, 9]),
        ({"truncate_prompt_tokens": None}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"truncate_prompt_tokens": 20}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_a_prompt_is_truncated_as_requested(tokenization, kept):
    prepared = processor().process(
        list(range(1, 10)), SamplingParams(), request_id="r", tokenization=tokenization
    )
    assert list(prepared.request.prompt) == kept


def test_minus_one_cuts_to_what_leaves_room_for_the_output():
    assert len(made([1] * 100, truncate_prompt_tokens=-1, max_tokens=10).request.prompt) == 22
    assert len(made("a b c " * 1000, truncate_prompt_tokens=-1, max_tokens=10).request.prompt) == 22
    assert len(made([1] * 100, truncate_prompt_tokens=-1, max_tokens=None).request.prompt) == 31


def test_a_text_is_cut_to_its_end_with_special_tokens_kept():
    tokenizer = face("llama")
    ids = tokenizer.encode("hello the world")
    prepared = made("hello the world", processor("llama"), truncate_prompt_tokens=3)
    assert list(prepared.request.prompt) == [1, *ids[-2:]]


@pytest.mark.parametrize(
    "tokenization",
    [
        {"padding": True},
        {"truncation_side": "up"},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": 33},
    ],
)
def test_other_wishes_for_tokenizing_are_refused(tokenization):
    with pytest.raises(RequestError):
        processor().process("x", SamplingParams(), request_id="r", tokenization=tokenization)


def test_without_a_tokenizer_only_ids_and_no_text():
    inputs = processor(None)
    assert made([1, 2], inputs).params.detokenize is False
    for prompt, fields in (("text", {}), ([1], {"stop": "x"}), ([1], {"bad_words": ["x"]})):
        with pytest.raises(RequestError, match=r"no tokenizer|need a tokenizer"):
            made(prompt, inputs, **fields)


# -- parameters --------------------------------------------------------------------------------


def test_no_parameters_means_the_defaults():
    inputs = processor(defaults=SamplingParams(max_tokens=7, top_k=3))
    prepared = inputs.process([1], None, request_id="r")
    assert prepared.request.stop.max_tokens == 7
    assert prepared.params.top_k == 3


def test_max_tokens_reaches_to_the_end_of_the_context_and_no_further():
    assert made([1] * 10, max_tokens=None).request.stop.max_tokens == 22
    assert made([1] * 10, max_tokens=1000).request.stop.max_tokens == 22
    assert made([1] * 10, max_tokens=5).request.stop.max_tokens == 5
    assert made([1] * 10, max_tokens=None, min_tokens=10**6).request.stop.min_tokens == 22


def test_eos_comes_from_the_configs_and_the_tokenizer():
    inputs = processor(eos_ids=[7, 8])
    assert made([1], inputs).request.stop.eos_ids == {7, 8, 2}
    assert made([1], inputs, ignore_eos=True).request.stop.eos_ids == frozenset()
    assert made([1], inputs, ignore_eos=True, stop_token_ids=[7]).request.stop.token_ids == {7}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"allowed_token_ids": [5, 10**9]}, "allowed_token_ids"),
        ({"logit_bias": {1000: 1.0}}, "logit_bias"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"bad_words": ["word " * 2000]}, "bad_words"),
    ],
)
def test_what_passes_the_vocabulary_or_the_limits_is_refused(fields, param):
    with pytest.raises(RequestError) as e:
        made([1], **fields)
    assert e.value.param == param


def test_the_whole_vocabulary_may_be_requested_if_the_engine_allows_it():
    inputs = processor(max_logprobs=-1)
    assert made([1], inputs, logprobs=-1).request.params.logprobs == -1


def test_fields_that_were_changed_after_construction_are_checked_again():
    params = SamplingParams()
    params.temperature = -1
    with pytest.raises(RequestError, match="temperature"):
        processor().process([1], params, request_id="r")


def test_features_to_come_are_refused():
    with pytest.raises(Unsupported):
        made([1], watermarking=True)


def test_a_reasoning_budget_is_refused_without_markers():
    with pytest.raises(RequestError, match="thinking_token_budget"):
        made([1], thinking_token_budget=0)


def test_the_callers_parameters_are_not_touched():
    params = SamplingParams(bad_words=["hello"], best_of=2, n=1)
    prepared = processor().process([1], params, request_id="r")
    assert params.bad_words_token_ids == []
    assert params.logprobs is None
    assert prepared.params is not params


def test_something_else_than_parameters_is_refused():
    with pytest.raises(RequestError, match="must be a SamplingParams, got a dict"):
        processor().process([1], {"temperature": 0}, request_id="r")


def test_bad_words_are_ids_inside_a_text_and_at_its_start():
    tokenizer = face("byte_level")
    ids = made([1], bad_words=[" hello"]).request.params.bad_words_token_ids
    assert sorted(ids) == sorted([tokenizer.encode("hello"), tokenizer.encode(" hello")])
    assert (
        len(
            made([1], processor("word_level"), bad_words=["the"]).request.params.bad_words_token_ids
        )
        == 1
    )


def test_a_word_whose_ids_pass_the_models_vocabulary_is_refused():
    with pytest.raises(RequestError) as e:
        made([1], processor(vocab_size=50), bad_words=["hello"])
    assert e.value.param == "bad_words"


def test_best_of_runs_more_sequences_with_logprobs():
    prepared = made([1], n=2, best_of=4)
    assert prepared.request.n == 4
    assert prepared.request.params.logprobs == 0
    assert prepared.params.logprobs is None
    assert made([1], n=2).request.params.logprobs is None


def test_seeds_are_resolved_in_order_of_admission():
    def seeds():
        inputs = processor(seeds=random.Random(1))
        return [
            made([1], inputs).request.seed,
            made([1], inputs, seed=5).request.seed,
            made([1], inputs).request.seed,
        ]

    first = seeds()
    assert first == seeds()
    assert first[1] == 5
    assert len(set(first)) == 3


def test_a_refused_request_takes_no_seed():
    inputs, other = (processor(seeds=random.Random(1)) for _ in range(2))
    with pytest.raises(RequestError):
        made([], inputs)
    with pytest.raises(RequestError):
        made([1], inputs, logprobs=99)
    assert made([1], inputs).request.seed == made([1], other).request.seed


def test_prompt_logprobs_do_not_read_the_prefix_cache():
    assert made([1]).request.read_prefix_cache
    assert not made([1], prompt_logprobs=1).request.read_prefix_cache
    assert not made([1], skip_reading_prefix_cache=True).request.read_prefix_cache
    assert made([1], prompt_logprobs=1, skip_reading_prefix_cache=False).request.read_prefix_cache


def test_a_salt_separates_requests():
    inputs = processor()
    salts = [
        inputs.process([1], None, request_id="r", cache_salt=salt).request.salt
        for salt in (None, "a", "b", "a")
    ]
    assert salts[0] == b""
    assert salts[1] == salts[3] != salts[2]
    in_prompt = inputs.process({"prompt_token_ids": [1], "cache_salt": "a"}, None, request_id="r")
    assert in_prompt.request.salt == salts[1]


def test_the_request_s_own_fields_are_kept():
    prepared = processor().process([1], None, request_id="x", priority=3, arrived_at=1.5)
    assert (prepared.request.id, prepared.request.priority, prepared.request.arrived_at) == (
        "x",
        3,
        1.5,
    )


@pytest.mark.parametrize(
    "fields",
    [
        dict(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1),
        dict(allowed_token_ids=[7, 8], stop_token_ids=[7, 8, 9], min_tokens=3),
        dict(allowed_token_ids=[7], min_tokens=1),  # 7 is EOS here
    ],
)
def test_a_request_that_forbids_every_token_is_refused(fields):
    inputs = processor(eos_ids=[7])
    with pytest.raises(RequestError, match="leaves no token") as caught:
        made([1, 2], inputs, **fields)
    assert caught.value.param == "allowed_token_ids"


def test_a_word_of_one_token_may_not_be_all_that_is_allowed():
    (letter,) = face("byte_level").encode("a")
    spaced = face("byte_level").encode(" a")
    banned = [letter, *spaced] if len(spaced) == 1 else [letter]
    with pytest.raises(RequestError, match="leaves no token"):
        made([1], allowed_token_ids=banned[:1], bad_words=["a"])
    assert made([1], allowed_token_ids=[letter, 9], bad_words=["a"])


def test_tokens_that_end_may_be_all_that_is_allowed_if_nothing_must_come_before():
    assert made([1], processor(eos_ids=[7]), allowed_token_ids=[7])
    assert made([1], processor(eos_ids=[7]), allowed_token_ids=[7], min_tokens=1, ignore_eos=True)
