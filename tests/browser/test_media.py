"""Pictures and recordings in a real browser: attached, pasted, dropped, spoken, removed."""

import base64
import io
import json
import threading

import httpx
import pytest
from PIL import Image

from tests.browser.conftest import wait_until
from tests.cpu.multimodal.folders import write_qwen2_vl
from tests.server.running import SMALL, serving


def picture():
    file = io.BytesIO()
    Image.new("RGB", (30, 20), "teal").save(file, "PNG")
    return file.getvalue()


GIVE = """([target, kind, field, data]) => {
    const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], "given.png", { type: "image/png" }));
    const event = new Event(kind, { bubbles: true, cancelable: true });
    Object.defineProperty(event, field, { value: transfer });
    document.querySelector(target).dispatchEvent(event);
}"""


@pytest.fixture
def reading(page, site):
    """The page of a server whose model reads pictures and recordings; requests are kept here."""
    sent = []

    def about(route):
        told = route.fetch().json()
        route.fulfill(json={**told, "reads": ["image", "audio"]})

    def answer(route):
        sent.append(json.loads(route.request.post_data))
        chunk = {"choices": [{"index": 0, "delta": {"content": "teal"}, "finish_reason": "stop"}]}
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/quire/about", about)
    page.route("**/v1/chat/completions", answer)
    page.goto(site.url)
    wait_until(page, "document.documentElement.dataset.ready === 'true'")
    return sent


def content_of(page, sent):
    page.fill("#say", "What is it?")
    page.press("#say", "Enter")
    page.wait_for_selector(".message:last-child.assistant:not(.streaming) .actions button:visible")
    return sent[-1]["messages"][-1]["content"]


@pytest.mark.parametrize("way", ["button", "paste", "drop"])
def test_a_picture_is_sent_with_the_message(page, reading, way):
    data = picture()
    if way == "button":
        page.set_input_files(
            "#attach-files", {"name": "a.png", "mimeType": "image/png", "buffer": data}
        )
    else:
        target, field = (
            ("#say", "clipboardData") if way == "paste" else ("#composer", "dataTransfer")
        )
        page.evaluate(GIVE, [target, way, field, base64.b64encode(data).decode()])
    page.wait_for_selector("#attached img")
    image, text = content_of(page, reading)
    assert image["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(data).decode()}"
    assert text["text"] == "What is it?"
    assert page.query_selector(".message.user .media img") is not None
    assert page.is_hidden("#attached")


def test_what_was_attached_can_be_removed_and_what_is_not_read_is_named(page, reading):
    page.set_input_files(
        "#attach-files", {"name": "a.png", "mimeType": "image/png", "buffer": picture()}
    )
    page.click("#attached button")
    assert page.is_hidden("#attached")
    page.set_input_files(
        "#attach-files", {"name": "b.txt", "mimeType": "text/plain", "buffer": b"words"}
    )
    assert content_of(page, reading) == "What is it?"


def test_the_microphone_sends_a_recording(page, reading):
    page.evaluate(
        """() => {
            navigator.mediaDevices.getUserMedia = async () => {
                const context = window.playing = new AudioContext();
                const tone = context.createOscillator();
                const end = context.createMediaStreamDestination();
                tone.connect(end);
                tone.start();
                return end.stream;
            };
        }"""
    )
    page.click("#record")
    wait_until(page, "document.querySelector('#record').ariaPressed === 'true'")
    wait_until(page, "window.playing.currentTime > 0.3")
    page.click("#record")
    page.wait_for_selector("#attached .file")
    sound, _ = content_of(page, reading)
    assert sound["input_audio"]["format"] == "wav"
    assert base64.b64decode(sound["input_audio"]["data"])[:4] == b"RIFF"


@pytest.mark.slow("starts a server")
def test_a_picture_that_is_dropped_is_answered_by_a_model_that_reads_it(opened, tmp_path):
    model = write_qwen2_vl(tmp_path, {"eos_token_id": 2})
    with serving(model, *SMALL, "--max-model-len", 256, "--served-model-name", "vl") as running:
        threading.Thread(target=running.process.stdout.read, daemon=True).start()
        page = opened(running.url)
        page.click("#open-settings")
        page.fill("#c-max_tokens", "8")
        page.fill("#c-temperature", "0")
        sent = []
        page.on("request", lambda one: sent.append(one) if "/chat/" in one.url else None)
        data = base64.b64encode(picture()).decode()
        page.evaluate(GIVE, ["#composer", "drop", "dataTransfer", data])
        page.wait_for_selector("#attached img")
        page.fill("#say", "What is it?")
        page.press("#say", "Enter")
        page.wait_for_selector(".message:last-child.assistant:not(.streaming) .actions button")
        said = page.inner_text(".message:last-child .text")
        body = json.loads(sent[0].post_data) | {"stream": False}
        body.pop("stream_options")
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).json()
        body["messages"][0]["content"] = "What is it?"
        blind = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).json()

    def text(got):
        return "".join(got["choices"][0]["message"]["content"].split())

    assert "".join(said.split()) == text(answer) != text(blind)
    assert answer["usage"]["prompt_tokens"] > blind["usage"]["prompt_tokens"]
