"""The playground in a real browser: asking, watching, stopping, editing, keys, keeping."""

import json
import shlex

import httpx
import pytest

from quire.server.options import ServerOptions
from tests.browser.conftest import sse, wait_until
from tests.server.harness import Server

LAST = ".message:last-child"
DONE = f"{LAST}.assistant:not(.streaming) .actions button:visible"
LONG = "one two three four five six seven eight nine ten " * 3


def ask(page, text, *, wait=True):
    page.fill("#say", text)
    page.press("#say", "Enter")
    if wait:
        page.wait_for_selector(DONE)


def text_of(page):
    return page.inner_text(f"{LAST} .text").strip()


def kinds(page, selector):
    return page.eval_on_selector_all(selector, "all => all.map(one => one.tagName.toLowerCase())")


def test_an_answer_streams_to_what_the_server_said(page, site):
    site.says("Stream!", LONG.strip())
    ask(page, "Stream!", wait=False)
    lengths = set()
    while page.query_selector(DONE) is None:
        lengths.add(len(text_of(page)) if page.query_selector(f"{LAST}.assistant") else 0)
    assert len(lengths) > 3
    assert text_of(page) == LONG.strip()
    assert "tokens" in page.inner_text(f"{LAST} .facts")
    assert page.inner_text("#status").startswith("The answer is complete. one two")


def test_stop_ends_the_answer_here_and_in_the_engine(page, site):
    site.says("Stop me", LONG * 2)
    for way in (lambda: page.click("#stop-answer"), lambda: page.keyboard.press("Escape")):
        page.click("#new-chat", force=True) if page.query_selector(LAST) else None
        ask(page, "Stop me", wait=False)
        wait_until(page, f"document.querySelector('{LAST}.assistant .text')?.innerText.length > 5")
        way()
        page.wait_for_selector(DONE)
        assert "You stopped it." in page.inner_text(f"{LAST} .facts")
        assert len(text_of(page)) < len(LONG * 2) - 20
        site.server.wait_idle()


def test_the_whole_page_can_be_used_by_keyboard_alone(page, site):
    site.says("Keys", "By **keyboard**.")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # skip link
    assert page.evaluate("document.activeElement.id") == "say"
    page.keyboard.type("Keys")
    page.keyboard.press("Enter")
    page.wait_for_selector(DONE)
    assert page.evaluate("document.activeElement.id") == "say"
    walk_to(page, "Tokens", back=True)
    page.keyboard.press("Enter")
    walk_to(page, "B", back=True)
    assert '"B"' in page.inner_text("#token-tip")
    page.keyboard.press("ArrowRight")
    assert '"y"' in page.inner_text("#token-tip")
    assert page.get_attribute(":focus", "aria-describedby") == "token-tip"
    page.keyboard.press("Escape")
    assert page.is_hidden("#token-tip")


def walk_to(page, text, *, back=False):
    """Press Tab until the focus is on something with this text."""
    for _ in range(40):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        if page.evaluate("document.activeElement.textContent") == text:
            return
    raise AssertionError(f"nothing named {text!r} can be reached by keyboard")


def test_tokens_show_their_probability_and_alternatives_on_hover(page, site):
    site.says("Tokens", "abc")
    ask(page, "Tokens")
    page.click(f"{LAST} button:text('Tokens')")
    assert page.locator(".token").all_inner_texts()[:3] == ["a", "b", "c"]
    page.hover(".token:nth-child(2)")
    assert "%" in page.inner_text("#token-tip .tip-head")
    assert page.locator("#token-tip .tip-list li").count() == 5


