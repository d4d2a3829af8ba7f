"""Chat templates that take long do not hold up the event loop that others are answered from."""

import asyncio
import threading
import time

import pytest

from quire.errors import RequestError
from quire.server.generation.off_loop import RENDER_CPU_BUDGET_S, run_off_loop
from quire.text.templates import jinja_sandbox
from quire.text.templates.chat_template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]
TURNS = "{{% for i in range({}) %}}{{% endfor %}}{{{{ messages[0].content }}}}!"


def work_of(template, threads):
    def work():
        threads.append(threading.current_thread())
        return template.render(USER)

    return work


def test_a_template_that_is_done_at_once_is_rendered_on_the_loop():
    threads = []
    work = work_of(ChatTemplate(TURNS.format(20)), threads)
    assert asyncio.run(run_off_loop(work, 10, 100)) == "hi!"
    assert threads == [threading.main_thread()]


def test_a_template_that_takes_long_goes_on_in_a_thread():
    threads = []
    work = work_of(ChatTemplate(TURNS.format(50_000)), threads)

    async def timed():
        began = time.thread_time()
        text = await run_off_loop(work, 10, 100)
        return text, time.thread_time() - began

    text, took = asyncio.run(timed())
    assert text == "hi!"
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
    assert took < 5 * RENDER_CPU_BUDGET_S


def test_many_templates_together_hold_up_the_loop_no_longer_than_one():
    threads, template = [], ChatTemplate(TURNS.format(3000))

    def work():
        threads.append(threading.current_thread())
        return [template.render(USER) for _ in range(25)]

    assert asyncio.run(run_off_loop(work, 10, 100)) == ["hi!"] * 25
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_in_the_thread_it_is_still_bounded():
    template = ChatTemplate(
        "{% for i in range(99999) %}{% for j in range(99) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(RequestError, match="loops more than"):
        asyncio.run(run_off_loop(lambda: template.render(USER), 10, 100))


def test_who_is_in_no_hurry_afterwards_is_not_held_to_it():
    with jinja_sandbox.render_deadline(0):
        pass
    assert ChatTemplate(TURNS.format(50_000)).render(USER) == "hi!"
