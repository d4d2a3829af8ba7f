"""`quire replay` on what a real engine left."""

import asyncio
import json
import signal
from dataclasses import replace

import httpx
import pytest

from quire import cli
from quire.cli.replay import format_steps
from quire.engine.recording import recording_file
from tests.server.running import SMALL, serving, wait_until
from tests.server.test_survive import Scene, asked, engine_of

SECRET = "the words of a user"


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The file of an engine that was killed with streams aboard."""
    folder = tmp_path_factory.mktemp("recordings")
    words = ("--flight-recorder-dir", folder, "--enable-prompt-embeds")
    with serving("embedded", *SMALL, *words) as server:

        async def kill(scene):
            while scene.chunks < 200:
                await asyncio.sleep(0.001)
            engine_of(server).kill()

        bodies = [{**asked(i), "user": SECRET} for i in range(16)]
        asyncio.run(Scene(server.url).all(bodies, kill))
        assert wait_until(lambda: list(folder.iterdir()))
        httpx.get(f"{server.url}/live")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    (path,) = folder.iterdir()
    return path


def quire(capsys, *words):
    status = cli.main(["replay", *map(str, words)])
    return status, capsys.readouterr().out


def test_a_killed_engine_leaves_a_recording_that_replays(left, capsys):
    status, said = quire(capsys, left)
    assert status == 0, said
    assert "the same as recorded" in said


def test_another_plan_is_named_with_its_step(left, capsys, monkeypatch):
    from quire.core.scheduling.limits.token_budget import TokenBudget

    monkeypatch.setattr(TokenBudget, "allow", lambda self, seq, want: min(want, 5))
    status, said = quire(capsys, left)
    assert status == 1
    assert said.startswith("step 1: it has rows of request")
    assert "recorded: request" in said


def test_a_recording_is_shown_as_a_table(left, capsys):
    status, said = quire(capsys, left, "--show", "--last", 3)
    assert status == 0
    lines = said.splitlines()
    assert lines[0].startswith("killed by signal 9, ")
    table = said.split("\n\n")[1].splitlines()
    assert table[0].split()[:4] == ["step", "ms", "took", "rows"]
    assert len(table) == 4


def test_a_step_that_never_ended_is_under_way(left):
    recording = recording_file.read_recording(left)
    until = max(at for at, record in enumerate(recording.records) if record[0] == "p")
    *before, last = format_steps(replace(recording, records=recording.records[: until + 1]))
    assert "in flight" in last
    assert "in flight" not in "".join(before[:-2])  # of two steps in flight the other one may be


def test_a_real_recording_has_no_word_of_a_user(left):
    recording = recording_file.read_recording(left)
    text = json.dumps([recording.header, recording.records])
    for word in (SECRET, "Once upon", "/root", "/home", "/tmp", "cmpl-"):
        assert word not in text


@pytest.mark.parametrize("words", [[], ["nowhere.gz"]])
def test_what_cannot_be_replayed_is_an_error_of_one_line(words, capsys):
    try:
        status = cli.main(["replay", *words])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert "error" in capsys.readouterr().err
