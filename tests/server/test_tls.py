"""HTTPS, and heads of requests that are too long: uvicorn as `quire serve` sets it up."""

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from quire.errors import ConfigError
from quire.server.options import ServerOptions
from quire.server.process import api_process, http_protocol, listen_sockets
from tests.server.harness import Server
from tests.server.running import wait_until

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def make_certificate(folder, name):
    """A certificate that signs itself, and its key, in place of those that were there."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    names = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", key, "-out", cert)
    subprocess.run(
        ["openssl", "req", "-x509", *new, *names, *files], check=True, capture_output=True
    )
    return cert, key


@contextmanager
def serving(tokenizer, options, loop="auto"):
    """The server of the harness behind uvicorn as an API process runs it; its address."""
    harness = Server(tokenizer, options=options)
    (listener,) = listen_sockets.bind_sockets(options)
    refreshing = []

    def ready():
        if options.enable_ssl_refresh:
            coroutine = api_process.refresh_tls(server.config, options)
            refreshing.append(api_process.asyncio.create_task(coroutine))
        started.set()

    async def ending():
        """Nothing is left to tell."""

    started = threading.Event()
    config = api_process.uvicorn_config(options, harness.app)
    config.loop = loop
    server = api_process.UvicornServer(config, ready=ready, ending=ending)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield listen_sockets.listener_url(options, listener)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def names_shown(url):
    """The name in the certificate that a new connection gets."""
    host, _, port = url.removeprefix("https://").partition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain) as tls:
        return tls.getpeercert(binary_form=True)


@needs_openssl
def test_a_new_certificate_is_used_without_a_restart(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(api_process, "TLS_POLL_INTERVAL_S", 0.02)
    cert, key = make_certificate(tmp_path, "first")
    options = ServerOptions(
        port=0, ssl_certfile=str(cert), ssl_keyfile=str(key), enable_ssl_refresh=True
    )
    listen_sockets.check_tls(options)
    with serving(tokenizer, options) as url:
        with httpx.Client(verify=ssl.create_default_context(cafile=cert)) as client:
            assert client.get(f"{url}/v1/models").status_code == 200
        before = names_shown(url)
        cert.write_text("half of it")  # as it may be seen while it is written
        make_certificate(tmp_path, "second")
        assert wait_until(lambda: names_shown(url) != before)
        with httpx.Client(verify=ssl.create_default_context(cafile=cert)) as client:
            assert client.get(f"{url}/v1/models").status_code == 200


@needs_openssl
def test_tls_files_are_read_again_when_asked(tokenizer, tmp_path, caplog):
    """What SIGHUP does, without --enable-ssl-refresh too."""
    cert, key = make_certificate(tmp_path, "first")
    options = ServerOptions(port=0, ssl_certfile=str(cert), ssl_keyfile=str(key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert api_process.reload_tls(context, options)
    cert.write_text("half of it")
    assert not api_process.reload_tls(context, options)
    assert "continue with the old ones" in caplog.text


@needs_openssl
def test_clients_may_have_to_show_a_certificate(tokenizer, tmp_path):
    cert, key = make_certificate(tmp_path, "both")
    options = ServerOptions(
        port=0,
        ssl_certfile=str(cert),
        ssl_keyfile=str(key),
        ssl_ca_certs=str(cert),
        ssl_cert_reqs=2,
    )
    listen_sockets.check_tls(options)
    with serving(tokenizer, options) as url:
        context = ssl.create_default_context(cafile=cert)
        with httpx.Client(verify=context) as client, pytest.raises(httpx.TransportError):
            client.get(f"{url}/v1/models")
        context.load_cert_chain(cert, key)
        with httpx.Client(verify=context) as client:
            assert client.get(f"{url}/v1/models").status_code == 200


HELLO = bytes.fromhex("16030101fc010001f80303")  # how a client's first message begins


def open_handshake(url, *words):
    """A connection with a handshake that has begun."""
    host, _, port = url.removeprefix("https://").partition(":")
    made = socket.create_connection((host, int(port)), timeout=60)
    for word in words:
        made.sendall(word)
    return made


@needs_openssl
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_handshakes_that_do_not_end_lock_nobody_out(tokenizer, tmp_path, monkeypatch, loop):
    monkeypatch.setattr(http_protocol, "max_connections", lambda: 4)
    cert, key = make_certificate(tmp_path, "both")
    options = ServerOptions(port=0, ssl_certfile=str(cert), ssl_keyfile=str(key))
    context = ssl.create_default_context(cafile=cert)
    with serving(tokenizer, options, loop) as url, contextlib.ExitStack() as stack:
        words = [(), (HELLO,)]
        made = [stack.enter_context(open_handshake(url, *words[i % 2])) for i in range(20)]
        with httpx.Client(verify=context) as client:
            assert client.get(f"{url}/v1/models").status_code == 200
        for one in made[:16]:
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        made[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            made[-1].recv(1)


@needs_openssl
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_handshake_has_the_time_of_a_head(tokenizer, tmp_path, monkeypatch, loop, caplog):
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.2)
    cert, key = make_certificate(tmp_path, "both")
    options = ServerOptions(port=0, ssl_certfile=str(cert), ssl_keyfile=str(key))
    with serving(tokenizer, options, loop) as url:
        for words in ((), (HELLO,), (b"GET / HTTP/1.1\r\n\r\n",)):
            with open_handshake(url, *words) as one, contextlib.suppress(ConnectionResetError):
                while one.recv(100):  # an alert, if what was sent is no TLS
                    continue
        context = ssl.create_default_context(cafile=cert)
        with httpx.Client(verify=context) as client:
            assert client.get(f"{url}/v1/models").status_code == 200
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ssl_keyfile": "k"}, "ssl_keyfile needs ssl_certfile"),
        ({"ssl_cert_reqs": 2}, "ssl_cert_reqs needs ssl_certfile"),
        ({"ssl_certfile": "/nowhere/c"}, "ssl_certfile: cannot read /nowhere/c: No such file"),
        ({"ssl_certfile": __file__, "ssl_keyfile": "/nowhere/k"}, "ssl_keyfile: cannot read /no"),
        ({"ssl_certfile": __file__}, "cannot use the TLS files"),
    ],
)
def test_tls_files_that_are_of_no_use_are_told_before_anything_is_loaded(given, said):
    with pytest.raises(ConfigError, match=said):
        listen_sockets.check_tls(ServerOptions(**given))


@needs_openssl
def test_a_key_that_needs_a_password_is_refused_and_not_asked_for(tmp_path):
    cert, key = make_certificate(tmp_path, "x")
    locked = tmp_path / "locked.pem"
    words = ["openssl", "ec", "-in", key, "-out", locked, "-aes128", "-passout", "pass:secret"]
    subprocess.run(words, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="encrypted"):
        listen_sockets.check_tls(ServerOptions(ssl_certfile=str(cert), ssl_keyfile=str(locked)))


def head(url, *lines):
    """What a server says to raw lines of a request's head."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join(["GET /v1/models HTTP/1.1", "Host: x", *lines]).encode())
        said = b""
        while b"\r\n" not in said and (more := connection.recv(1 << 16)):
            said += more
    return said.partition(b"\r\n")[0].decode()


