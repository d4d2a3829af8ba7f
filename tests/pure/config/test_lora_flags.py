"""The flags about LoRA that users of other engines give: what they set, and which are refused."""

from unittest.mock import Mock

import pytest

from quire.cli.serve_flags import parse
from quire.config.adapters import resolve_adapters
from quire.config.decisions import DecisionLog
from quire.config.options import LoRAOptions
from quire.errors import ConfigError

SHAPE = Mock(dtype="bfloat16")


def section(*words):
    options, _ = parse(["m", *words])
    return resolve_adapters(options.lora, SHAPE, DecisionLog([]), served_names=("m",))


def test_defaults():
    assert section() is None
    found = section("--enable-lora")
    assert (found.max_adapters, found.max_rank, found.max_host) == (1, 16, 1)
    assert found.target_modules is None
    assert section("--lora-modules", "a=/x").modules[0].name == "a"  # it enables adapters


def test_values():
    words = "--enable-lora --max-loras 3 --max-lora-rank 33 --max-cpu-loras 7 --lora-dtype bfloat16"
    found = section(*words.split(), "--lora-target-modules", "q_proj", "v_proj")
    assert (found.max_adapters, found.max_rank, found.max_host) == (3, 33, 7)
    assert found.target_modules == ("q_proj", "v_proj")


def test_adapters_of_media_are_modules_of_the_start():
    found = section("--enable-lora", "--default-mm-loras", '{"image": "/x", "audio": "/y"}')
    assert [(one.name, one.path) for one in found.modules] == [("image", "/x"), ("audio", "/y")]
    assert found.media == ("image", "audio")
    with pytest.raises(ConfigError, match="give enable_lora too"):
        section("--default-mm-loras", '{"image": "/x"}')


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-loras 4 --max-cpu-loras 3", "max_cpu_loras=3 is less than max_loras=4"),
        ("--lora-dtype float16", "is not the model's dtype"),
        ("--max-loras 0", "max_loras"),
        ("--max-lora-rank 0", "max_lora_rank"),
        ("--lora-modules m=/x", "is a name of the model itself"),
        ("--lora-modules a=/x a=/y", "is given twice"),
        ("""--default-mm-loras {"text":"/x"}""", "default_mm_loras must be folders"),
        ("""--default-mm-loras {"image":""}""", "default_mm_loras must be folders"),
        ("""--lora-modules image=/y --default-mm-loras {"image":"/x"}""", "is given twice"),
    ],
)
def test_what_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        section("--enable-lora", *words.split())


@pytest.mark.parametrize(
    "words",
    ["--fully-sharded-loras", "--specialize-active-lora", "--enable-mixed-moe-lora-format",
     "--enable-moe-shared-loras", "--max-lora-cls-labels 4", "--enable-tower-connector-lora",
     "--long-lora-scaling-factors 4", "--lora-extra-vocab-size 256"],
)  # fmt: skip
def test_what_has_no_meaning_here_is_accepted(words):
    assert section("--enable-lora", *words.split()) == section("--enable-lora")


def test_options_of_python_are_the_same():
    given = LoRAOptions(enable_lora=True, max_loras=2, max_lora_rank=5)
    found = resolve_adapters(given, SHAPE, DecisionLog([]), served_names=("m",))
    assert (found.max_adapters, found.max_rank) == (2, 5)
