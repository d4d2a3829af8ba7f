"""What is fetched for strangers: checklist 5.5. Addresses, redirects, names that change, limits."""

import asyncio
import io
import json
import socket
import threading
from contextlib import contextmanager

import httpcore
import pytest

from quire.cli import main
from quire.errors import RequestError
from quire.grammar.json_schema.rewrite import rewrite
from quire.http_fetch import url
from quire.http_fetch.fetch import FetchPolicy, HttpFetcher

PUBLIC = "93.184.215.14"

NOT_ADDRESSES = [
    *("", "http://", "//good.test/a", "good.test/a", "/etc/passwd", "file:///etc/passwd"),
    *("FILE:///etc/passwd", "gopher://good.test/", "data:text/plain,a", "ftp://good.test/"),
    *("http:good.test", "http:/good.test", "http:\\\\good.test", "http://good.test\\@evil.test/"),
    *(
        "http://good.test@evil.test/",
        "http://user:word@good.test/",
        "http://:@good.test/",
    ),
    *("http://good.test:0/", "http://good.test:65536/", "http://good.test:99999/", "http://g:8x/"),
    *("http://good\t.test/", "http://good.test/\n", "http://good.test /", " http://good.test/"),
    *(
        "http://0x7f000001/",
        "http://2130706433/",
        "http://127.1/",
        "http://0177.0.0.1/",
        "http://0/",
    ),
    *("http://1.2.3.4.5/", "http://256.1.1.1/", "http://a.0x7f/", "http://127.0.0.1%00.good.test/"),
    *("http://[::1%25eth0]/", "http://[::1", "http://[zz]/", "http://[::1]x/", "http://::1/"),
    *("http://good。test/", "http://ⓖood.test/", "http://１２７.0.0.1/", "http://gööd.test/"),
    *("http://.good.test/", "http://good..test/", "http://-good.test/", "http://%31.test/"),
    "http://" + "a" * 64 + ".test/",
    "http://good.test/" + "a" * 9000,
    *("http://good.test/a\\b", "http://good.test/\x7f"),
]
CLOSED = [
    *("0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254"),
    *("169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.168.1.1"),
    *("192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1"),
    *(
        "240.0.0.1",
        "255.255.255.255",
        "168.63.129.16",
        "::",
        "::1",
        "fe80::1",
        "fec0::1",
        "fd00::1",
    ),
    *("fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::1", "2001:0:1::1"),
    *("2001:db8::1", "3fff::1", "4000::1", "fe80::1%eth0", "::ffff:0:127.0.0.1", "100::1"),
]
OPEN = ["1.1.1.1", PUBLIC, "172.32.0.1", "100.128.0.1", "2606:4700::1111", "64:ff9b::101:101"]


@pytest.mark.parametrize("text", NOT_ADDRESSES)
def test_what_parsers_may_read_in_two_ways_is_no_address(text):
    with pytest.raises(RequestError):
        url.parse_url(text)


@pytest.mark.parametrize(
    ("text", "host", "port", "target"),
    [
        ("http://Good.TEST", "good.test", 80, "/"),
        ("HTTPS://good.test.:8443/a?b#c", "good.test", 8443, "/a?b"),
        ("http://good.test?x=1", "good.test", 80, "/?x=1"),
        ("http://[2606:4700:0::1111]:81/", "2606:4700::1111", 81, "/"),
        ("http://good.test/ä%20b", "good.test", 80, "/%C3%A4%20b"),
        ("http://evil.test#@good.test@b", "evil.test", 80, "/"),
        ("http://good.test/a@b:c//d", "good.test", 80, "/a@b:c//d"),
    ],
)
def test_an_address_has_one_form(text, host, port, target):
    found = url.parse_url(text)
    assert (found.host, found.port, found.target) == (host, port, target)


@pytest.mark.parametrize("text", CLOSED)
def test_an_address_that_is_not_public_is_closed(text):
    fetcher, network = faked({"good.test": [text]}, b"")
    with pytest.raises(RequestError, match="no address that is public"):
        asyncio.run(fetcher.get("http://good.test/"))
    assert network.dialled == []


@pytest.mark.parametrize("text", OPEN)
def test_a_public_address_is_open(text):
    fetcher, network = faked({"good.test": [text]}, answer(b"hi"))
    assert asyncio.run(fetcher.get("http://good.test/")).data == b"hi"
    assert network.dialled == [(text, 80)]


def test_an_error_has_no_query_in_it_and_does_not_tell_closed_from_unknown():
    said = set()
    for known in ({}, {"good.test": ["10.0.0.1"]}):
        with pytest.raises(RequestError) as error:
            asyncio.run(faked(known, b"")[0].get("http://good.test/?key=secret", param="image_url"))
        said.add(str(error.value))
        assert error.value.param == "image_url"
    assert len(said) == 1
    assert "secret" not in said.pop()