def test_a_head_that_is_too_long_is_refused(tokenizer):
    options = ServerOptions(port=0, h11_max_header_count=20, h11_max_incomplete_event_size=4096)
    with serving(tokenizer, options) as url:
        few = [f"X-{i}: y" for i in range(18)]
        assert head(url, *few, "", "") == "HTTP/1.1 200 OK"
        assert head(url, *few, "X-19: y", "X-20: y", "", "") == "HTTP/1.1 400 Bad Request"
        assert head(url, "X-Long: " + "y" * 5000) == "HTTP/1.1 400 Bad Request"  # and no end
        body = {"prompt": "x" * 300, "max_tokens": 3, "user": "u" * 8000}
        with httpx.Client(base_url=url) as client:
            for _ in range(3):  # a body is no head, and the next head begins anew
                assert client.post("/v1/completions", json=body).status_code == 200


def test_a_unix_socket_serves_below_a_path_of_a_proxy(tokenizer, tmp_path):
    options = ServerOptions(uds=str(tmp_path / "s"), root_path="/below")
    with serving(tokenizer, options) as url:
        transport = httpx.HTTPTransport(uds=options.uds)
        with httpx.Client(transport=transport, base_url=url) as client:
            assert client.get("/v1/models").status_code == 200
            document = client.get("/openapi.json").json()
    assert document["servers"] == [{"url": "/below"}]


def hung_up_on(url, *words):
    """Whether the server closes a connection after these bytes and no more."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for word in words:
            connection.sendall(word)
        while said := connection.recv(1 << 16):
            if said.endswith(b"}"):  # the answer to a whole request
                continue
        return said == b""


def test_who_does_not_get_a_request_sent_is_hung_up_on(tokenizer, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http_protocol, "BODY_S", 0.2)
    whole = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    body = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{"
    options = ServerOptions(port=0, keep_alive_timeout=30)
    with serving(tokenizer, options) as url:
        for words in ((), (whole[:20],), (whole, whole[:20]), (body,)):
            assert hung_up_on(url, *words)
        ask = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
        with httpx.Client(base_url=url) as client:
            for _ in range(2):  # who waits for an answer, or asks again later, is not
                assert client.post("/v1/completions", json=ask).status_code == 200


@pytest.mark.parametrize(
    ("said", "services", "has"),
    [
        ({"api_key": ("k",)}, {}, ['-H "Authorization: Bearer $QUIRE_API_KEY"', "/docs"]),
        ({"disable_fastapi_docs": True}, {}, ["under /v1)"]),
        ({}, {"tokenizer": None}, ['"prompt": [1, 2, 3]']),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, {}, ["--cacert c", "--cert "]),
    ],
)
def test_the_command_to_try_fits_the_server(tokenizer, said, services, has):
    options = ServerOptions(**said)
    state = replace(Server(tokenizer, options=options).services, **services)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        text = api_process.startup_message(state, options, listener)
    assert not [one for one in has if one not in text], text
