"""Keys from a file: who may ask what, limits by key, reading the file again under load."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import signal
import time
from pathlib import Path

import httpx
import pytest

from quire import cli
from quire.errors import ConfigError
from quire.server.auth import api_keys
from quire.server.options import ServerOptions
from tests.server.harness import Server
from tests.server.running import SMALL, serving

EXAMPLES = Path(__file__).parents[2] / "examples"
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/generate": {"prompt": "hi"},
}


A, B = "a" * 64, "b" * 64


def digest(key):
    return hashlib.sha256(key.encode()).hexdigest()


def write(path, *entries):
    text = json.dumps({"keys": list(entries)})
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text)
    fresh.replace(path)


def entry(name, **more):
    return {"name": name, "sha256": digest(f"key of {name}"), **more}


def bearer(name):
    return {"Authorization": f"Bearer key of {name}"}


def post(server, path, name, **more):
    body = {"model": "tiny", **PATHS[path], **more}
    return httpx.post(f"{server.url}{path}", json=body, headers=bearer(name), timeout=60)


@pytest.fixture(scope="module")
def guarded(tokenizer, tmp_path_factory):
    """A server with a key file, and that file."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write(
        path,
        entry("a"),
        entry("b"),
        entry("narrow", routes=["/v1/completions", "/v1/models*"]),
        entry("root", operator=True),
        entry("one", max_requests=1),
        entry("two", max_requests=2),
        entry("slow", tokens_per_minute=8),
        entry("small", max_queued_tokens=10),
    )
    options = ServerOptions(api_key=("boss",), api_key_file=str(path))
    with Server(tokenizer, options=options, step_s=0.002, seqs=8).running() as running:
        running.keys = path
        yield running


@pytest.fixture(scope="module")
def slow(tokenizer):
    """A server whose steps take long, which it knows."""
    with Server(tokenizer, step_s=0.4).running() as running:
        httpx.post(f"{running.url}/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        yield running


@pytest.fixture(autouse=True)
def nothing_stays(request):
    yield
    if "guarded" in request.fixturenames:
        request.getfixturevalue("guarded").wait_idle()


@pytest.mark.parametrize("path", PATHS)
def test_a_key_of_the_file_opens_every_dialect(guarded, path):
    assert post(guarded, path, "a").status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["nobody", digest("key of a")])
def test_an_unknown_key_is_a_typed_401_in_each_dialect(guarded, path, name):
    got = post(guarded, path, name)
    assert got.status_code == 401
    assert got.headers["WWW-Authenticate"] == "Bearer"
    error = got.json()["error"]
    kind = "authentication_error" if "messages" in path else "AuthenticationError"
    assert error["type"] == kind
    assert "Authorization: Bearer KEY" in error["message"]


def test_the_digest_in_the_file_is_no_key(guarded):
    head = {"Authorization": f"Bearer {digest('key of a')}"}
    assert httpx.get(f"{guarded.url}/v1/models", headers=head).status_code == 401


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
def test_a_key_asks_only_for_routes_that_are_its(guarded, path):
    body = PATHS.get(path, {"prompt": "a"})
    got = httpx.post(f"{guarded.url}{path}", json=body, headers=bearer("narrow"))
    assert got.status_code == 403
    error = got.json()["error"]
    assert error["type"] == (
        "permission_error" if path == "/v1/messages" else "PermissionDeniedError"
    )
    assert path in error["message"]
    assert post(guarded, "/v1/completions", "narrow").status_code == 200


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": ["a"] * 20}, "prompt"),
        ({"n": 500, "temperature": 1}, "n"),
        ({"best_of": 3}, "n"),
        ({"use_beam_search": True, "n": 3}, "n"),
        ({"use_beam_search": True, "n": 2, "prompt": ["a", "b"]}, "n"),
    ],
)
def test_what_a_key_may_never_ask_is_no_matter_of_later(guarded, more, param):
    body = {"prompt": "a", "max_tokens": 1, **more}
    got = httpx.post(f"{guarded.url}/v1/completions", json=body, headers=bearer("two"))
    assert got.status_code == 400, got.text
    assert "Retry-After" not in got.headers
    error = got.json()["error"]
    assert error["param"] == param
    assert "2 requests" in error["message"]
    body = {"prompt": ["a", "b"], "max_tokens": 1}
    got = httpx.post(f"{guarded.url}/v1/completions", json=body, headers=bearer("two"))
    assert got.status_code == 200


def test_what_shows_or_touches_others_is_for_operators(guarded):
    for path in ("/metrics", "/load", "/quire/live", "/server_info", "/is_paused"):
        got = httpx.get(f"{guarded.url}{path}", headers=bearer("a"))
        assert (path, got.status_code) == (path, 403)
    for head in (bearer("root"), {"Authorization": "Bearer boss"}):
        assert httpx.get(f"{guarded.url}/metrics", headers=head).status_code == 200


