"""The dashboard asks for metrics that exist, by labels that they have."""

import json
import re
from pathlib import Path

import pytest

from quire.server.telemetry import metric_specs as names

FILE = Path(__file__).parents[2] / "deploy" / "grafana" / "quire.json"
SUFFIXES = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}
HTTP_LABELS = ("handler", "method", "status")


def series():
    """Every name that /metrics tells -> the labels it has."""
    found = {}
    for one in (*names.ENGINE_METRICS, *names.REQUEST_METRICS):
        total = "_total" if one.kind == "counter" else ""
        labels = {"model_name", "engine", *([one.label] if one.label else [])}
        for suffix in SUFFIXES[one.kind]:
            le = {"le"} if suffix == "_bucket" else set()
            found[f"quire:{one.name}{total}{suffix}"] = labels | le
    for one in names.HTTP_METRICS:
        for suffix in SUFFIXES[one.kind]:
            found[one.name + suffix] = {*HTTP_LABELS, "le"}
    return found


def queries(node):
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "definition"):
                yield value
            else:
                yield from queries(value)
    elif isinstance(node, list):
        for one in node:
            yield from queries(one)


def asked_for(query):
    """Names of metrics in a query of PromQL, and its labels."""
    bare = re.sub(r'"[^"]*"|\[[^]]*\]', "", query)
    names = set(re.findall(r"quire:\w+|http_\w+", bare))
    labels = {
        label.strip()
        for group in re.findall(r"by \(([^)]*)\)|\{([^}]*)\}", bare)
        for part in group
        for label in re.split(r",", re.sub(r"=~|=", "", part))
        if label.strip()
    }
    return names, labels


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(FILE.read_text())


def test_every_query_names_a_metric_that_exists_and_labels_that_it_has(dashboard):
    known = series()
    seen = set()
    for query in queries(dashboard):
        metrics, labels = asked_for(query)
        assert metrics, query
        for one in metrics:
            assert one in known, f"{one} of {query!r} does not exist"
            assert labels <= known[one], f"{labels - known[one]} in {query!r}"
        seen |= metrics
    assert len(seen) > 20


def test_every_panel_says_what_it_shows(dashboard):
    panels = [one for one in dashboard["panels"] if one["type"] != "row"]
    assert len({one["id"] for one in dashboard["panels"]}) == len(dashboard["panels"])
    for one in panels:
        assert one["title"]
        assert one["description"].endswith(".")
        assert one["targets"]


def test_panels_do_not_overlap(dashboard):
    taken = set()
    for one in dashboard["panels"]:
        at = one["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, one["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_a_query_of_nothing_would_be_found():
    assert asked_for('sum by (le, x) (rate(quire:no_such{model_name=~"a"}[1m]))') == (
        {"quire:no_such"},
        {"le", "x", "model_name"},
    )
