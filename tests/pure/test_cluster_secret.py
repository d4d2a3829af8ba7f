"""The cluster secret: who has it is let in, everybody else is not, and it is never shown."""

import contextlib

import pytest
import zmq

from quire import env
from quire.distributed.cluster_secret import (
    ClusterSecret,
    is_loopback,
    read_cluster_secret,
    require_cluster_secret,
)
from quire.errors import ConfigError

TEXT = "0123456789abcdef"
PATIENCE_MS = 20_000


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


@pytest.fixture
def server(context):
    secret = ClusterSecret(TEXT.encode())
    authenticator = secret.accept_clients(context)
    socket = context.socket(zmq.ROUTER)
    secret.secure_server(socket)
    socket.bind("tcp://127.0.0.1:*")
    yield socket
    socket.close(0)
    authenticator.stop()


def connect(context, server, secure):
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    secure(socket)
    socket.connect(server.last_endpoint)
    with contextlib.suppress(zmq.Again):  # it may be refused before it sends, and never sends then
        socket.send(b"hello", zmq.NOBLOCK)
    return socket


def own_keys(socket):
    """The server's key leaked, and the client has a key of its own."""
    ClusterSecret(TEXT.encode()).secure_client(socket)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def test_one_with_the_secret_is_let_in(context, server):
    client = connect(context, server, ClusterSecret(TEXT.encode()).secure_client)
    assert client
    assert server.poll(PATIENCE_MS)
    assert server.recv_multipart()[-1] == b"hello"


@pytest.mark.parametrize(
    "secure",
    [ClusterSecret(b"another secret of 16").secure_client, own_keys, lambda socket: None],
    ids=["another secret", "a key of its own", "no key"],
)
def test_one_without_it_is_not(context, server, secure):
    stranger = connect(context, server, secure)
    client = connect(context, server, ClusterSecret(TEXT.encode()).secure_client)
    client.send(b"last")
    received = []
    while b"last" not in received:
        assert server.poll(PATIENCE_MS)
        received.append(server.recv_multipart()[-1])
    assert received == [b"hello", b"last"]
    assert not server.poll(200)
    assert stranger


def test_it_is_read_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("QUIRE_CLUSTER_SECRET", raising=False)
    assert read_cluster_secret(None, env.read()) is None
    with pytest.raises(ConfigError, match=r"--nnodes needs a secret .*openssl rand -hex 32"):
        require_cluster_secret(None, env.read(), "--nnodes")
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", TEXT)
    assert read_cluster_secret(None, env.read()).secret == TEXT.encode()
    file = tmp_path / "secret"
    file.write_text("of the file, which has priority\n")
    found = require_cluster_secret(str(file), env.read(), "--nnodes")
    assert found.secret == b"of the file, which has priority"
    with pytest.raises(ConfigError, match=r"cluster_secret_file: .*No such file"):
        read_cluster_secret(str(tmp_path / "none"), env.read())


def test_it_is_not_shown(monkeypatch):
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", TEXT)
    assert TEXT not in repr(ClusterSecret(TEXT.encode()))
    assert ("cluster_secret", "(set)") in env.describe()
    with pytest.raises(ConfigError, match="has 15 bytes") as raised:
        ClusterSecret(TEXT[1:].encode())
    assert TEXT[1:] not in str(raised.value)


def test_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "example.org", "")))
