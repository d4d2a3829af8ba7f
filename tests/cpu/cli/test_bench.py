"""quire bench: it runs the requested workload, and its JSON has the names of comparable tools."""

import argparse
import json

import pytest

from quire.cli import main
from quire.cli.bench.report import percentile
from quire.cli.bench.workload import add_workload_flags, build_requests
from quire.errors import ConfigError
from tests.cpu.tiny_models import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("bench") / "llama"))


def workload(*argv):
    parser = argparse.ArgumentParser()
    add_workload_flags(parser, prompts=8)
    return build_requests(parser.parse_args(list(argv)), 100)


def result(capsys, *argv):
    assert main(["bench", *argv, "--output-json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_random_prompts_keep_to_the_lengths_and_the_seed():
    argv = ["--input-len", "40", "--range-ratio", "0.5", "--output-len", "10", "--prefix-len", "3"]
    made = workload(*argv)
    assert made == workload(*argv)
    assert made != workload(*argv, "--workload-seed", "1")
    assert len({one.prompt[:3] for one in made}) == 1
    assert all(23 <= len(one.prompt) <= 63 and 5 <= one.output_len <= 15 for one in made)
    assert len({len(one.prompt) for one in made}) > 1
    assert all(10 <= i < 100 for one in made for i in one.prompt)


def test_prompts_of_a_file_are_repeated_as_often_as_needed(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "x", "output_tokens": 3}\n{"prompt": [1, 2]}\n')
    made = workload("--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "5")
    assert {one.prompt for one in made} == {"x", (1, 2)}
    assert len(made) == 5
    talk = [{"conversations": [{"value": "hi"}, {"value": "a b c d" * 4}]}, {"conversations": []}]
    file.write_text(json.dumps(talk))
    assert workload("--dataset-path", str(file))[0].prompt == "hi"


@pytest.mark.parametrize(
    "argv",
    [
        ["--num-prompts", "0"],
        ["--range-ratio", "2"],
        ["--output-len", "0"],
        ["--dataset-name", "sharegpt"],
        ["--dataset-path", "/no/such/file"],
        ["--dataset-path", __file__],
    ],
)
def test_a_workload_that_cannot_be_is_refused(argv):
    with pytest.raises(ConfigError):
        workload(*argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["throughput", "--num-prompts", "0"], "--num-prompts must be >= 1"),
        (["latency", "--batch-size", "0"], "--batch-size"),
        (["latency", "--input-len", "0"], "--input-len must be >= 1"),
    ],
)
def test_a_workload_is_checked_before_the_model_is_loaded(capsys, argv, words):
    assert main(["bench", *argv, "--model", "/no/such/model"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["latency", "throughput", "startup", "serve"])
def test_a_file_of_results_is_checked_before_anything_is_measured(capsys, kind):
    with pytest.raises(SystemExit):
        main(["bench", kind, "--model", "/no/such/model", "--output-json", "/no/such/folder/x"])
    assert "cannot write /no/such/folder/x" in capsys.readouterr().err


def test_percentiles_lie_between_neighbours():
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([0, 10], 25) == 2.5
    assert percentile([5], 99) == 5


def test_latency_runs_the_batch_as_often_as_requested(capsys, folder):
    argv = ["--model", folder, "--batch-size", "2", "--input-len", "8", "--output-len", "4"]
    found = result(capsys, "latency", *argv, "--num-iters", "3", "--num-iters-warmup", "1")
    assert len(found["latencies"]) == 3
    assert set(found["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert found["output_tokens_per_second"] == pytest.approx(8 / found["avg_latency"])
    beams = result(capsys, "latency", *argv, "--num-iters", "1", "--use-beam-search", "--n", "2")
    assert beams["avg_latency"] > 0


def test_throughput_counts_every_token(capsys, folder):
    argv = ["--model", folder, "--num-prompts", "5", "--input-len", "6", "--output-len", "4"]
    found = result(capsys, "throughput", *argv)
    assert found["num_requests"] == 5
    assert found["total_num_tokens"] == 5 * 10
    assert found["tokens_per_second"] == pytest.approx(50 / found["elapsed_time"])


@pytest.mark.usefixtures("forked")
def test_startup_times_every_stage_of_a_process(capsys, folder, monkeypatch):
    monkeypatch.setenv("QUIRE_CPU_ISA", "none")  # a cold start compiles the native kernels: 10 s
    argv = ["--model", folder, "--num-iters-cold", "1", "--num-iters-warm", "0"]
    (cold,) = result(capsys, "startup", *argv)["cold"]
    assert cold["process_s"] > cold["init_s"] > 0
    assert "weights" in " ".join(cold["parts_s"])


@pytest.mark.usefixtures("forked")
def test_startup_reports_why_an_engine_does_not_start(capsys):
    argv = ["startup", "--model", "/no/such/model", "--num-iters-cold", "1"]
    assert main(["bench", *argv]) != 0
    assert "/no/such/model" in capsys.readouterr().err


def test_an_unknown_kind_is_refused_and_help_names_them(capsys):
    assert main(["bench", "sped"]) == 2
    assert main(["bench", "--help"]) == 0
    assert "throughput" in capsys.readouterr().out
