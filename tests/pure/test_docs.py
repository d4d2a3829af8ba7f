"""The documents must stay true: each place the hop table names exists, the page stays short."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
HOPS = re.findall(r"^\| \d+ \| `([\w/]+\.py): (\w+)`", PAGE, re.M)


def names_in(path):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, kinds)}


def test_the_hop_table_has_its_twelve_rows():
    assert len(HOPS) == 12


@pytest.mark.parametrize(("path", "name"), HOPS)
def test_each_hop_exists(path, name):
    assert name in names_in(ROOT / "quire" / path)


def test_the_architecture_page_stays_short():
    assert PAGE.count("\n") <= 120


@pytest.mark.parametrize(
    "link",
    sorted(
        set(
            re.findall(
                r"`((?:core|config|text|runner|engine|models|sampling|kernels|attention|executors|server)/[\w/]+\.py)`",
                PAGE,
            )
        )
    ),
)
def test_each_file_the_page_names_exists(link):
    assert (ROOT / "quire" / link).exists()


def test_the_changelog_and_the_log_exist():
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "docs/LOG.md", "docs/glossary.md", "README.md"):
        assert (ROOT / name).stat().st_size > 200