# -- names ------------------------------------------------------------------------------------


class Network(httpcore.AsyncNetworkBackend):
    """Has one answer for everybody, or one for each in turn; notes who was dialled."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.dialled = []
        self.heard = []

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        self.dialled.append((host, port))
        said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if said is None:
            raise httpcore.ConnectError
        return Recorded(said, self.heard)


class Recorded(httpcore.AsyncMockStream):
    def __init__(self, said, heard):
        super().__init__([said])
        self._heard = heard

    async def write(self, buffer, timeout=None):
        self._heard.append(buffer)


def faked(known, *answers, **policy):
    """A fetcher in a world with these names, and its network."""
    network = Network(*answers)

    async def resolve(host, port):
        if host not in known:
            raise socket.gaierror
        found = known[host]
        return found.pop(0) if isinstance(found[0], list) else found

    return HttpFetcher(FetchPolicy(**policy), resolve=resolve, network=network), network


def answer(body=b"", status=200, **headers):
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"HTTP/1.1 {status} X", *lines, f"Content-Length: {len(body)}", "", ""])
    return head.encode() + body


def test_a_name_that_changes_is_connected_where_it_was_checked():
    fetcher, network = faked({"good.test": [[PUBLIC], ["127.0.0.1"]]}, answer(b"hi"))
    asyncio.run(fetcher.get("http://good.test/"))
    assert network.dialled == [(PUBLIC, 80)]
    with pytest.raises(RequestError):
        asyncio.run(fetcher.get("http://good.test/"))
    assert len(network.dialled) == 1


def test_a_host_with_one_closed_address_among_others_is_closed():
    fetcher, network = faked({"good.test": [PUBLIC, "::1"]}, b"")
    with pytest.raises(RequestError):
        asyncio.run(fetcher.get("http://good.test/"))
    assert network.dialled == []


def test_the_next_address_is_tried_where_one_does_not_answer():
    fetcher, network = faked({"good.test": [PUBLIC, "1.1.1.1"]}, None, answer(b"hi"))
    assert asyncio.run(fetcher.get("http://good.test/")).data == b"hi"
    assert [host for host, _ in network.dialled] == [PUBLIC, "1.1.1.1"]


def test_only_hosts_of_the_list_are_fetched_and_only_own_ones_may_be_private():
    known = {name: ["10.0.0.1"] for name in ("a.good.test", "good.test", "evilgood.test")}
    known["b.good.test"] = [PUBLIC]
    fetcher, network = faked(
        known, answer(), hosts=("*.good.test",), private_hosts=("a.good.test",)
    )
    for name in ("a.good.test", "b.good.test", "A.GOOD.test."):
        asyncio.run(fetcher.get(f"http://{name}/"))
    for name in ("good.test", "evilgood.test", "a.good.test.evil.test", "10.0.0.1"):
        with pytest.raises(RequestError, match="not fetched here"):
            asyncio.run(fetcher.get(f"http://{name}/"))
    assert len(network.dialled) == 3


# -- redirects --------------------------------------------------------------------------------

KNOWN = {"good.test": [PUBLIC], "other.test": ["1.1.1.1"], "inside.test": ["10.0.0.1"]}


@pytest.mark.parametrize(
    "location",
    [
        *("http://127.0.0.1/", "http://inside.test/", "//inside.test/", "http://169.254.169.254/"),
        *("file:///etc/passwd", "gopher://good.test/", "data:text/plain,a", "http://a@good.test/"),
        *(
            "http://[::1]:80/",
            "\\\\inside.test\\",
            "http://nowhere.test/",
            "http://[",
            "http://2130706433",
        ),
    ],
)
def test_a_redirect_is_checked_as_an_address_is(location):
    fetcher, network = faked(KNOWN, answer(status=302, Location=location), answer(b"secret"))
    with pytest.raises(RequestError):
        asyncio.run(fetcher.get("http://good.test/"))
    assert len(network.dialled) == 1


def test_a_redirect_does_not_lead_to_hosts_that_are_not_on_the_list():
    moved = answer(status=302, Location="http://other.test/")
    fetcher, network = faked(KNOWN, moved, answer(b"hi"), hosts=("good.test",))
    with pytest.raises(RequestError, match="not fetched here"):
        asyncio.run(fetcher.get("http://good.test/"))
    assert len(network.dialled) == 1


def test_what_is_asked_for_is_not_packed():
    fetcher, network = faked(KNOWN, answer(b"hi"))
    asyncio.run(fetcher.get("http://good.test/"))
    assert b"Accept-Encoding: identity" in network.heard[0]


def test_a_redirect_without_end_ends():
    fetcher, network = faked(KNOWN, answer(status=301, Location="/again"), max_redirects=3)
    with pytest.raises(RequestError, match="more than 3 times"):
        asyncio.run(fetcher.get("http://good.test/"))
    assert len(network.dialled) == 4


def test_credentials_go_to_the_host_they_are_for_and_to_no_other():
    moved = answer(status=307, Location="/there"), answer(status=307, Location="http://other.test/")
    fetcher, network = faked(KNOWN, *moved, answer(b"hi"))
    headers = {"Authorization": "Bearer secret", "Cookie": "secret", "X-Mine": "kept"}
    asyncio.run(fetcher.get("http://good.test/", headers=headers))
    first, second, third = (b for b in network.heard if b.startswith(b"GET"))
    assert first.count(b"secret") == second.count(b"secret") == 2
    assert b"secret" not in third
    assert b"X-Mine: kept" in third
    assert b"Host: other.test" in third


# -- limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (answer(b"a" * 101), "more than 100 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000000000\r\n\r\n", "more than 100 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * 101, "more than 100 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"40\r\n" + b"a" * 64 + b"\r\n"
         + b"40\r\n" + b"a" * 64 + b"\r\n", "more than 100 bytes"),
        (answer(b"a", Content_Encoding="gzip"), "compressed"),
        (answer(b"a", Content_Type="text/html"), "not image/"),
        (answer(b"a", status=404), "answered 404"),
        (answer(status=204), "answered 204"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na", "not answer in HTTP"),
        (b"\x16\x03\x01\x02\x00", "not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000, "not answer in HTTP"),
    ],
)  # fmt: skip
def test_an_answer_beyond_what_is_wanted_is_refused(said, why):
    fetcher, _ = faked(
        KNOWN, said, max_bytes=100, media_types=("image/",) if "image" in why else ()
    )
    with pytest.raises(RequestError, match=why):
        asyncio.run(fetcher.get("http://good.test/"))


@contextmanager
def dripping(head):
    """The port of a server that sends a byte now and then for ever, and notes when it may stop."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = threading.Event()

        def serve():
            with listener.accept()[0] as made:
                made.sendall(head)
                while not gone.wait(0.02):
                    try:
                        made.sendall(b"a")
                    except OSError:
                        gone.set()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        assert gone.wait(60), "the connection was kept"
        thread.join(60)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_a_drip_without_end_ends_in_time(head):
    fetcher = HttpFetcher(
        FetchPolicy(private_hosts=("127.0.0.1",), total_timeout_s=0.3, idle_timeout_s=0.2)
    )
    with dripping(head) as port, pytest.raises(RequestError, match="too long"):
        asyncio.run(fetcher.get(f"http://127.0.0.1:{port}/"))


