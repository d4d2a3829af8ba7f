"""The live view, and how the page looks: narrow, dark, still."""

import base64
import json
import re
import zlib

from tests.browser.conftest import BLOCKS, wait_until
from tests.browser.test_chat import DONE, LAST, LONG, ask

CANVAS = "document.querySelector('#map canvas').toDataURL()"


def number(page, selector):
    return int(page.inner_text(selector).replace(",", ""))


def live(page, *frames):
    """Let the page see these frames and no other."""
    body = "".join([f"data: {json.dumps(frame)}\n\n" for frame in frames])
    page.route(
        "**/quire/live?engine=0",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )


def test_the_map_changes_while_an_answer_is_made_and_keeps_its_prefix(page, site):
    site.says("Fill some blocks, please!", LONG)
    page.wait_for_selector("#live-state.good")
    site.server.wait_idle()
    site.server.ask(site.server.client.reset_prefix_cache())
    wait_until(page, lambda: number(page, "#l-free") == BLOCKS)
    before = page.evaluate(CANVAS)
    ask(page, "Fill some blocks, please!", wait=False)
    wait_until(page, "Number(document.getElementById('l-held').textContent) > 0")
    assert page.locator("#rows tr").count() == 1
    assert number(page, "#n-running") == 1
    wait_until(page, lambda: page.evaluate(CANVAS) != before)
    during = page.evaluate(CANVAS)
    page.wait_for_selector(DONE)
    wait_until(page, "document.getElementById('l-held').textContent === '0'")
    wait_until(page, lambda: page.evaluate(CANVAS) != during)
    assert number(page, "#l-cached") > 0
    assert number(page, "#l-free") == BLOCKS - number(page, "#l-cached")
    assert page.locator("#rows tr").count() == 0


def test_a_block_says_whose_it_is_to_pointer_and_keyboard(page, site):
    site.says("Whose?", LONG * 6)
    ask(page, "Whose?", wait=False)
    wait_until(page, "Number(document.getElementById('l-held').textContent) > 2")
    page.focus("#map canvas")
    page.keyboard.press("Home")
    assert page.inner_text("#map-said").startswith("Block 0: ")
    for _ in range(BLOCKS):
        if "held by chatcmpl-" in page.inner_text("#map-said"):
            break
        page.keyboard.press("ArrowRight")
    assert "held by chatcmpl-" in page.inner_text("#map-said")
    assert page.locator("#rows tr.marked").count() == 1
    page.click("#stop-answer")
    page.wait_for_selector(DONE)
    box = page.locator("#map canvas").bounding_box()
    page.mouse.move(box["x"] + 4, box["y"] + 4)
    wait_until(
        page, "/^Block 0: (free|cached)/.test(document.getElementById('map-said').textContent)"
    )


def test_charts_show_rates_and_times(page, site):
    site.says("Rates", LONG)
    ask(page, "Rates", wait=False)
    wait_until(page, "Number(document.getElementById('n-out').textContent) > 5")
    page.wait_for_selector(DONE)
    labels = page.eval_on_selector_all(
        ".plot:visible", "all => all.map(one => one.getAttribute('aria-label'))"
    )
    assert [label.partition(",")[0] for label in labels] == [
        "Tokens per second",
        "Time to first token",
        "Time between tokens",
    ]
    assert re.search(r"p50 [\d.]+ ms, p90 [\d.]+ ms, p99 [\d.]+ ms", labels[2])
    page.focus(".plot >> nth=0")
    page.keyboard.press("ArrowLeft")
    assert "2 s ago" in page.get_attribute(".plot >> nth=0", "aria-label")


def test_an_answer_says_where_its_time_went(page, site):
    site.says("Why?", LONG)
    ask(page, "Why?")
    page.wait_for_selector("#why .cuts")
    assert "generating" in page.get_attribute("#why .cuts", "aria-label")
    assert page.inner_text("#why .legend li >> nth=0").startswith("generating")
    page.wait_for_selector("#why-all .cuts")


def test_the_engine_is_left_alone_while_nobody_looks(page, site):
    page.wait_for_selector("#live-state.good")
    assert site.watched
    page.click("#pause")
    page.wait_for_selector("#live-state.off")
    wait_until(page, lambda: not site.watched)
    page.click("#pause")
    page.wait_for_selector("#live-state.good")
    page.set_viewport_size({"width": 390, "height": 800})  # the chat is shown, not the engine
    wait_until(page, lambda: not site.watched)


