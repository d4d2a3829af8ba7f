"""Pages that may ask: those that --allowed-origins names, and the server's own."""

import asyncio

import pytest

from quire.server.auth.csrf_guard import CsrfGuard, is_loopback

PUBLIC = "https://chat.example"


def status(headers, *, method="POST", allowed=(), is_local=True):
    """Of a request with these headers."""
    sent = []

    async def app(scope, receive, send):
        sent.append(200)

    async def send(message):
        sent.append(message.get("status"))

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": "/v1/models", "headers": raw}
    asyncio.run(CsrfGuard(app, allowed=allowed, is_local=is_local)(scope, None, send))
    return sent[0]


BEHIND = {"host": "chat.example", "origin": PUBLIC, "sec-fetch-site": "same-origin"}
FOREIGN = {"host": "localhost:8000", "origin": PUBLIC, "sec-fetch-site": "cross-site"}


@pytest.mark.parametrize("allowed", [(PUBLIC,), (PUBLIC.upper() + "/",), ("*",)])
def test_a_page_that_is_allowed_asks_from_elsewhere_and_through_a_proxy(allowed):
    assert status(FOREIGN) == status(BEHIND) == 403
    assert status(FOREIGN, allowed=allowed) == status(BEHIND, allowed=allowed) == 200


def test_a_page_that_is_allowed_lets_no_other_in():
    other = {**FOREIGN, "origin": "https://chat.example.evil"}
    assert status(other, allowed=(PUBLIC,)) == 403
    assert status({**BEHIND, "host": "evil.example"}, allowed=(PUBLIC,)) == 403


def test_names_are_known_on_loopback_only():
    """Elsewhere any name may be the server's, but a page of another site still is one."""
    assert status(BEHIND, is_local=False) == 200
    assert status(FOREIGN, is_local=False) == 403
    assert status(FOREIGN, is_local=False, method="GET") == 200


def test_who_says_nothing_of_pages_is_no_browser():
    assert status({"host": "whatever.example"}) == 200


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("localhost.evil", False),
        ("", False),
    ],
)
def test_loopback(name, wanted):
    assert is_loopback(name) is wanted
