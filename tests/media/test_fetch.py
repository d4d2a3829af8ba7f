"""URLs of media: which are read, and which are refused without a hint at what is there."""

import asyncio
import http.server
import os
import threading

import pytest

from quire.errors import MediaUnavailable, RequestError
from quire.media import fetch as fetching
from quire.media.fetch import FetchRules, MediaFetcher, fetch_all
from quire.media.items import MediaSource
from tests.media.files import data_url, png

SIZES = {"image": 4096, "video": 4096, "audio": 4096}
WHERE = "messages[0].content[1].image_url"


NO_RULES = FetchRules()


def fetch(url, rules=NO_RULES, sizes=SIZES):
    part = MediaSource("image", WHERE, url=url)
    return asyncio.run(MediaFetcher(rules, sizes).fetch(part))


@pytest.fixture(scope="module")
def site():
    """An HTTP server on loopback: /a.png, /flaky (503 twice), /gone, /away (redirects), /big."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            status = {"/gone": 404, "/away": 302}.get(self.path, 200)
            if self.path == "/flaky" and asked.count("/flaky") < 3:
                status = 503
            self.send_response(status)
            if self.path == "/away":
                self.send_header("Location", "http://127.0.0.2:1/secret")
            self.end_headers()
            self.wfile.write(bytes(5000) if self.path == "/big" else png())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.asked = asked
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()


OWN = FetchRules(domains=("127.0.0.1",))


def test_reads_data_urls():
    assert fetch(data_url(png())) == png()
    assert fetch(data_url(png(), "image/png;charset=utf-8")) == png()
    assert fetch(data_url(png(), "")) == png()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png,abc", "data:<type>;base64,"),
        ("DATA:image/png;BASE64,QUJ", "not valid base64"),
        ("data:image/png;base64,QUJ", "not valid base64"),
        ("data:image/png;base64,QU JD", "not valid base64"),
        ("data:image/png;base64," + "A" * 8192, "more than 4096 bytes"),
        ("ftp://a/b", "none of http://, https://, file:// and data:"),
        ("/etc/passwd", "none of http://, https://, file:// and data:"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
    ],
)
def test_refuses_other_urls(url, reason):
    with pytest.raises(RequestError, match=reason) as refused:
        fetch(url)
    assert str(refused.value).startswith(WHERE)
    assert refused.value.param == "messages"


def test_fetches_from_hosts_that_are_listed_and_tries_again(site):
    assert fetch(f"{site.url}/a.png", OWN) == png()
    assert fetch(f"{site.url}/flaky", OWN) == png()
    assert site.asked.count("/flaky") == 3


@pytest.mark.parametrize("path", ["/gone", "/big", "/away"])
def test_what_an_address_does_not_give_is_its_own_error(site, path):
    with pytest.raises(MediaUnavailable) as refused:
        fetch(site.url + path, OWN)
    assert str(refused.value).startswith(WHERE)
    assert site.asked.count(path) == 1
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/",
        "http://localhost:1/",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]/",
        "http://10.0.0.1/",
        "http://2130706433/",
        "http://a@127.0.0.1/",
        "http://localhost.:1/",
        "http://127.1:1/",
        "http://0x7f000001:1/",
        "http://0177.0.0.1:1/",
        "http://0.0.0.0:1/",
        "http://[::ffff:127.0.0.1]:1/",
        "http://[64:ff9b::7f00:1]:1/",
        "http://[fd00::1]/",
    ],
)
def test_private_addresses_are_refused(site, url):
    before = len(site.asked)
    with pytest.raises(MediaUnavailable):
        fetch(url.replace(":1/", f":{site.server_port}/"))
    assert len(site.asked) == before


def test_other_hosts_than_listed_are_refused():
    with pytest.raises(MediaUnavailable, match="not fetched here"):
        fetch("http://example.com/a.png", OWN)


# -- files --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    inside = tmp_path / "media"
    inside.mkdir()
    (inside / "a b.png").write_bytes(png())
    (inside / "big").write_bytes(bytes(5000))
    (tmp_path / "secret").write_bytes(b"secret")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "own").symlink_to(inside / "a b.png")
    os.mkfifo(inside / "pipe")
    return inside


def test_reads_files_below_the_folder(folder):
    rules = FetchRules(folder=folder)
    assert fetch(f"file://{folder}/a%20b.png", rules) == png()
    assert fetch(f"file://localhost{folder}/own", rules) == png()


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "%2e%2e/secret",
        "link",
        "pipe",
        "missing",
        "",
        "a b.png?x",
        "x%00",
        "../media2/a",
    ],
)
def test_says_nothing_of_files_elsewhere(folder, path):
    with pytest.raises(RequestError) as refused:
        fetch(f"file://{folder}/{path}", FetchRules(folder=folder))
    assert (
        str(refused.value) == f"{WHERE} is no file below the folder of --allowed-local-media-path"
    )


def test_refuses_files_of_other_hosts_and_large_ones(folder):
    rules = FetchRules(folder=folder)
    with pytest.raises(RequestError, match="is no file below"):
        fetch(f"file://host{folder}/own", rules)
    with pytest.raises(RequestError, match="more than 4096 bytes"):
        fetch(f"file://{folder}/big", rules)


def test_bounds_the_bytes_of_a_prompt():
    parts = [
        MediaSource("image", f"messages[0].content[{i}]", url=data_url(png())) for i in range(3)
    ]
    fetcher, took = MediaFetcher(FetchRules(), SIZES), []
    assert asyncio.run(fetch_all(fetcher, parts, 3 * len(png()), took.append)) == [png()] * 3
    assert took == [0, *[len(png())] * 3]
    with pytest.raises(RequestError, match="the media of one prompt have more than"):
        asyncio.run(fetch_all(fetcher, parts, 3 * len(png()) - 1, took.append))


class Slow:
    """A fetcher whose addresses never answer."""

    running = most = 0

    async def fetch(self, part):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(60)
        finally:
            self.running -= 1


def test_many_slow_addresses_of_a_prompt_take_few_places_and_end(monkeypatch):
    monkeypatch.setattr(fetching, "PROMPT_TIMEOUT_S", 0.05)
    parts = [MediaSource("image", f"messages[0].content[{i}]", url="http://a/") for i in range(99)]
    slow = Slow()
    with pytest.raises(MediaUnavailable, match="takes too long"):
        asyncio.run(fetch_all(slow, parts, 1 << 20, lambda size: None))
    assert (slow.most, slow.running) == (fetching.PROMPT_FETCHES, 0)
