"""Sizes with suffixes and values by type."""

from typing import Literal

import pytest

from quire.config.values import coerce, count, size
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "n"), [("8k", 8000), ("8K", 8192), (7, 7), ("1.5k", 1500), ("-1", -1), ("2M", 2**21)]
)
def test_counts(text, n):
    assert count(text) == n


@pytest.mark.parametrize(
    ("text", "n"),
    [("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("1.5GiB", 3 * 2**29), ("512MiB", 2**29), (9, 9)],
)
def test_sizes(text, n):
    assert size(text) == n


@pytest.mark.parametrize("text", ["8x", "", "k", "1.5K", "0x10"])
def test_bad_counts_are_errors_with_the_allowed_values(text):
    with pytest.raises(ConfigError, match=r"len must be .*whole number"):
        coerce("len", int, text, "count")


def test_values_are_parsed_by_the_type_of_the_field():
    assert coerce("x", int | Literal["auto"] | None, "auto") == "auto"
    assert coerce("x", int | Literal["auto"] | None, "5") == 5
    assert coerce("x", int | None, "None") is None
    assert coerce("x", bool | None, "false") is False
    assert coerce("x", dict | None, '{"a": 1}') == {"a": 1}
    assert coerce("x", tuple[str, ...] | None, ["a"]) == ("a",)
    assert coerce("x", float, "0.5") == 0.5
    assert coerce("x", str | bool | None, "abc") == "abc"
    assert coerce("x", str | bool | None, True) is True


@pytest.mark.parametrize(
    ("hint", "given"), [(int, True), (int, 1.5), (bool, 2), (dict, "[1]"), (str, 3)]
)
def test_other_types_are_refused(hint, given):
    with pytest.raises(ConfigError, match="x must be"):
        coerce("x", hint, given)