def test_silence_ends_in_time():
    fetcher = HttpFetcher(
        FetchPolicy(private_hosts=("127.0.0.1",), total_timeout_s=20, idle_timeout_s=0.1)
    )
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(RequestError, match="in time"),
    ):
        asyncio.run(fetcher.get(f"http://127.0.0.1:{listener.getsockname()[1]}/"))


def test_what_is_written_to_a_file_is_bounded_too():
    fetcher, _ = faked(KNOWN, b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * 1000, max_bytes=100)
    file = io.BytesIO()
    with pytest.raises(RequestError):
        asyncio.run(fetcher.download("http://good.test/", file))
    assert len(file.getvalue()) <= 100


# -- who fetches ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ref", ["http://127.0.0.1:{}/a", "https://127.0.0.1:{}/a", "file:///etc/passwd"]
)
def test_references_in_schemas_are_never_fetched(ref):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        schema = {"$ref": ref.format(listener.getsockname()[1])}
        with pytest.raises(RequestError):
            rewrite(json.dumps(schema))
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_batch_is_read_from_hosts_of_ones_own_only_if_they_are_named(capsys, tmp_path):
    words = ["-o", str(tmp_path / "o"), "--url", "http://127.0.0.1:9"]
    assert main(["run-batch", "-i", "http://127.0.0.1:9/in?key=secret", *words]) != 0
    said = capsys.readouterr().err
    assert "--trusted-host" in said
    assert "secret" not in said


def test_a_batch_may_ask_no_operators_route(capsys, tmp_path):
    lines = [
        json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": {}})
        for url in ("/sleep", "/v1/../sleep", "//evil.test/v1/completions", "/v1/load_lora_adapter")
    ]
    (tmp_path / "i").write_bytes("\n".join([*lines, "[" * 100_000, ""]).encode() + b"\xff\xfe{}\n")
    words = ["-i", str(tmp_path / "i"), "-o", str(tmp_path / "o"), "--url", "http://127.0.0.1:9"]
    assert main(["run-batch", *words]) == 0
    found = [json.loads(line) for line in (tmp_path / "o").read_text().splitlines()]
    assert all(one["response"] is None for one in found)
    assert [one["error"]["param"] for one in found] == ["url"] * 4 + [None] * 2
    capsys.readouterr()
