"""Streams of a server with a head go on when its engine dies: the head is loaded again."""

import asyncio
import collections
import json
import threading
from pathlib import Path

import httpx
import pytest

import quire.embedded
from tests.cpu.drafters.heads import write
from tests.cpu.drafters.test_paths import head_of
from tests.server.running import SMALL, serving
from tests.server.test_survive import Scene, asked, disturbance, kill

STREAMS = 9  # each kind of test_survive


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    hf = json.loads((Path(quire.embedded.__file__).parent / "config.json").read_text())
    head = write(tmp_path_factory.mktemp("head"), *head_of(hf))
    given = {"model": str(head), "num_speculative_tokens": 3, "adaptive": False}
    more = ("--enable-prompt-embeds", "--dtype", "float32", "--max-engine-restarts", 10)
    with serving("embedded", *SMALL, *more, "--speculative-config", json.dumps(given)) as made:
        reader = threading.Thread(target=collections.deque, args=(made.process.stdout, 0))
        reader.start()  # what nobody reads stops who writes it
        yield made
        made.process.kill()
        reader.join(60)


def drafts_of(server):
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    name = "vllm:spec_decode_num_draft_tokens_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_streams_say_the_same_after_a_kill(running):
    bodies = [asked(i) for i in range(STREAMS)]
    want, _ = asyncio.run(Scene(running.url).all(bodies))
    assert drafts_of(running) > 100
    disturb = disturbance(running, kill, STREAMS * 10)
    found, _ = asyncio.run(Scene(running.url).all(bodies, disturb))
    for body, one, other in zip(bodies, found, want, strict=True):
        assert one == other, body
    assert drafts_of(running) > 100, "of the new engine"
