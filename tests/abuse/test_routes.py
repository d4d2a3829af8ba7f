"""Who may ask for what: every route without a key, with keys that are almost right, by other paths."""

import ast
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from quire.server.auth import auth_middleware
from quire.server.routes import admin
from tests.abuse.harness import AUTH, KEY, MOST_CHARS, OTHER_KEY, PRIVATE
from tests.abuse.wire import head, post, status, talk
from tests.server.harness import Server, make_tokenizer

CLOSED = {
    *("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused"),
    *("/drain_engine", "/undrain_engine"),
    *(
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/abort_requests",
        "/server_info",
        "/start_profile",
        "/stop_profile",
    ),
}
"""Routes that operate on a server: closed unless it was started with the switch for them."""
NEVER_SERVED = ("/collective_rpc", "/update_weights")
FILLED = {"{name:path}": "embedded", "{name}": "app.js"}


def walked(routes):
    """Those of included routers too."""
    for route in routes:
        if "path" in vars(route):
            yield route
        else:
            yield from walked(vars(route)["original_router"].routes)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """(method, path) of every route there is, as the app itself has them."""
    app = Server(make_tokenizer(tmp_path_factory.mktemp("tokenizer"))).app
    found = set()
    for route in walked(app.routes):
        path = vars(route)["path"]
        path = re.sub(r"{.*?}", lambda found: FILLED.get(found[0], "nobody"), path)
        found |= {(method, path) for method in vars(route).get("methods") or {"GET"}}
    return sorted(found)


def ask(victim, routes, **headers):
    """route -> answer of each, without a body."""

    def one(route):
        with httpx.Client(base_url=victim.url, timeout=60) as client:
            if route == ("GET", "/quire/live") and "Authorization" in headers:
                return route, None  # it goes on for ever
            return route, client.request(*route, headers=headers)

    with ThreadPoolExecutor(4) as pool:
        return dict(pool.map(one, routes))


def test_every_route_but_the_named_open_ones_asks_for_a_key(victim, table):
    open_ones = {
        *("/health", "/live", "/ready", "/startup", "/ping", "/"),
        *(path for _, path in table if path.startswith("/quire/page/")),
    }
    assert len(table) > 60
    for (method, path), got in ask(victim, table).items():
        wanted = 200 if path in open_ones else 401
        if method == "OPTIONS":
            continue
        assert got.status_code == wanted, (method, path, got.text)
        if wanted == 401 and method != "HEAD":
            assert got.json()["error"]
            assert got.headers["www-authenticate"] == "Bearer"
    assert {
        path for path in auth_middleware.PUBLIC_PATHS if not path.startswith("/quire/page/")
    } <= open_ones


def test_routes_that_operate_are_closed_to_clients_with_keys(victim, table):
    paths = {path for _, path in table}
    assert paths >= CLOSED
    operating = [route for route in table if route[1] in CLOSED and route[0] != "OPTIONS"]
    with victim.unharmed():
        for route, got in ask(victim, operating, **AUTH).items():
            assert got.status_code in (403, 405), (route, got.text)
        never = [("POST", path) for path in NEVER_SERVED]
        for route, got in ask(victim, never, **AUTH).items():
            assert got.status_code == 501, (route, got.text)


def test_every_route_that_operates_is_in_the_table():
    """A new one is closed, or this list says why not."""
    operating = {
        vars(route)["path"]
        for route in admin.router.routes
        if "operating" in (vars(route).get("tags") or ())
    }
    assert operating <= CLOSED


def test_errors_of_all_routes_tell_nothing_private(victim, table):
    routes = [(method, path) for method, path in table if method != "OPTIONS"]
    routes += [("POST", "/v1/none"), ("DELETE", "/v1/responses/\u2028"), ("PATCH", "/metrics")]
    with victim.unharmed():
        for route, got in ask(victim, routes, **AUTH).items():
            if got is None or got.status_code < 400:
                continue
            assert got.status_code in (400, 403, 404, 405, 409, 501), (route, got.text)
            assert not PRIVATE.search(got.text.replace("/openapi.json", "")), (route, got.text)
            assert len(got.text) < MOST_CHARS


WRONG = {
    "a prefix": [f"Bearer {KEY[:-1]}"],
    "a longer one": [f"Bearer {KEY}x"],
    "upper case": [f"Bearer {KEY.upper()}"],
    "nothing": ["Bearer "],
    "no scheme": [KEY],
    "another scheme": [f"Basic {KEY}"],
    "the scheme alone": ["Bearer"],
    "white space before": [f"Bearer  {KEY}"],
    "both keys with a comma": [f"Bearer {KEY},{OTHER_KEY}"],
    "a NUL": [f"Bearer {KEY}%00"],
    "bytes of no text": ["Bearer \xff\xfe"],
    "two headers, the first right": [f"Bearer {KEY}", "Bearer x"],
    "two headers, the last right": ["Bearer x", f"Bearer {KEY}"],
    "a megabyte": ["Bearer " + "x" * (1 << 20)],
}


@pytest.mark.parametrize("said", WRONG.values(), ids=WRONG)
def test_a_key_that_is_almost_right_opens_nothing(victim, said):
    lines = [f"Authorization: {one}" for one in said]
    assert status(talk(victim, post(key=None, lines=lines))) == 401


def test_keys_elsewhere_than_in_their_headers_open_nothing(victim):
    path = f"/v1/models?api_key={KEY}&key={KEY}&authorization=Bearer%20{KEY}"
    lines = [f"Cookie: api_key={KEY}", f"Proxy-Authorization: Bearer {KEY}", f"Api-Key: {KEY}"]
    assert status(talk(victim, head("GET", path, key=None, lines=lines))) == 401


END = ["Connection: close"]