def stream_of(server, name, **more):
    body = {"prompt": "hi", "stream": True, "max_tokens": 400, "ignore_eos": True, **more}
    url = f"{server.url}/v1/completions"
    return httpx.stream("POST", url, json=body, headers=bearer(name), timeout=60)


def test_requests_at_a_time_are_a_typed_429_with_numbers_in_each_dialect(guarded):
    with stream_of(guarded, "one") as running:
        lines = running.iter_lines()  # kept: a dropped iterator closes the stream
        next(lines)
        for path in PATHS:
            got = post(guarded, path, "one")
            assert (path, got.status_code) == (path, 429)
            assert int(got.headers["Retry-After"]) >= 1
            error = got.json()["error"]
            assert error["type"] == (
                "rate_limit_error" if path == "/v1/messages" else "RateLimitError"
            )
            assert (error["key_requests"], error["max_key_requests"]) == (1, 1)
            assert error["predicted_ttft_s"] > 0
        assert post(guarded, "/v1/completions", "a").status_code == 200
    assert post(guarded, "/v1/completions", "one", max_tokens=1).status_code == 200


def test_tokens_a_minute_are_waited_for(guarded):
    assert post(guarded, "/v1/completions", "slow", max_tokens=5).status_code == 200
    got = post(guarded, "/v1/completions", "slow")
    assert got.status_code == 429
    assert 1 <= int(got.headers["Retry-After"]) <= 60
    error = got.json()["error"]
    assert error["max_key_tokens_per_minute"] == 8
    assert "8 tokens a minute" in error["message"]


@pytest.mark.parametrize("path", PATHS)
def test_a_deadline_that_cannot_be_met_is_refused_at_once(slow, path):
    head = {"X-Request-Timeout": "0.2"}
    got = httpx.post(f"{slow.url}{path}", json=PATHS[path], headers=head)
    assert got.status_code == 429
    error = got.json()["error"]
    assert error["predicted_ttft_s"] > 0.2
    assert "predicted" in error["message"]


def test_prefixes_are_not_shared_between_keys_unless_they_are_one_group(guarded):
    body = {"prompt": "a prompt that two keys send, and both at length", "max_tokens": 1}
    url = f"{guarded.url}/v1/completions"

    def cached(name):
        before = guarded.stats().prefix_hit_tokens
        assert httpx.post(url, json=body, headers=bearer(name)).status_code == 200
        return guarded.stats().prefix_hit_tokens - before

    assert cached("a") == 0
    assert cached("b") == 0
    assert cached("a") > 0


def test_the_metrics_tell_of_each_key_by_its_name_and_never_the_key(guarded):
    post(guarded, "/v1/completions", "a")
    text = httpx.get(f"{guarded.url}/metrics", headers=bearer("root")).text
    assert 'quire:key_requests_total{engine="0",key="a",model_name="tiny"}' in text
    assert (
        'quire:admission_rejections_total{engine="0",model_name="tiny",reason="deadline"}' in text
    )
    for name in "ab":
        assert digest(f"key of {name}") not in text
        assert f"key of {name}" not in text


def test_load_tells_the_queue_and_the_prediction(guarded):
    post(guarded, "/v1/completions", "a")
    got = httpx.get(f"{guarded.url}/load", headers=bearer("root")).json()
    assert got["queued_tokens"] == 0
    assert got["predicted_ttft_s"] > 0


# -- reading the file again --------------------------------------------------------------------


