"""The structured output config: one object, its keys as flags, and names of older releases."""

import json
import logging

import pytest

from quire.cli.serve_flags import parse
from quire.config.decisions import DecisionLog
from quire.config.options import Options
from quire.config.structured_outputs import parse_structured_config, resolve_structured
from quire.errors import ConfigError
from quire.text.reasoning.select import check_reasoning_marks, select_reasoning_format
from tests.pure.config.test_resolve import run


def said(words=""):
    options, _ = parse(["m", *words.split()])
    return resolve_structured(options, DecisionLog([]))


def test_without_a_word_the_backend_is_chosen_by_the_form():
    section = said()
    assert (section.backend, section.disable_any_whitespace) == ("auto", False)
    assert (section.compile_seconds, section.cache_size) == (10.0, 512)


@pytest.mark.parametrize(
    "words",
    [
        '--structured-outputs-config {"backend":"xgrammar","disable_any_whitespace":true}',
        "--structured-outputs-config.backend xgrammar "
        "--structured_outputs_config.disable_any_whitespace true",
        "--guided-decoding-backend xgrammar --guided-decoding-disable-any-whitespace",
        "--guided-decoding-backend=xgrammar:disable-any-whitespace,no-fallback",
        "--structured-outputs-config.backend=xgrammar --guided_decoding_disable_any_whitespace",
    ],
)
def test_all_forms_of_the_option_are_equal(words):
    section = said(words)
    assert section.backend == "llguidance"
    assert section.disable_any_whitespace
    assert not section.disable_additional_properties


def test_guidance_is_llguidance():
    assert said("--guided-decoding-backend guidance").backend == "llguidance"


def test_old_names_are_logged(caplog):
    with caplog.at_level(logging.INFO, "quire"):
        Options.from_flat({"guided_decoding_backend": "auto"})
    assert 'structured_outputs_config={"backend": "auto"}' in caplog.text


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"backend": "yacc"}, "backend must be one of auto"),
        ({"backend": "xgrammar:fast"}, "no-fallback"),
        ({"bakend": "auto"}, "did you mean backend"),
        ({"enable_in_reasoning": "perhaps"}, "enable_in_reasoning must be True or False"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(given, named):
    with pytest.raises(ConfigError, match=named):
        parse_structured_config(given)


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("backend=xgrammar", "--guided-decoding-backend=guidance"),
        ("reasoning_parser=qwen3", "--reasoning-parser=deepseek_r1"),
    ],
)
def test_an_option_given_twice_with_different_values_is_refused(key, flag):
    with pytest.raises(ConfigError, match=flag[2:].partition("=")[0].replace("-", "_")):
        parse(["m", f"--structured-outputs-config.{key}", flag])


@pytest.mark.parametrize("marks", [("<think>", "</think>"), ("", "</think>"), ("", "")])
def test_reasoning_config_may_give_the_marks_of_its_parser(marks):
    config = dict(zip(("reasoning_start_str", "reasoning_end_str"), marks))
    for words in (
        ["--reasoning-config", json.dumps({**config, "reasoning_parser": "qwen3"})],
        ["--reasoning-parser", "qwen3", "--reasoning-config", json.dumps(config)],
        ["--reasoning-parser=qwen3", "--reasoning-config.reasoning_end_str", marks[1]],
    ):
        _, server = parse(["m", *words])
        assert server.reasoning_parser == "qwen3"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"reasoning_end_str": "<stop>"},
            "'<stop>', the reasoning parser '<think>' and '</think>'",
        ),
        ({"reasoning_end": "</think>"}, "no key 'reasoning_end'; allowed are reasoning_parser"),
        ({"reasoning_start_str": 1}, "must be a string, got 1"),
        ({"reasoning_parser": "deepseek_r1"}, "is also in reasoning_config and differs"),
    ],
)
def test_what_reasoning_config_cannot_have_is_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        parse(["m", "--reasoning-parser=qwen3", "--reasoning-config", json.dumps(config)])


@pytest.mark.parametrize("name", ["gemma4", "granite", "gpt_oss", "k2_horizon", "muse"])
def test_each_pair_of_marks_of_a_reasoning_format_is_its_own(name):
    one = select_reasoning_format(name)
    assert one.reasoning_marks
    for start, end in one.reasoning_marks:
        check_reasoning_marks(one, start, end, "x")
        with pytest.raises(ConfigError, match=r"x has the marks .* not built yet: leave them out"):
            check_reasoning_marks(one, start, "<end>", "x")
    with pytest.raises(ConfigError, match="no reasoning parser with marks: name one"):
        check_reasoning_marks(None, "", "</think>", "x")


def test_a_reasoning_parser_may_be_given_in_the_object():
    _, server = parse(["m", "--structured-outputs-config.reasoning_parser", "qwen3"])
    assert server.reasoning_parser == "qwen3"


def test_limits_of_compiling_are_options():
    section = said(
        "--grammar-compile-seconds=2.5 --grammar-compile-memory=256MiB "
        "--grammar-cache-size=9 --grammar-cache-memory=1MiB"
    )
    assert (section.compile_seconds, section.compile_memory) == (2.5, 256 << 20)
    assert (section.cache_size, section.cache_memory) == (9, 1 << 20)


def test_the_engine_gets_it():
    found = run(structured_outputs_config={"backend": "xgrammar"})
    assert found.config.structured.backend == "llguidance"
