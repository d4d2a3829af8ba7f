"""quire bench serve against a real server."""

import json
import random

import pytest

from quire.cli import main
from quire.cli.bench.arrivals import RequestRate, compute_start_times
from quire.cli.bench.client import RequestResult
from quire.cli.bench.result import summarize


def load(capsys, url, *argv):
    base = ["bench", "serve", "--base-url", url, "--output-json", "-"]
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
    good = RequestResult(0.0, [1.0, 2.0, 4.0], 10, 3)
    found = summarize([good, RequestResult(0.0, [9.0], error="500: no")], 5.0, [50])
    assert (found["completed"], found["failed"], found["errors"]) == (1, 1, ["500: no"])
    assert found["mean_ttft_ms"] == 1000
    assert found["p50_itl_ms"] == 1500
    assert found["mean_tpot_ms"] == 1500
    assert found["p50_e2el_ms"] == 4000


SMALL = ["--num-prompts", "4", "--input-len", "5", "--output-len", "4"]


def test_results_are_saved_under_the_names_tools_know(capsys, server, tmp_path):
    words = [*SMALL, "--goodput", "ttft:60000", "e2el:0", "--metric-percentiles", "50,99.9"]
    words += ["--percentile-metrics", "ttft,itl", "--metadata", "host=x", "--label", "y"]
    words += [
        "--save-result",
        "--save-detailed",
        "--result-dir",
        str(tmp_path / "r"),
        "--seed",
        "3",
    ]
    status, found, _ = load(capsys, server.url, *words)
    assert status == 0
    (path,) = (tmp_path / "r").iterdir()
    assert path.name.startswith("openai-infqps-tiny-")
    saved = json.loads(path.read_text())
    assert saved == found
    assert (saved["host"], saved["label"], saved["model_id"], saved["request_rate"]) == (
        "x",
        "y",
        "tiny",
        "inf",
    )
    assert saved["request_goodput"] == 0
    assert saved["p99.9_ttft_ms"] >= saved["p50_ttft_ms"] > 0
    assert "mean_tpot_ms" not in saved
    assert 1 <= saved["max_concurrent_requests"] <= 4
    assert saved["max_output_tokens_per_s"] > 0
    assert (
        len(saved["generated_texts"]) == len(saved["start_times"]) == len(saved["queue_times"]) == 4
    )
    assert all(saved["generated_texts"])


def test_results_may_be_appended_as_lines(capsys, server, tmp_path):
    words = [*SMALL, "--append-result", "--result-filename", str(tmp_path / "all.jsonl")]
    for _ in range(2):
        load(capsys, server.url, *words)
    assert len([json.loads(one) for one in (tmp_path / "all.jsonl").read_text().splitlines()]) == 2


def test_prefixes_repeat_and_bodies_take_more_fields(capsys, server):
    words = [
        "--dataset-name",
        "prefix_repetition",
        "--num-prompts",
        "6",
        "--prefix-repetition-prefix-len",
        "8",
    ]
    words += ["--prefix-repetition-suffix-len", "2", "--prefix-repetition-num-prefixes", "2"]
    words += [
        "--prefix-repetition-output-len",
        "3",
        "--extra-body",
        '{"max_tokens": 2}',
        "--top-p",
        "0.9",
    ]
    _, found, _ = load(capsys, server.url, *words, "--save-detailed", "--header", "X-A=b")
    assert found["input_lens"] == [10] * 6
    assert found["output_lens"] == [2] * 6


@pytest.mark.parametrize(
    "words",
    [
        ["--goodput", "ttft"], ["--goodput", "itl:3"], ["--metric-percentiles", "x"], ["--metadata", "x"],
        ["--percentile-metrics", "ttfx"], ["--header", "x"], ["--extra-body", "["], ["--request-rate", "0"],
        ["--ramp-up-strategy", "linear"], ["--burstiness", "0", "--request-rate", "2"],
        ["--backend", "openai", "--endpoint", "/v1/chat/completions"], ["--max-concurrency", "0"],
    ],
)  # fmt: skip
def test_flags_that_mean_nothing_are_refused_before_the_load(capsys, words):
    assert load(capsys, "http://127.0.0.1:9", *SMALL, "--model", "m", *words)[0] == 2


def test_a_server_that_never_gets_ready_is_named(capsys):
    status, _, err = load(capsys, "http://127.0.0.1:9", *SMALL, "--ready-check-timeout-sec", "0.1")
    assert status == 2
    assert "is not ready after 0.1 s" in err


def test_a_server_that_is_not_there_is_asked_for_by_its_address(capsys):
    status, _, err = load(capsys, "http://127.0.0.1:9", *SMALL)
    assert status == 2
    assert "is the server running?" in err
    assert "give --model" not in err


def test_goodput_counts_requests_that_keep_every_limit():
    fast, slow = RequestResult(0.0, [0.1, 0.2], 1, 2), RequestResult(0.0, [0.1, 0.9], 1, 2)
    found = summarize([fast, slow], 2.0, [50], ["ttft"], {"ttft": 200, "tpot": 300})
    assert found["request_goodput"] == 0.5


def test_starts_keep_the_rate_and_the_ramp():
    draw = random.Random(0)
    even = compute_start_times(101, RequestRate(10), 1e6, draw)
    assert even[-1] == pytest.approx(10)
    assert even[50] == pytest.approx(5, abs=0.1)
    assert compute_start_times(3, RequestRate(), 1.0, draw) == [0.0] * 3
    bursts = compute_start_times(101, RequestRate(10), 0.1, draw)
    assert bursts[-1] == pytest.approx(10)
    assert bursts == sorted(bursts)
    for ramp in ("linear", "exponential"):
        times = compute_start_times(1001, RequestRate(ramp=ramp, start=1, end=100), 1e6, draw)
        assert times[1] - times[0] == pytest.approx(1, rel=0.1)
        assert times[-1] - times[-2] == pytest.approx(0.01, rel=0.1)
