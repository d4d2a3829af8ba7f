"""The documents must stay true: each place the hop table names exists, links lead somewhere, no code
block is left without a word on whether it is run (tests/server/test_docs_run.py runs them)."""

import ast
import pathlib
import re

import pytest

from quire.cli import serve_flags
from quire.config import vllm_environment, vllm_options
from quire.core.sequence_timing import BREAKDOWN_WITH_RECOVERY_FIELDS
from quire.server.telemetry import metric_specs
from tests.doc_blocks import CODE, PAGES, all_blocks

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    if ".venv" not in path.parts
)
OF_OTHERS = {"--gpus", "--ipc", "--help"}
"""Flags of docker, and of every command."""
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
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


def test_each_word_of_the_layers_is_explained():
    tree = ast.parse((ROOT / "quire/layers/__init__.py").read_text())
    (words,) = [ast.literal_eval(one.value) for one in tree.body if isinstance(one, ast.Assign)]
    table = (ROOT / "docs/adding-a-model.md").read_text().partition("\n## The layers\n")[2]
    rows = "\n".join(line for line in table.splitlines() if line.startswith("|"))
    assert [word for word in words if not re.search(rf"`{word}\b", rows)] == []


def test_the_changelog_and_the_log_exist():
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "docs/LOG.md", "docs/glossary.md", "README.md"):
        assert (ROOT / name).stat().st_size > 200


def prose_of(path):
    return FENCED.sub("", path.read_text())


def anchors_of(path):
    headings = re.findall(r"^#+ (.+)$", prose_of(path), re.M)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_of_a_document_lead_somewhere(path):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", prose_of(path)):
        there = (path.parent / target) if target else path
        assert there.exists(), f"{path.name} -> {target}"
        assert not anchor or anchor in anchors_of(there), f"{path.name} -> {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_states_of_each_code_block_whether_it_is_run(page):
    assert (ROOT / page).exists()
    for block in all_blocks():
        assert block.kind not in CODE or block.mark is not None, block.where
        assert block.mark not in ("shown", "fails") or block.note, f"{block.where} gives no reason"


@pytest.mark.parametrize("page", PAGES)
def test_each_page_is_reached_from_the_readme(page):
    assert page == "README.md" or f"({page})" in (ROOT / "README.md").read_text()


def rows_of(page, heading):
    """The cells of each row of the table under a heading."""
    section = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


VARIABLES = [
    (name, here)
    for left, here in rows_of("docs/migrating-from-vllm.md", "Variables")
    for name in re.findall(r"VLLM_\w+", left)
]


@pytest.mark.parametrize(("name", "here"), VARIABLES)
def test_a_variable_has_the_effect_on_the_page(name, here):
    if flag := re.match(r"`--([\w-]+)`", here):
        assert vllm_environment.VARIABLE_TO_OPTION[name] == flag[1].replace("-", "_")
    elif here.endswith("both are read"):
        assert name in vllm_environment.READ
    else:
        assert name in {**vllm_environment.NO_EFFECT, **vllm_environment.UNSUPPORTED}


def known_flags():
    """Of `quire serve`, other engines' names included, and of every other command."""
    serve = {one for action in serve_flags.serve_parser()._actions for one in action.option_strings}
    others = "".join(path.read_text() for path in (ROOT / "quire/cli").rglob("*.py"))
    tools = "".join(path.read_text() for path in ROOT.glob("[bt]*/*.py"))
    foreigners = {f"--{name.replace('_', '-')}" for name in vllm_options.option_names()}
    return serve | foreigners | set(re.findall(r"\"(--[a-z][\w-]+)\"", others + tools))


LINES = [line for page in PAGES for line in prose_of(ROOT / page).splitlines()]


def test_a_flag_that_the_documents_name_exists():
    known = known_flags()
    named = {flag for line in LINES for flag in re.findall(r"`(--[a-z][\w-]+)", line)}
    named = {flag.replace("_", "-") for flag in named}
    assert not sorted(flag for flag in named if flag not in known and flag not in OF_OTHERS)


@pytest.mark.parametrize("metric", metric_specs.ALL_METRICS, ids=lambda metric: metric.name)
def test_the_table_of_metrics_has_each_with_its_help_text(metric):
    prefix = "" if metric in metric_specs.HTTP_METRICS else "quire:"
    label = f"`{metric.label}`" if metric.label else ""
    name = f"`{prefix}{metric.name}`{' *' if metric.is_quire_only else ''}"
    row = f"| {name} | {metric.kind} | {label} | {metric.help} |"
    assert row in (ROOT / "docs/observability.md").read_text(), row


def test_the_table_of_metrics_has_no_other():
    assert len(rows_of("docs/observability.md", "Metrics")) == len(metric_specs.ALL_METRICS)


def test_the_causes_of_one_request_are_those_that_are_shown():
    page = re.findall(r"^\| `(\w+)_s` \|", (ROOT / "docs/observability.md").read_text(), re.M)
    assert page == [
        "prepare",
        "transport",
        "inbox",
        *BREAKDOWN_WITH_RECOVERY_FIELDS,
        "detokenize",
        "client",
    ]
