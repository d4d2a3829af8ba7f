"""Long texts are cut into tokens without keeping all other threads from running."""

import threading
import time

import pytest

from quire.text.tokenizing.backends import LONG_TEXT_CHARS
from quire.text.tokenizing.tokenizer import load_tokenizer

WORDS = "What is the capital of France? 法国的首都是哪里？ 🙂 héllo <|im_end|> 12345 \n"


@pytest.fixture(scope="module")
def tokenizer():
    import quire.embedded

    return load_tokenizer(next(iter(quire.embedded.__path__)))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("extra", [-1, 0, 1, 5 * LONG_TEXT_CHARS])
def test_a_long_text_has_the_tokens_that_its_library_finds(tokenizer, special, extra):
    text = (WORDS * (LONG_TEXT_CHARS // 8))[: LONG_TEXT_CHARS + extra]
    wanted = tokenizer.backend.tokenizer.encode(text, add_special_tokens=special).ids
    assert tokenizer.encode(text, add_special_tokens=special) == wanted
    for side in ("left", "right"):
        cut = tokenizer.backend.encode_truncated(text, special, 50, side)
        assert cut == (wanted[-50:] if side == "left" else wanted[:50])


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer):
    longest, ended = [0.0], threading.Event()

    def watch():
        last = time.perf_counter()
        while not ended.wait(0.001):
            now = time.perf_counter()
            longest[0] = max(longest[0], now - last)
            last = now

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        began = time.perf_counter()
        tokenizer.encode(WORDS * 10_000)
        took = time.perf_counter() - began
    finally:
        ended.set()
        thread.join()
    assert longest[0] < took / 2  # all of it, if the interpreter is held