def until(true, within_s=60.0):
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def test_a_changed_file_counts_at_once_and_breaks_no_stream(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(api_keys, "POLL_INTERVAL_S", 0.02)
    path = tmp_path / "keys.json"
    write(path, entry("a"), entry("b"))
    options = ServerOptions(api_key_file=str(path))
    with Server(tokenizer, options=options, step_s=0.005).running() as server:
        asks = {"max_tokens": 200, "stream_options": {"include_usage": True}}
        with stream_of(server, "a", **asks) as running:
            lines = running.iter_lines()
            next(lines)
            write(path, entry("b"), entry("c"))
            until(lambda: post(server, "/generate", "c").status_code == 200)
            assert post(server, "/generate", "a").status_code == 401
            assert post(server, "/generate", "b").status_code == 200
            said = [line for line in lines if line.startswith("data: {")]
        assert json.loads(said[-1].removeprefix("data: "))["usage"]["completion_tokens"] == 200
        server.wait_idle()


@pytest.mark.parametrize(
    "text",
    ["{", '{"keys": 5}', '{"keys": [{"name": "a"}]}', '{"keys": [], "kees": []}', None],
    ids=["no JSON", "no list", "no digest", "a slip", "no file"],
)
def test_a_broken_file_keeps_the_old_keys_and_says_so(tmp_path, caplog, text):
    path = tmp_path / "keys.json"
    write(path, entry("a"))
    ring, results = api_keys.KeySet(["boss"], path), []
    ring.reload_counts = results.append
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    asyncio.run(ring.reload())
    assert results == ["failed"]
    assert "the old keys stay valid" in caplog.text
    assert ring.lookup(b"key of a").name == "a"
    write(path, entry("b"))
    asyncio.run(ring.reload())
    assert results == ["failed", "ok"]
    assert ring.lookup(b"key of a") is None
    assert ring.lookup(b"boss") is api_keys.OPERATOR_OWNER
    assert (
        ring.names[api_keys.owner_from_entry(api_keys.KeyEntry(name="a", sha256="")).tenant] == "a"
    )


# -- a server of several processes -------------------------------------------------------------


def test_sighup_has_every_process_read_the_file_and_streams_go_on(tmp_path):
    path = tmp_path / "keys.yaml"
    assert cli.main(["key", "one", "--add-to", str(path)]) == 0
    words = ("embedded", *SMALL, "--api-server-count", "2", "--api-key-file", path)
    with serving(*words, QUIRE_API_KEY="boss") as server:
        head = {"Authorization": "Bearer boss"}
        body = {"prompt": "hi", "max_tokens": 300, "ignore_eos": True, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=head, timeout=60) as running:
            lines = running.iter_lines()
            next(lines)
            path.write_text("keys: broken")
            server.process.send_signal(signal.SIGHUP)
            name = 'quire:key_file_reads_total{engine="0",model_name="embedded",result="failed"}'
            until(lambda: reads(server, name, head) >= 2)
            path.write_text(f"keys:\n  - {{name: two, sha256: {digest('second')}}}\n")
            server.process.send_signal(signal.SIGHUP)
            until(lambda: all(status(server, "second") == 200 for _ in range(6)))
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.poll() is None


def status(server, key):
    head = {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{server.url}/v1/models", headers=head).status_code


def reads(server, name, head):
    text = httpx.get(f"{server.url}/metrics", headers=head).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


# -- quire key ---------------------------------------------------------------------------------


def test_the_command_makes_a_key_that_its_entry_lets_in(tmp_path, capsys):
    path = tmp_path / "keys.yaml"
    for name in ("team a", "b: c"):
        assert cli.main(["key", name, "--add-to", str(path)]) == 0
        key = capsys.readouterr().out.split()[3]
        assert api_keys.KeySet(file=path).lookup(key.encode()).name == name
        assert key not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def test_the_command_prints_an_entry_for_a_key_that_exists(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("my old key\n"))
    assert cli.main(["key", "me", "--digest"]) == 0
    out = capsys.readouterr().out
    assert digest("my old key") in out
    assert "my old key" not in out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keys: []\nkees: []", "kees"),
        ("keys:\n - name: a", "sha256"),
        ("keys:\n - {name: a, sha256: secret-key}", "sha256"),
        (f"keys:\n - {{name: a, sha256: {A}, weight: 0}}", "weight"),
        (f"keys:\n - {{name: a, sha256: {A}, kv_share: 2}}", "kv_share"),
        (f"keys:\n - {{name: a, sha256: {A}, routes: [v1]}}", "routes are paths"),
        (f"keys:\n - {{name: a, sha256: {A}}}\n - {{name: b, sha256: {A}}}", "twice"),
        (
            f"keys:\n - {{name: a, sha256: {A}}}\n - {{name: a, sha256: {B}, weight: 2}}",
            "different limits",
        ),
        ("keys: [\n", "line 2"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_with_its_place_and_no_key(tmp_path, text, says):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        api_keys.KeySet(file=path)
    assert says in str(caught.value)
    assert "secret-key" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".json", ".txt"])
def test_files_of_each_form_are_read(tmp_path, suffix):
    path = tmp_path / f"keys{suffix}"
    texts = {
        ".toml": '[[keys]]\nname = "a"\nsha256 = "%s"\nmax_requests = 3',
        ".json": '{"keys": [{"name": "a", "sha256": "%s", "max_requests": 3}]}',
    }
    path.write_text(
        texts.get(suffix, "keys:\n - {name: a, sha256: %s, max_requests: 3}") % digest("k")
    )
    if suffix == ".txt":
        with pytest.raises(ConfigError, match=r"\.yaml, \.toml or \.json"):
            api_keys.KeySet(file=path)
        return
    assert api_keys.KeySet(file=path).lookup(b"k").limits.max_requests == 3


def test_keys_of_one_group_share_what_is_cached():
    a, b, c = (
        api_keys.owner_from_entry(api_keys.KeyEntry(name=name, sha256="0" * 64, cache_group=group))
        for name, group in (("a", "g"), ("b", "g"), ("g", None))
    )
    assert a.cache_salt == b.cache_salt != c.cache_salt
    assert len({a.tenant, b.tenant, c.tenant}) == 3


def test_the_example_of_a_key_file_is_one():
    ring = api_keys.KeySet(file=EXAMPLES / "keys.yaml")
    names = ["team-a", "batch", "operator"]
    found = [ring.lookup(f"example-key-of-{name}".encode()) for name in names]
    assert [holder.name for holder in found] == ["team-a", "nightly-batch", "ops"]
    assert [holder.may_access("/metrics") for holder in found] == [False, False, True]
