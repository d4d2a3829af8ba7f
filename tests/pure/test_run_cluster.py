"""deploy/ray/run_cluster.sh with a fake docker, which runs the entrypoint, and a fake ray on PATH."""

import os
import pathlib
import signal
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "deploy/ray/run_cluster.sh"
DOCKER = """#!/usr/bin/env bash
printf '%s\\n' "docker $*" >> "$LOG"
case $1 in
  container) [ "$3" = "${TAKEN:-}" ] ;;
  run) while [ "$1" != start ]; do shift; done; exec ray "$@" ;;
esac
"""
RAY = """#!/usr/bin/env bash
printf '%s\\n' "ray $*" >> "$LOG"
[ -z "${STAYS:-}" ] || { echo up; exec sleep 100; }
"""


@pytest.fixture
def environment(tmp_path):
    for name, text in (("docker", DOCKER), ("ray", RAY)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.endswith("_HOST_IP")}
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "LOG": str(tmp_path / "log")}


def run(environment, *words, **more):
    command = ["bash", str(SCRIPT), *words]
    run = subprocess.run(
        command, env=environment | more, capture_output=True, text=True, check=False
    )
    log = pathlib.Path(environment["LOG"])
    return run, log.read_text().splitlines() if log.exists() else []


def test_the_head_listens_and_is_stopped_at_the_end(environment, tmp_path):
    done, log = run(environment, "vllm/vllm-openai", "10.0.0.1", "--head", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "docker exec -it node /bin/bash" in done.stderr
    assert log[-2:] == [
        "ray start --block --head --port=6379 --node-ip-address=10.0.0.1",
        "docker stop node",
    ]
    (started,) = [line for line in log if line.startswith("docker run ")]
    for words in ("--network host", "--shm-size 10.24g", "--gpus all", "--entrypoint ray"):
        assert words in started
    assert f"-v {tmp_path}:/cache/huggingface" in started


@pytest.mark.parametrize(
    "words",
    [
        ["-e", "VLLM_HOST_IP=10.0.0.7"],
        ["-eQUIRE_HOST_IP=10.0.0.7"],
        ["--env=VLLM_HOST_IP=10.0.0.7"],
    ],
    ids=" ".join,
)
def test_a_worker_joins_the_head_with_its_own_address(environment, tmp_path, words):
    given = ("image", "10.0.0.1", "--worker", str(tmp_path), "--gpus", "2", *words)
    done, log = run(environment, *given)
    assert done.returncode == 0, done.stderr
    assert log[-2] == "ray start --block --address=10.0.0.1:6379 --node-ip-address=10.0.0.7"
    assert log[-3].index("--gpus all") < log[-3].index("--gpus 2") < log[-3].index(" image ")


def test_names_do_not_collide(environment, tmp_path):
    given = ("image", "10.0.0.1", "--worker", str(tmp_path))
    _, log = run(environment, *given, TAKEN="node")
    name = log[-1].removeprefix("docker stop ")
    assert name.startswith("node-")
    assert f"--name {name} " in log[-3]
    assert run(environment, *given, "--name", "mine")[1][-1] == "docker stop mine"
    assert run(environment, *given, "--name=mine")[1][-1] == "docker stop mine"


def test_a_signal_stops_the_container(environment, tmp_path):
    command = ["bash", str(SCRIPT), "image", "10.0.0.1", "--head", str(tmp_path)]
    with subprocess.Popen(
        command, env=environment | {"STAYS": "1"}, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait(60) == 143
        os.killpg(process.pid, signal.SIGKILL)  # what docker stop would have ended
    assert pathlib.Path(environment["LOG"]).read_text().endswith("docker stop node\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["image", "10.0.0.1", "--head"], "HF_HOME are needed; got 3"),
        (["image", "10.0.0.1", "--leader", "/"], "--head or --worker, got '--leader'"),
        (["image", "10.0.0.1", "--head", "/no/such"], "there is no folder '/no/such'"),
        (["image", "10.0.0.1", "--head", "/", "-e", "VLLM_HOST_IP=10.0.0.2"], "must be equal"),
    ],
    ids=["few", "kind", "folder", "address"],
)
def test_wrong_arguments_start_nothing(environment, words, message):
    done, log = run(environment, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "bash run_cluster.sh IMAGE HEAD_IP --worker HF_HOME" in done.stderr
    assert log == []