def frame_of(total, rows=50):
    """A pool of which half is held by some requests in turn."""
    held = total // 2
    states = bytes([2] * held + [3] * 10 + [1] * (total - held - 20) + [0] * 10)
    owners = [i % rows + 1 for i in range(held)] + [1] * 10 + [0] * (total - held - 10)
    packed = states + b"".join(one.to_bytes(2, "little") for one in owners)
    row = {
        "index": 0,
        "state": "running",
        "prompt": 10,
        "cached": 0,
        "computed": 10,
        "generated": 3,
    }
    return {
        "engines": 1, "at": 5.0, "running": rows, "waiting": 3, "preempted": 1, "max_seqs": 64,
        "rows": [{**row, "id": f"chatcmpl-{i}", "blocks": 9, "preemptions": 0, "seconds": 1.0} for i in range(rows)],
        "totals": {"prompt": 9, "generated": 9, "steps": 3, "finished": 0, "preemptions": 1, "queried": 4, "hit": 1, "cuts": {}, "draft_rows": 0, "drafted": 0, "accepted": 0},
        "blocks": {"size": 16, "total": total, "held": held + 10, "shared": 10, "cached": total - held - 20, "free": 10},
        "first": [0.01, 0.02, 0.03], "gap": None, "map": base64.b64encode(zlib.compress(packed)).decode(),
    }  # fmt: skip


def test_maps_of_all_sizes_can_be_read(opened):
    for total in (60, 4_000, 100_000):
        page = opened(viewport={"width": 1280, "height": 800})
        live(page, frame_of(total))
        page.reload()
        wait_until(page, f"document.getElementById('map-sum').textContent.startsWith('{total:,}')")
        if total > 1500:
            page.click("#map-all")
        page.wait_for_timeout(50)
        box = page.locator("#map canvas").bounding_box()
        assert box["height"] <= 320
        page.mouse.move(box["x"] + 0.5, box["y"] + 0.5)
        wait_until(
            page,
            "document.getElementById('map-said').textContent.startsWith('Block 0: held by chatcmpl-0 ')",
        )
        assert page.locator("#rows tr").count() == 40
        assert page.inner_text("#requests-more") == "and 13 more sequences"
        page.context.close()


def test_drafts_have_a_tile_and_a_chart_once_there_are_some(opened):
    page, frame = opened(viewport={"width": 1280, "height": 800}), frame_of(60)
    live(page, frame)
    page.reload()
    wait_until(page, "document.getElementById('map-sum').textContent.startsWith('60')")
    assert page.is_hidden("#drafts")
    assert page.locator(".plot:visible").count() == 3
    page.unroute("**/quire/live")
    totals = frame["totals"] | {"draft_rows": 4, "drafted": 10, "accepted": 6}
    live(page, frame, frame | {"at": 7.0, "totals": totals})
    page.reload()
    wait_until(page, "document.getElementById('n-drafts').textContent === '60.0 %'")
    assert page.is_visible("#drafts")
    label = page.locator(".plot:visible").last.get_attribute("aria-label")
    assert label.startswith("Tokens per step with drafts")
    page.context.close()


def test_it_fits_a_phone(opened, site):
    site.says("Narrow", "```\n" + "x" * 90 + "\n```\n\n" + "y" * 60)
    page = opened(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    fits = "document.scrollingElement.scrollWidth <= innerWidth"
    ask(page, "Narrow")
    assert page.evaluate(fits)
    page.click("[data-show=engine]")
    page.wait_for_selector("#live-state.good")
    assert page.is_hidden("#chat")
    assert page.evaluate(fits)
    page.click("[data-show=chat]")
    page.click("#open-settings")
    assert page.evaluate(fits)
    assert page.is_visible("#c-temperature")
    page.click("#close-settings")
    assert page.is_visible(f"{LAST} .text")
    sizes = page.eval_on_selector_all(
        ".top button:not([hidden]), .box button",
        "all => all.map(b => b.offsetHeight).filter(h => h)",
    )
    assert min(sizes) >= 36


def test_it_is_dark_or_light_as_the_system_or_the_person_says(opened):
    page = opened(color_scheme="dark")
    lightness = "(() => { const c = getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g); return +c[0] })()"
    assert page.evaluate(lightness) < 60
    page.emulate_media(color_scheme="light")
    assert page.evaluate(lightness) > 200
    page.select_option("#theme", "dark")
    assert page.evaluate(lightness) < 60
    page.reload()
    assert page.evaluate(lightness) < 60


def test_nothing_moves_for_those_who_want_it_still(opened):
    moving = (
        "getComputedStyle(document.querySelector('.actions') ?? document.body).transitionDuration"
    )
    page = opened(reduced_motion="reduce")
    page.evaluate(
        "document.getElementById('messages').append(Object.assign(document.createElement('div'), {className: 'actions'}))"
    )
    assert page.evaluate(moving) == "0s"


def test_every_control_has_a_name(page, site):
    site.says("Names", "ok")
    ask(page, "Names")
    page.click("#open-settings")
    nameless = """() => [...document.querySelectorAll('button, input, select, textarea, canvas, svg')]
        .filter(one => !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length))
        .map(one => one.outerHTML.slice(0, 80))"""
    assert page.evaluate(nameless) == []
