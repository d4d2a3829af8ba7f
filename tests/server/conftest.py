import threading

import httpx
import openai
import pytest

from tests.server.harness import Server, make_tokenizer
from tests.server.running import SMALL, serving

PARSERS = (
    "--enable-reasoning --reasoning-parser auto --enable-auto-tool-choice --tool-call-parser auto"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def server(tokenizer):
    with Server(tokenizer).running() as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


@pytest.fixture(scope="session")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def real_server():
    """One `quire serve embedded` for all tests that only ask it something."""
    with serving("embedded", *SMALL, "--enable-dev-routes", "--enable-responses-store") as running:
        threading.Thread(target=running.process.stdout.read, daemon=True).start()
        yield running


@pytest.fixture(scope="session")
def reading_server():
    """The same, which reads thoughts and calls."""
    with serving("embedded", *SMALL, *PARSERS.split()) as running:
        threading.Thread(target=running.process.stdout.read, daemon=True).start()
        yield running


@pytest.fixture(autouse=True)
def nothing_stays_behind(request):
    """After each test of the shared server nothing runs and no block is held."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_idle()
