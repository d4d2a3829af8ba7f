"""curl, as in everybody's shell history."""

import json
import shutil
import subprocess

import pytest

from tests.clients.conftest import KEY, MODEL

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(*words, status=None, data=None):
    shown = ["-sS", "--max-time", "30", "-w", "\n%{http_code}"]
    got = subprocess.run(["curl", *shown, *words], input=data, capture_output=True, check=True)
    body, _, code = got.stdout.decode().rpartition("\n")
    assert status is None or code == str(status), (code, body)
    return body


def post(url, body, *words, status=200):
    words = ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}", *words]
    return curl(url, *words, "-d", json.dumps(body), status=status)


ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}


def test_a_chat_whole_and_streamed(served):
    url = f"{served.v1}/chat/completions"
    whole = json.loads(post(url, ASK))["choices"][0]["message"]["content"]
    lines = post(url, {**ASK, "stream": True}, "-N").split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole


def test_a_body_over_1024_bytes_waits_for_no_expectation(served):
    """curl sends Expect: 100-continue for large bodies."""
    body = {"model": MODEL, "prompt": "a " * 1200, "max_tokens": 1, "truncate_prompt_tokens": 5}
    got = post(f"{served.v1}/completions", body, "-H", "Expect: 100-continue")
    assert json.loads(got)["usage"]["prompt_tokens"] == 5


def test_compressed_answers_are_offered_but_not_needed(served):
    post(f"{served.v1}/chat/completions", ASK, "--compressed")


def test_a_form_by_mistake_is_told_so(served):
    """-d without a content type is a form to curl."""
    key = ["-H", f"Authorization: Bearer {KEY}"]
    got = curl(f"{served.v1}/completions", *key, "-d", json.dumps(ASK), status=400)
    assert "application/json" in json.loads(got)["error"]["message"]


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH"])
def test_other_methods_are_told_so(served, method):
    key = ["-H", f"Authorization: Bearer {KEY}"]
    got = curl(f"{served.v1}/completions", *key, "-X", method, status=405)
    assert json.loads(got)["error"]["code"] == 405


def test_a_body_in_pieces(served):
    words = ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}"]
    words += ["-H", "Transfer-Encoding: chunked", "--data-binary", "@-"]
    got = curl(f"{served.v1}/chat/completions", *words, data=json.dumps(ASK).encode(), status=200)
    assert "Paris" in got


def test_two_requests_on_one_connection(served):
    words = ["-H", f"Authorization: Bearer {KEY}"]
    got = curl(
        f"{served.v1}/models", *words, "--next", f"{served.url}/health", "-w", "%{num_connects}"
    )
    assert got.startswith('{"object":"list"')
