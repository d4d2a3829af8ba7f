"""What is said of structured output: one object, its keys as flags, and the words of years ago."""

import logging

import pytest

from quire.cli.serve_flags import parse
from quire.config.decisions import DecisionLog
from quire.config.options import Options
from quire.config.structured_outputs import parse_structured_config, resolve_structured
from quire.errors import ConfigError
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
