"""What the page sends for pictures and recordings: its scripts run in Node, its requests on a server."""

import io
import json
import shutil
import subprocess
import wave

import httpx
import numpy as np
import pytest
from PIL import Image

from quire.server.routes import playground
from tests.cpu.multimodal.folders import write_qwen2_vl
from tests.media.files import data_url, encode
from tests.server.running import SMALL, serving

PHOTO = data_url(encode(Image.new("RGB", (60, 40), "teal"), "PNG"), "image/png")
ABOUT = {"model": "vl", "chat": True, "transcribes": False}
SETTINGS = {"sampling": {"max_tokens": 4}, "stop": [], "system": "", "alternatives": None,
            "tools": None, "thinking": None}  # fmt: skip

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs lines behind imports of the page's scripts; returns what they print as JSON."""
    folder = tmp_path_factory.mktemp("page")
    for path in playground.STATIC_FOLDER.glob("*.js"):
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    head = """
        globalThis.sessionStorage = { getItem: () => null };
        globalThis.document = { baseURI: "http://host/" };
        const { requestFor, curlOf } = await import("./request.js");
        const { kindOf, mediaParts, wavOf } = await import("./attach.js");
    """

    def call(lines, **given):
        names = "".join(f"const {name} = {json.dumps(one)};" for name, one in given.items())
        (folder / "main.js").write_text(head + names + lines)
        done = subprocess.run(
            ["node", "main.js"], cwd=folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return call


def chat_body(run, media, content="What is it?"):
    messages = [{"role": "user", "content": content, "media": media}]
    line = "console.log(JSON.stringify(requestFor(messages, settings, about)))"
    return run(line, messages=messages, settings=SETTINGS, about=ABOUT)


def test_pictures_and_recordings_become_parts_of_the_message(run):
    found = chat_body(run, [
        {"kind": "image", "name": "a.png", "url": PHOTO},
        {"kind": "audio", "name": "b.wav", "url": "data:audio/wav;base64,QUJD"},
        {"kind": "video", "name": "c.mp4", "url": "data:video/mp4;base64,QUJD"},
    ])  # fmt: skip
    assert found["path"] == "v1/chat/completions"
    (message,) = found["body"]["messages"]
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": PHOTO}},
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,QUJD"}},
        {"type": "text", "text": "What is it?"},
    ]
    plain = chat_body(run, [])
    assert plain["body"]["messages"][0]["content"] == "What is it?"
    alone = chat_body(run, [{"kind": "image", "name": "a", "url": PHOTO}], "")
    assert len(alone["body"]["messages"][0]["content"]) == 1


def test_a_recording_is_a_wav_file_that_python_reads(run):
    lines = """
        const wav = await wavOf(Float32Array.from(samples), 16000).arrayBuffer();
        console.log(JSON.stringify([...new Uint8Array(wav)]));
    """
    given = [0.0, 0.5, -0.5, 1.5, -1.0]
    with wave.open(io.BytesIO(bytes(run(lines, samples=given)))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (1, 16000, 2)
        found = np.frombuffer(file.readframes(9), "<i2") / 32767
    assert np.abs(found - np.clip(given, -1, 1)).max() < 1e-4


def test_only_what_the_model_reads_is_taken(run):
    lines = 'console.log(JSON.stringify(types.map((one) => kindOf(one, ["image"]))))'
    assert run(lines, types=["image/png", "audio/wav", "text/html", ""]) == [
        "image", None, None, None,
    ]  # fmt: skip


def test_a_model_of_speech_gets_a_form(run):
    lines = """
        const file = new File(["RIFF"], "recording.wav", { type: "audio/wav" });
        const messages = [{ role: "user", content: "names", media: [{ file, name: "recording.wav" }] }];
        const request = requestFor(messages, {}, { model: "w", transcribes: true });
        const fields = [...request.body].map(([name, one]) => [name, one.name ?? one]);
        console.log(JSON.stringify([request.path, fields, curlOf(request)]));
    """
    path, fields, command = run(lines)
    assert path == "v1/audio/transcriptions"
    assert fields == [["model", "w"], ["prompt", "names"], ["file", "recording.wav"]]
    assert "-F 'file=@recording.wav'" in command


@pytest.mark.slow("starts a server")
def test_a_server_answers_what_the_page_sends(run, tmp_path):
    model = write_qwen2_vl(tmp_path, {"eos_token_id": 2})
    body = chat_body(run, [{"kind": "image", "name": "a.png", "url": PHOTO}])["body"]
    with serving(model, *SMALL, "--max-model-len", 512, "--served-model-name", "vl") as running:
        about = httpx.get(f"{running.url}/quire/about").json()
        assert (about["reads"], about["transcribes"]) == (["image", "video"], False)
        got = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
        assert got.status_code == 200, got.text
        last = [one for one in got.text.split("\n\n") if '"usage":{' in one][-1]
        assert json.loads(last.removeprefix("data: "))["usage"]["prompt_tokens"] > 12