TRICKS = (
    *("//v1/models", "/v1//models", "/./v1/models", "/v1/../v1/models", "/health/../v1/models"),
    *("/live/..%2fv1/models", "/health%2f..%2fmetrics", "/%76%31/models", "/v1%2fmodels"),
    *("/v1/models/", "/v1/models;x", "/V1/MODELS", "/v1/models%00", "/v1/models%20", "/live;/v1"),
    *("/metrics/", "//metrics", "/quire/page/../../v1/models", "/quire/page/..%2f..%2fmetrics"),
    *("/quire/page/%2e%2e/%2e%2e/etc/passwd", "/quire/page/..%5c..%5cpasswd", "/health?/v1/models"),
    *("http://localhost/v1/models", "/\\v1/models", "/v1/models#/health", "*", "/.well-known/x"),
)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_no_other_way_to_write_a_path_leads_past_the_guard(victim, key):
    for path in TRICKS:
        for method in ("GET", "HEAD", "POST"):
            got = talk(victim, head(method, path, key=key, length=0, lines=END), within_s=5)
            is_open = status(got) == 200 and path == "/health?/v1/models"
            assert status(got) in (0, 400, 401, 404, 405) or is_open, (method, path, got[:300])
            assert b"root:" not in got
            assert b"max_model_len" not in got


def test_what_proxies_say_is_not_believed(victim):
    """A client may send any of it."""
    lines = [
        *("X-Forwarded-For: 127.0.0.1", "X-Forwarded-Host: localhost", "X-Forwarded-Proto: https"),
        *("X-Real-IP: 127.0.0.1", "Forwarded: for=127.0.0.1", "X-Original-URL: /health"),
        *("X-Rewrite-URL: /health", "X-HTTP-Method-Override: OPTIONS", "X-Forwarded-Prefix: /live"),
    ]
    assert status(talk(victim, post(key=None, lines=lines))) == 401
    assert status(talk(victim, head("GET", "/metrics", key=None, lines=lines))) == 401


def test_a_websocket_finds_nobody(victim):
    lines = [
        *("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ]
    for path in ("/v1/models", "/v1/realtime", "/quire/live"):
        got = talk(victim, head("GET", path, key=None, lines=lines), within_s=5)
        assert status(got) == 401, got[:200]


def test_options_do_nothing(victim, table):
    with victim.unharmed():
        for method in ("OPTIONS", "TRACE", "CONNECT", "PROPFIND", "BREW"):
            for path in ("/sleep", "/v1/completions", "/metrics"):
                got = talk(victim, head(method, path, key=None, lines=END), within_s=5)
                assert status(got) in (0, 400, 401, 405), (method, path, got[:200])


# -- pages of others ------------------------------------------------------------------------------

PAGES = {
    "another name for this machine": (["Origin: http://evil.example"], "evil.example"),
    "the same, that just reads": (["Sec-Fetch-Site: same-origin"], "evil.example:80"),
    "a name like a loopback's": (["Sec-Fetch-Site: none"], "127.0.0.1.evil.example"),
    "a name that ends alike": (["Sec-Fetch-Site: none"], "evil-localhost"),
    "a page elsewhere that posts": (["Origin: http://evil.example"], "localhost"),
    "no page at all": (["Origin: null"], "localhost"),
    "a page that hides itself": (["Sec-Fetch-Site: cross-site"], "localhost"),
    "another port of this machine": (["Sec-Fetch-Site: same-site"], "127.0.0.1"),
}


@pytest.mark.parametrize(("lines", "host"), PAGES.values(), ids=PAGES)
def test_a_page_of_elsewhere_uses_no_server_on_loopback(victim, lines, host):
    """43: whatever key the browser would send along."""
    got = talk(victim, post(lines=lines, host=host))
    assert status(got) == 403, got
    assert b"access-control-allow-origin" not in got.lower()


@pytest.mark.parametrize(
    ("lines", "host"),
    [
        (["Origin: http://localhost:8000", "Sec-Fetch-Site: same-origin"], "localhost:8000"),
        (["Origin: http://[::1]:8000"], "[::1]:8000"),
        (["Origin: http://127.0.0.1:8000"], "127.0.0.1:8000"),
        ([], "quire.internal"),  # a proxy's name, and no browser
    ],
)
def test_its_own_page_and_those_who_are_no_browser_use_it(victim, lines, host):
    assert status(talk(victim, post(lines=lines, host=host))) == 200


def test_no_page_may_read_answers_unless_it_was_allowed(victim):
    lines = ["Origin: http://evil.example", "Access-Control-Request-Method: POST"]
    for method in ("OPTIONS", "GET"):
        for host in ("localhost", "evil.example"):
            got = talk(victim, head(method, "/v1/models", lines=lines, host=host))
            assert b"access-control" not in got.lower()


# -- how keys are looked at -----------------------------------------------------------------------


def test_keys_are_compared_by_digests_and_never_as_text():
    """39, by structure: whoever looks a key up makes a digest of it first, and compares digests in
    constant time; nothing there is compared by `==`.
    """
    folder = Path(auth_middleware.__file__).parent
    found = []
    for file in [
        one for one in (folder / "auth_middleware.py", folder / "api_keys.py") if one.exists()
    ]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and "compare_digest" in ast.unparse(node):
                found.append(node)
    assert len(found) == 1, "one place looks keys up"
    text = ast.unparse(found[0])
    assert text.index("sha256(key)") < text.index("compare_digest")
    assert not [one for one in ast.walk(found[0]) if isinstance(one, ast.Eq | ast.NotEq)]


def test_what_runs_shows_no_key(victim):
    """Titles of processes, and what was printed."""
    for one in victim.running.family:
        assert KEY not in " ".join(one.cmdline())
    assert not [line for line in victim.lines if KEY in line or OTHER_KEY in line]
