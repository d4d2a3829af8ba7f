"""quire bench serve against a real server."""

import json

import pytest

from quire.cli import main
from quire.cli.bench.client import Answer
from quire.cli.bench.serve import summary


def load(capsys, url, *argv):
    base = ["bench", "serve", "--base-url", url, "--vocab-size", "200", "--output-json", "-"]
    status = main([*base, *argv])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else None, said.err


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_every_request_is_answered_and_counted(capsys, server, client, endpoint):
    model = client.models.list().data[0].id
    argv = ["--model", model, "--endpoint", endpoint, "--num-prompts", "6"]
    argv += ["--input-len", "5", "--output-len", "4", "--max-concurrency", "3"]
    status, found, _ = load(capsys, server.url, *argv, "--save-detailed")
    assert status == 0
    assert (found["completed"], found["failed"]) == (6, 0)
    assert found["total_output_tokens"] == sum(found["output_lens"])
    assert 0 < found["median_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    assert found["output_throughput"] == pytest.approx(
        found["total_output_tokens"] / found["duration"]
    )


def test_a_rate_spreads_the_requests(capsys, server, client):
    model = client.models.list().data[0].id
    argv = ["--model", model, "--num-prompts", "5", "--input-len", "3", "--output-len", "1"]
    _, found, _ = load(capsys, server.url, *argv, "--request-rate", "20", "--burstiness", "1000")
    assert found["duration"] > 0.2


def test_a_server_that_refuses_is_an_error(capsys, server):
    status, found, err = load(capsys, server.url, "--model", "nobody", "--num-prompts", "1")
    assert status == 2
    assert found is None
    assert "nobody" in err


def test_failed_requests_are_told_and_not_measured():
    good = Answer(0.0, [1.0, 2.0, 4.0], 10, 3)
    found = summary([good, Answer(0.0, [9.0], error="500: no")], 5.0, [50])
    assert (found["completed"], found["failed"], found["errors"]) == (1, 1, ["500: no"])
    assert found["mean_ttft_ms"] == 1000
    assert found["p50_itl_ms"] == 1500
    assert found["mean_tpot_ms"] == 1500
    assert found["p50_e2el_ms"] == 4000
