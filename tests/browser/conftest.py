"""A headless Chromium and the server of tests/server. Without a browser all of this is skipped.

Run with `pytest tests/browser`; needs `pip install playwright` and a Chromium (apt install chromium).
"""

import json
import shutil

import pytest

from tests.server.harness import Server, make_tokenizer

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BLOCKS = 480
STEP_S = 0.008
"""Time of a step: slow enough to be watched."""


@pytest.fixture(scope="session")
def chromium():
    """A browser for all tests."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for found in map(shutil.which, NAMES) if found), None)
    if path is None:
        pytest.skip("there is no Chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Site:
    """A running server whose model says what a test wants it to say."""

    def __init__(self, server):
        self.server = server
        self.url = server.url

    def plant(self, messages, text):
        """The answer to these messages is `text`."""
        key = (tuple(self.server.chat_ids(messages)), 0)
        self.server.model._known[key] = self.server.tokenizer.encode(text, add_special_tokens=False)

    def says(self, question, text):
        self.plant([{"role": "user", "content": question}], text)

    @property
    def watched(self):
        """Somebody follows the live view."""
        return bool(self.server.app.state.live[0]._watchers)


@pytest.fixture(scope="session")
def site(chromium, tokenizer):
    with Server(tokenizer, step_s=STEP_S, blocks=BLOCKS).running() as server:
        yield Site(server)


@pytest.fixture
def opened(chromium, site):
    """A function that opens the page as a new visitor; no script error or refusal may be logged."""
    contexts, said = [], []

    def open_page(url=None, *, allow=(), ready=True, **options):
        options = {"viewport": {"width": 1440, "height": 900}, **options}
        context = chromium.new_context(**options)
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "console",
            lambda one: (
                said.append(one.text)
                if one.type in ("error", "warning") and not any(a in one.text for a in allow)
                else None
            ),
        )
        page.goto(url or site.url)
        if ready:
            page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture
def page(opened):
    return opened()


def sse(*chunks):
    """Chunks as the body of an event stream."""
    return "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"


def wait_until(page, holds):
    """Until holds() is true, or a JavaScript expression is: the page itself may evaluate nothing."""
    for _ in range(400):
        if page.evaluate(holds) if isinstance(holds, str) else holds():
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"it did not happen: {holds}")
