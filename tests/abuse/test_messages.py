"""Messages: no path, address, stack or secret in any answer (checklist 5, 29 and 39)."""

import base64
import io
import json
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from starlette.exceptions import HTTPException

import quire.errors
from quire.errors import EngineAway, EngineError, Overloaded, QuireError, RequestError
from quire.server.auth.redact import redact_client_error, redact_server_error
from quire.server.errors import build_error_body
from quire.server.formats import sse
from tests.abuse import dialects
from tests.abuse.harness import Case

SECRETS = {
    "a module": f"{Path(quire.errors.__file__)}",
    "a library": f"{sys.prefix}/lib/python3.11/site-packages/torch/x.py",
    "a home": f"{Path.home()}/.cache/huggingface/hub/models--a--b",
    "a temporary file": f"{tempfile.gettempdir()}/quire-abc/engine",
    "an address": "<built-in method of object at 0x7f3a9c0d1e40>",
    "a stack": 'Traceback (most recent call last):\n  File "/x/y.py", line 3, in f\n    g()',
}
TOLD = ("/lib/", "/quire-abc", "0x7f", "Traceback", 'File "', ".cache", "errors.py")


def all_errors():
    """Every class of the tree, as somebody would raise it."""
    todo, found = [QuireError], []
    while todo:
        kind = todo.pop()
        todo += [one for one in kind.__subclasses__() if one.__module__ == "quire.errors"]
        found.append(kind)
    return sorted(found, key=lambda kind: kind.__name__)


def made(kind, message):
    if issubclass(kind, (Overloaded, EngineAway)):
        return kind(message, retry_after_s=1.0)
    return kind(message)


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_no_error_tells_where_the_server_lives(kind, secret):
    error = made(kind, f"it went wrong at {secret} there")
    for text in (json.dumps(build_error_body(error)[1]), sse.encode_sse_error(error).decode()):
        assert not [one for one in TOLD if one in text], text


@pytest.mark.parametrize(
    "error", [ValueError, KeyError, OSError, AssertionError, RuntimeError, MemoryError]
)
def test_an_error_that_nobody_meant_is_told_without_detail(error):
    status, body = build_error_body(error("the key of alice is 123 in /etc/quire/keys"))
    assert status == 500
    assert "alice" not in json.dumps(body)
    assert "/etc" not in json.dumps(body)


def test_what_a_client_said_is_said_back_to_him():
    said = "no route POST /v1/chat/complete; did you mean /v1/chat/completions?"
    assert redact_client_error(said) == said
    assert build_error_body(HTTPException(404, said))[1]["error"]["message"] == said
    assert build_error_body(RequestError("/etc/passwd is no text"))[1]["error"][
        "message"
    ].startswith("/etc")


def test_a_fault_is_told_without_any_path():
    assert (
        redact_server_error("cannot open /data/models/x/model.safetensors: gone")
        == "cannot open ...: gone"
    )
    assert build_error_body(EngineError("see /data/models/x/y"))[1]["error"]["message"] == "see ..."


# -- media, of which there are none yet: checklist 5.4 ----------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
PARTS = {
    "an image": IMAGE,
    "an image inline": {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 3_000_000}},
    "a file's image": {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    "an image with a forged id": IMAGE | {"uuid": "a" * 64, "mm_hashes": ["b"]},
    "audio": {"type": "input_audio", "input_audio": {"data": "A" * 100_000, "format": "wav"}},
    "an audio's address": {"type": "audio_url", "audio_url": {"url": "http://169.254.169.254/"}},
    "a video": {"type": "video_url", "video_url": {"url": "http://127.0.0.1/"}},
    "embeds of an image": {"type": "image_embeds", "image_embeds": "gASVAAAAAAAAAIwA"},
    "a file": {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}},
}  # fmt: skip
MEDIA = [
    Case(id=name, origin="25", routes=(dialects.CHAT, dialects.TOKENIZE_CHAT), streams=name == "an image",
         fields={"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]})
    for name, part in PARTS.items()
] + [
    Case(id="ten thousand images", origin="28", routes=(dialects.CHAT,), streams=False,
         fields={"messages": [{"role": "user", "content": [IMAGE] * 10_000}]}),
    Case(id="an image of Responses", origin="25", routes=(dialects.RESPONSES,), raw=json.dumps(
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/"}]}]}).encode()),
    Case(id="an image of Messages", origin="25", routes=(dialects.MESSAGES, dialects.COUNT), raw=json.dumps(
        {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "url", "url": "http://127.0.0.1/"}}]}]}).encode()),
    Case(id="a document of Messages", origin="25", routes=(dialects.MESSAGES, dialects.COUNT), raw=json.dumps(
        {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "document", "source": {
            "type": "base64", "media_type": "application/pdf", "data": "A" * 1000}}]}]}).encode()),
]  # fmt: skip


def saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def zipped(name, content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return base64.b64encode(file.getvalue()).decode()


EMBEDS = [
    Case(id=f"prompt_embeds {name}", origin="23", routes=(dialects.COMPLETE,), streams=name == "a text", raw=json.dumps(
        {"prompt": "a", "max_tokens": 2, "prompt_embeds": value}).encode())
    for name, value in {
        "a text": "gASVAAAAAAAAAIwA", "a pickle": "gASVJgAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAtlY2hvIGhhY2tlZJSFlFKULg==",
        "a list": ["AAAA"] * 100, "a number": 5, "three megabytes": "A" * 3_000_000,
        "a sparse tensor": saved(torch.ones(4, 256).to_sparse()), "NaN": saved(torch.full((4, 256), torch.nan)),
        "a stride of 0": saved(torch.ones(256).expand(4000, 256)), "another width": saved(torch.ones(4, 255)),
        "a tensor and a pickle": [saved(torch.ones(4, 256)), "gASVAAAAAAAAAIwA"],
        "a bomb": zipped("archive/data/0", b"\0" * (64 << 20))}.items()
] + [
    Case(id=f"{name} of nobody", origin="24", routes=(dialects.CHAT, dialects.COMPLETE), expect="either",
         streams=False, fields={}, raw=json.dumps({
             "messages": [{"role": "user", "content": "a"}], "prompt": "a", "max_tokens": 2, name: {"a": "b"}}).encode())
    for name in ("mm_hashes", "multi_modal_data", "mm_processor_kwargs", "media_io_kwargs", "kwargs_data")
]  # fmt: skip


def test_media_and_embeds_are_refused_in_every_dialect(victim):
    with victim.unharmed():
        victim.check(MEDIA)
        victim.check(EMBEDS)
