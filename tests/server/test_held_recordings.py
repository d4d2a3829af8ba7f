"""Memory that requests with recordings hold, with a reader and a model that are scripted."""

from types import SimpleNamespace

import httpx
import pytest

from quire.media.held_bytes import HeldBytes
from quire.server.generation.generation_request import GenerationRequest, RawPrompts
from quire.server.generation.generation_stream import start_generation
from quire.server.generation.transcribe import Transcriber
from quire.server.routes import audio
from quire.text.input_processor import InputProcessor
from tests.server.harness import Server
from tests.server.running import wait_until

MOST = 1000
FEATURES = 300


class Reader:
    def __init__(self):
        self.held = HeldBytes(MOST)
        self.seen = []

    async def read(self, file, seconds, share):
        self.seen.append(self.held._held.total())
        return SimpleNamespace(features=[SimpleNamespace(data=bytes(FEATURES))], borders=(0, 16000))


@pytest.fixture
def served(tokenizer, monkeypatch):
    reader = Reader()
    speech = SimpleNamespace(
        tokens=SimpleNamespace(languages={}),
        processor=SimpleNamespace(sampling_rate=16000),
        reader=reader,
        aligns=False,
        source_from=lambda one: one,
    )

    async def stream(self, recording):
        reader.seen.append(reader.held._held.total())
        request = GenerationRequest(
            source=RawPrompts(prompts=["hi"], add_special_tokens=False),
            sampling={"max_tokens": 60, "ignore_eos": True},
            stream=True,
        )
        return await start_generation(self._state, request, self._http, "trsc-")

    monkeypatch.setattr(InputProcessor, "speech", speech)
    monkeypatch.setattr(Transcriber, "stream", stream)
    with Server(tokenizer, step_s=0.05).running() as running:
        yield running, reader


def post(server, size, **fields):
    file = {"file": ("a.wav", bytes(size))}
    return httpx.post(f"{server.url}/v1/audio/transcriptions", files=file, data=fields, timeout=60)


def test_a_recording_is_held_until_its_stream_has_ended(served, monkeypatch):
    server, reader = served
    kept = []
    new = audio.EventStreamResponse
    monkeypatch.setattr(
        audio, "EventStreamResponse", lambda *a, **k: kept.append(new(*a, **k)) or kept[-1]
    )
    file = {"file": ("a.wav", bytes(200))}
    url = f"{server.url}/v1/audio/transcriptions"
    with httpx.stream("POST", url, files=file, data={"stream": "true"}) as answer:
        chunks = answer.iter_bytes()  # kept: a dropped iterator closes the stream
        next(chunks)
        assert reader.held._held.total() == 200 + FEATURES
    server.wait_idle()
    assert reader.seen == [200, 200 + FEATURES]
    assert wait_until(lambda: not reader.held._held), "the client has left"


@pytest.mark.parametrize("size", [MOST + 1, MOST - FEATURES])
def test_recordings_for_which_no_memory_is_left_are_refused_with_advice(served, size):
    server, reader = served
    answer = post(server, size)
    assert answer.status_code == 429, answer.text
    assert "try again later" in answer.json()["error"]["message"]
    assert "Retry-After" in answer.headers
    assert not reader.held._held