def test_pointing_at_a_word_of_an_answer_shows_how_likely_it_was(page, site):
    text = "<think>\nhm\n</think>\n\n1. a **bold** `x\\*y` 汉\n2. \\*z\n\n```python\np = 1\n```"
    site.says("Weave", text)
    ask(page, "Weave")
    told = page.eval_on_selector_all(
        f"{LAST} .text .piece", "all => all.map(one => [one.textContent, Number(one.dataset.i)])"
    )
    tokens = [one for char in text for one in char.encode().decode("latin-1")]  # one for each byte
    assert [piece for piece, i in told if piece != tokens[i]] == []
    assert "".join(piece for piece, _ in told) == "a boldx\\*y *zp = 1"  # 汉 is no one token's
    assert page.inner_text(f"{LAST} li >> nth=1") == "*z"
    page.hover(f"{LAST} .text strong .piece >> nth=1")
    assert '"o"' in page.inner_text("#token-tip .tip-head")
    page.hover("#say")
    assert page.is_hidden("#token-tip")


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=document.title='taken'>",
        "<script>document.title='taken'</script>",
        "[x](javascript:document.title='taken') ![x](http://x.invalid/a.png)",
        "```html\n<iframe srcdoc='<script>parent.document.title=1</script>'>\n```",
        '| a | b |\n|---|---|\n| <svg onload="document.title=1"> | **x** |',
    ],
)
def test_what_a_model_writes_never_becomes_html(page, site, text):
    site.says("Write", text)
    ask(page, "Write")
    allowed = {
        "p",
        "div",
        "span",
        "button",
        "pre",
        "code",
        "strong",
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
    assert set(kinds(page, f"{LAST} .text *")) <= allowed
    assert "taken" not in page.title()


def test_the_browser_itself_refuses_to_make_html_of_text(opened):
    page = opened(allow=("TrustedHTML", "Trusted Type"))
    refused = "() => { try { document.body.innerHTML = 'x'; return false } catch { return true } }"
    assert page.evaluate(refused)


def test_markdown_becomes_elements(page, site):
    source = (
        "# Title\n\nSome **bold**, *thin*, `a*b*` and snake_case_name.\n\n"
        "1. one\n2. two\n   - inner\n\n> said\n\n```python\nx = 1 < 2\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    )
    site.says("Mark", source)
    ask(page, "Mark")
    top = kinds(page, f"{LAST} .text > *")
    assert top == ["h3", "p", "ol", "blockquote", "div", "div"]
    assert page.inner_text(f"{LAST} strong") == "bold"
    assert page.inner_text(f"{LAST} p code") == "a*b*"
    assert page.inner_text(f"{LAST} ol ul li") == "inner"
    assert page.inner_text(f"{LAST} pre") == "x = 1 < 2"
    assert page.locator(f"{LAST} .text > p em").count() == 1


def test_reasoning_and_tool_calls_are_told_apart_and_folded(page):
    def chunk(delta, finish=None):
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city":'}}
    body = sse(
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning": "Let me think."}),
        chunk({"content": "Looking."}),
        chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": ' "Rome"}'}}]}, "tool_calls"),
    )
    sent = []

    def answer(route):
        sent.append(route.request.post_data_json)
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    ask(page, "Weather?")
    assert text_of(page) == "Looking."
    assert page.is_hidden(f"{LAST} .thoughts")
    page.click(f"{LAST} summary")
    assert page.inner_text(f"{LAST} .thoughts") == "Let me think."
    assert page.inner_text(f"{LAST} .call .name") == "weather"
    assert json.loads(page.inner_text(f"{LAST} .call pre")) == {"city": "Rome"}
    page.fill(f"{LAST} .results textarea", "sunny")
    page.click(f"{LAST} .results button")
    page.wait_for_selector(DONE)
    asked, told = sent[-1]["messages"][-2:]
    assert asked["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    assert told == {"role": "tool", "content": "sunny", "tool_call_id": "c1"}


def test_marks_of_reasoning_in_the_text_are_folded_too(page, site):
    site.says("Think", "<think>\nhidden\n</think>\n\nseen")
    ask(page, "Think")
    assert text_of(page) == "seen"
    assert page.is_hidden(f"{LAST} .thoughts")


def test_a_message_is_edited_and_an_answer_made_again(page, site):
    site.says("First", "wrong")
    site.says("Second", "right")
    ask(page, "First")
    page.hover(".message.user")
    page.click(".message.user button:text('Edit')")
    page.fill(".edit textarea", "Second")
    page.click(".edit button:text('Send again')")
    page.wait_for_selector(DONE)
    assert page.locator(".message").count() == 2
    assert text_of(page) == "right"
    site.says("Second", "right again")
    page.click(f"{LAST} button:text('Regenerate')")
    wait_until(page, f"document.querySelector('{LAST} .text').innerText === 'right again'")


def test_the_curl_command_asks_for_what_the_page_asked_for(opened, site):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    site.says("It's a 'test'", "Yes.")
    ask(page, "It's a 'test'")
    page.click(f"{LAST} button:text('Copy as curl')")
    page.wait_for_selector(f"{LAST} button:text('Copied')")
    words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    assert words[:3] == ["curl", "-N", f"{site.url}/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    got = httpx.post(words[2], json={**body, "stream": False, "stream_options": None})
    assert got.json()["choices"][0]["message"]["content"] == "Yes."


def test_settings_are_sent_and_what_the_server_refuses_is_not(page):
    sent = []
    page.route(
        "**/v1/chat/completions",
        lambda route: (
            sent.append(route.request.post_data_json),
            route.fulfill(
                body=sse(
                    {"choices": [{"index": 0, "delta": {"content": "ok"}, "finish_reason": "stop"}]}
                )
            ),
        ),
    )
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    page.fill("#c-temperature", "0.25")
    page.fill("#c-max_tokens", "7")
    page.fill("#stop", "END\nSTOP")
    page.fill("#functions", '[{"type": "function", "function": {"name": "f"}}]')
    ask(page, "Hi")
    assert sent[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    said = {name: sent[0][name] for name in ("temperature", "max_tokens", "stop")}
    assert said == {"temperature": 0.25, "max_tokens": 7, "stop": ["END", "STOP"]}
    assert sent[0]["tools"][0]["function"]["name"] == "f"
    page.keyboard.press("Escape")
    page.fill("#c-temperature", "3", force=True) if page.is_visible("#settings") else page.evaluate(
        "document.getElementById('c-temperature').value = 3"
    )
    ask(page, "Hi again", wait=False)
    assert page.is_visible("#settings")
    assert len(sent) == 1


def test_the_conversation_is_kept_only_if_asked_for(page, site):
    site.says("Keep?", "No.")
    ask(page, "Keep?")
    assert page.evaluate("localStorage.length") == 0
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".message").count() == 0
    ask(page, "Keep?")
    page.click("#open-settings")
    page.check("#keep")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".message").count() == 2
    page.click("#open-settings")
    page.uncheck("#keep")
    assert page.evaluate("localStorage.getItem('quire-chat')") is None


def test_a_key_is_asked_for_where_the_server_wants_one(opened, tokenizer):
    with Server(tokenizer, options=ServerOptions(api_key=("sesame",))).running() as guarded:
        page = opened(guarded.url, ready=False, allow=("401",))
        page.click("#key-cancel")
        assert page.is_disabled("#say")
        page.click("#enter-key")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("#key-error:not(:empty)")
        page.fill("#key", "sesame")
        page.click("#key-form button:text('Use it')")
        page.wait_for_selector("html[data-ready]")
        ask(page, "Hi")
        assert page.is_hidden(f"{LAST} .bad")
        assert page.evaluate("sessionStorage.getItem('quire-key')") == "sesame"
        assert page.evaluate("localStorage.length") == 0
        page.context.close()
        guarded.wait_idle()


def test_an_error_of_the_server_is_told(opened):
    page = opened(allow=("400",))
    page.click("#open-settings")
    page.fill("#c-max_tokens", "500")
    ask(page, "x" * 1600)
    assert "1536" in page.inner_text(f"{LAST} .bad")


def test_right_to_left_text_runs_right_to_left(page, site):
    site.says("مرحبا", "Hello.\n\nأهلا **بك**\n\n- واحد\n\n```\nx = 1\n```")
    ask(page, "مرحبا")
    direction = "one => getComputedStyle(one).direction"
    assert page.eval_on_selector(".message.user .text", direction) == "rtl"
    assert page.eval_on_selector(f"{LAST} .text p >> nth=0", direction) == "ltr"
    assert page.eval_on_selector(f"{LAST} .text p >> nth=1", direction) == "rtl"
    assert page.eval_on_selector(f"{LAST} .text li", direction) == "rtl"
    assert page.eval_on_selector(f"{LAST} .text pre", direction) == "ltr"


@pytest.mark.parametrize("width", [1000, 1280, 1360, 1600])
def test_settings_do_not_cover_the_box_to_write_in(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.click("#open-settings")
    box = page.locator("#say").bounding_box()
    for share in (0.01, 0.5, 0.99):
        at = [box["x"] + share * box["width"], box["y"] + box["height"] / 2]
        assert page.evaluate("([x, y]) => document.elementFromPoint(x, y).id", at) == "say"
