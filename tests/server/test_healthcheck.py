"""deploy/healthcheck.py: it follows the port, TLS and the socket of the command that runs."""

import importlib.util
import pathlib
import ssl
import subprocess
import sys

import pytest

from quire.server.options import ServerOptions
from tests.server.test_tls import make_certificate, needs_openssl, serving

PATH = pathlib.Path(__file__).resolve().parents[2] / "deploy/healthcheck.py"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("healthcheck", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flags_of(url):
    return ["--host", "0.0.0.0", "--port", url.rpartition(":")[2]]


def test_it_follows_the_port(check, tokenizer):
    with serving(tokenizer, ServerOptions(port=0)) as url:
        assert check.is_healthy(flags_of(url))
    assert not check.is_healthy(flags_of(url))


def test_it_follows_a_socket(check, tokenizer, tmp_path):
    with serving(tokenizer, ServerOptions(uds=str(tmp_path / "s"))):
        assert check.is_healthy(["--uds", str(tmp_path / "s")])


@needs_openssl
@pytest.mark.parametrize("required", [ssl.CERT_NONE, ssl.CERT_REQUIRED])
def test_it_follows_tls(check, tokenizer, tmp_path, required):
    cert, key = make_certificate(tmp_path, "quire")
    tls = {"ssl_certfile": str(cert), "ssl_keyfile": str(key), "ssl_ca_certs": str(cert)}
    with serving(tokenizer, ServerOptions(port=0, ssl_cert_reqs=int(required), **tls)) as url:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in tls.items()]
        words.append(f"--ssl-cert-reqs={int(required)}")
        assert check.is_healthy([*flags_of(url), *words])
    assert not check.is_healthy([*flags_of(url), *words])


def test_it_finds_the_flags_of_the_server_that_runs(check):
    words = [sys.executable, "-c", "import time; time.sleep(60)", "quire", "serve", "--port", "9"]
    with subprocess.Popen(words) as process:
        try:
            assert ["--port", "9"] in list(check.serve_flags_of_processes())
        finally:
            process.kill()
