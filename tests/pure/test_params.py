"""SamplingParams and friends: defaults, the one form of each field, and what is refused."""

import pytest

from quire.core.params import (
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.core.structured_output_params import StructureKind, parse_guided_fields
from quire.errors import RequestError, Unsupported


def test_defaults_are_those_users_know():
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.max_tokens) == (
        1,
        1.0,
        1.0,
        0,
        0.0,
        16,
    )
    assert p.stop == []
    assert p.stop_token_ids == []
    assert p.output_kind is RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 0),
        ("n", 16385),
        ("n", True),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "ab"),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("bad_words", ["w"] * 129),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {-1: 1}),
        ("logprob_token_ids", [0] * 129),
        ("stream_interval", 0),
        ("best_of", 0),
        ("thinking_token_budget", -2),
        ("truncate_prompt_tokens", 0),
        ("logits_processors", [3]),
        ("output_kind", 7),
    ],
)
def test_a_bad_value_is_refused_by_name(param, value):
    with pytest.raises(ValueError) as e:
        SamplingParams(**{param: value})
    assert isinstance(e.value, RequestError)
    assert e.value.param == param
    assert param in str(e.value)


def test_greedy_neutralises_the_filters_and_allows_one_sequence():
    p = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.2)
    assert p.greedy
    assert (p.top_p, p.top_k, p.min_p) == (1.0, 0, 0.0)
    with pytest.raises(RequestError, match="n must be 1"):
        SamplingParams(temperature=0, n=2)
    with pytest.raises(RequestError, match="best_of must be 1"):
        SamplingParams(temperature=0, best_of=2)


def test_a_tiny_temperature_is_raised_with_a_warning(caplog):
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert "0.001" in caplog.text


def test_fields_get_their_one_form():
    p = SamplingParams(
        stop="x", seed=-1, logprobs=True, logit_bias={"5": 300, 6: -300}, thinking_token_budget=-1
    )
    assert p.stop_strings == ["x"]
    assert p.seed is None
    assert p.logprobs == 1
    assert p.logit_bias == {5: 100.0, 6: -100.0}
    assert p.thinking_token_budget is None


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_logprobs_agree_with_the_requested_ids():
    with pytest.raises(RequestError, match="logprobs must be left out or equal"):
        SamplingParams(logprob_token_ids=[1, 2], logprobs=1)


def test_a_clone_shares_no_list():
    p = SamplingParams(stop=["a"], logit_bias={1: 1.0})
    q = p.clone()
    assert q == p
    q.stop.append("b")
    q.logit_bias[2] = 1.0
    assert p.stop == ["a"]
    assert p.logit_bias == {1: 1.0}


def test_changed_fields_are_verified_again():
    p = SamplingParams()
    p.top_p = 3
    with pytest.raises(RequestError, match="top_p"):
        p.verify()


def test_from_optional_takes_none_as_default_and_names_the_nearest():
    assert SamplingParams.from_optional(temperature=None, top_p=0.5).temperature == 1.0
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    with pytest.raises(RequestError, match="did you mean temperature"):
        SamplingParams.from_optional(temprature=1)


def test_later_features_are_refused_not_ignored():
    SamplingParams().reject_unimplemented_features()
    off = RepetitionDetectionParams(max_pattern_size=0)
    SamplingParams(watermarking=False, repetition_detection=off).reject_unimplemented_features()
    for field, value in {
        "repetition_detection": RepetitionDetectionParams(3, 1, 2),
        "trace_decode_token_ids": [1],
    }.items():
        with pytest.raises(Unsupported) as e:
            SamplingParams(**{field: value}).reject_unimplemented_features()
        assert e.value.param == field


def test_guided_decoding_is_the_old_name_of_structured_outputs():
    s = StructuredOutputsParams(choice=["a", "b"])
    assert SamplingParams(guided_decoding=s).structured_outputs is s


def test_exactly_one_structure_is_given():
    assert StructuredOutputsParams(json={"type": "object"}).kind is StructureKind.JSON
    for given in [
        {},
        {"regex": "a", "json": "{}"},
        {"regex": ""},
        {"regex": "a\0"},
        {"choice": []},
        {"json": "{"},
        {"json": 3},
        {"json": '{"const": NaN}'},
        {"choice": ["\ud800"]},
        {"regex": "a", "backend": "xgrammar:no-such-setting"},
        {"regex": "a", "disable_any_whitespace": 1},
        {"json_object": False},
        {"grammar": ""},
        {"structural_tag": "["},
    ]:
        with pytest.raises(RequestError):
            StructuredOutputsParams(**given)


def test_a_structure_may_come_as_its_fields():
    given = SamplingParams(structured_outputs={"choice": ["a"], "regex": None})
    assert given.structured_outputs == StructuredOutputsParams(choice=["a"])
    with pytest.raises(RequestError, match="did you mean choice"):
        SamplingParams(structured_outputs={"choices": ["a"]})
    with pytest.raises(RequestError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs="a")


def test_a_class_of_pydantic_is_its_schema():
    class Model:
        @classmethod
        def model_json_schema(cls):
            return {"type": "object"}

    assert StructuredOutputsParams(json=Model).json == {"type": "object"}


def test_settings_behind_a_backend_are_read():
    given = StructuredOutputsParams(json={}, backend="xgrammar:disable-any-whitespace,no-fallback")
    assert (given.backend, given.disable_any_whitespace, given.disable_fallback) == (
        "xgrammar",
        True,
        True,
    )
    assert StructuredOutputsParams(json={}).backend is None


def test_words_of_older_releases_are_read():
    said = {"guided_regex": "a+", "guided_decoding_backend": "outlines", "guided_json": None}
    assert parse_guided_fields(said) == (
        StructuredOutputsParams(regex="a+", backend="outlines"),
        "guided_regex",
    )
    assert (
        parse_guided_fields({"guided_whitespace_pattern": " ", "guided_json_object": False}) is None
    )
    for bad, word in [
        ({"guided_json": {}, "guided_choice": ["a"]}, "guided_json and guided_choice"),
        ({"guided_choice": []}, "guided_choice must be"),
        ({"guided_json": "{"}, "guided_json is not JSON"),
    ]:
        with pytest.raises(RequestError, match=word) as e:
            parse_guided_fields(bad)
        assert e.value.param in bad


def test_deep_schemas_are_refused():
    schema: dict = {}
    for _ in range(70):
        schema = {"a": schema}
    with pytest.raises(RequestError, match="deeper than 64"):
        StructuredOutputsParams(json=schema)


def test_repetition_detection_is_checked():
    RepetitionDetectionParams()
    for bad in [(3, 4, 2), (3, 1, 1), (-1, 0, 0)]:
        with pytest.raises(RequestError):
            RepetitionDetectionParams(*bad)


def test_beam_search_params_are_checked():
    assert BeamSearchParams(beam_width=2, max_tokens=3).length_penalty == 1.0
    for bad in [(0, 3), (2, 0)]:
        with pytest.raises(RequestError):
            BeamSearchParams(*bad)
    for penalty in (308, -308, 1e308, 32.5, float("nan"), float("inf"), "1"):
        with pytest.raises(RequestError, match="length_penalty"):
            BeamSearchParams(2, 3, length_penalty=penalty)
    for penalty in (32, -32, 5e-324):
        assert BeamSearchParams(2, 3, length_penalty=penalty).length_penalty == penalty
