"""Chat templates: checklist 5.3. Strangers' templates, hostile messages for the operator's, variables."""

import asyncio
import functools
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from quire.errors import Overloaded, RequestError
from quire.server.process import template_workers
from quire.text.templates import jinja_sandbox
from quire.text.templates.chat_template import RESERVED_VARIABLES, ChatTemplate
from quire.text.templates.render_pool import TemplateRenderPool
from tests.abuse import dialects
from tests.abuse.harness import FLAGS, KEY, OTHER_KEY, Case, Victim
from tests.server import running

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
GOOD = "{% for m in messages %}{{ m.content }}!{% endfor %}"
MOST = 1 << 20

HOSTILE = {
    "a loop without end": "{% for i in range(10**12) %}a{% endfor %}",
    "loops in loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "ten billion characters": "{{ 'A' * 10**10 }}",
    "doubling": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "lists that double": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}"
    "{% endmacro %}{{ m(90) }}",
    "six thousand parentheses": "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}",
    "a hundred thousand brackets": "{{ " + "[" * 100_000 + " }}",
    "nested blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a class by a filter": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "a class by subscript": "{{ ''['__class__']['__mro__'] }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "globals of lipsum": "{{ lipsum.__globals__['os'].system('id') }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "self": "{{ self.__init__.__globals__ }}",
    "a generator's frame": "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "an include": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.system('id') }}",
    "an extends": "{% extends '/etc/passwd' %}",
    "a wide filter": "{{ 'a'|center(10**11) }}",
    "a wide method": "{{ 'a'.ljust(10**11) }}",
    "a wide format": "{{ '{:>99999999999}'.format(1) }}",
    "a wide percent": "{{ '%99999999999d' % 1 }}",
    "a wide percent filter": "{{ '%99999999999d'|format(1) }}",
    "a wide indent": "{{ 'a\nb'|indent(10**11) }}",
    "a long replace": "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}",
    "a long join": "{{ (['a' * 10**6] * 10**6)|join }}",
    "a power": "{{ 9**(9**9) }}",
    "powers of powers": "{% set ns = namespace(x=9) %}{% for i in range(40) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "a long lipsum": "{{ lipsum(n=10**9) }}",
    "a slow filter": "{{ range(10**5)|list|sum(start=0) }}{{ (range(99999)|list * 300)|sort|length }}",
    "batches": "{{ range(10**5)|batch(1, 'a' * 10**6)|list|string|length }}{{ 9**(9**9) }}",
    "a long truth": "{{ range(10**9)|list }}",
    "wordwrap": "{{ ('a ' * 10**7)|wordwrap(1)|wordwrap(1)|wordwrap(1)|wordwrap(1) }}{{ 9**(9**9) }}",
    "urlize": "{{ ('http://a.b/' * 10**6)|urlize }}{{ 9**(9**9) }}",
    "chained filters": "{{ 'a'" + "|upper|lower" * 20_000 + " }}{{ 9**(9**9) }}",
    "half a surrogate pair, and a fault": "{{ '\\ud800' }}{{ 1/0 }}",
    "not a template": "{% for %}",
}
NOTHING = {
    HOSTILE["a class by a filter"]: "",
    HOSTILE["format_map"]: "",
}
"""What they come to where Jinja has a word for nothing, in place of a fault."""


def hire(made, **limits):
    return TemplateRenderPool(made._workers._launch, **limits)


def render(made, source, most=MOST, **call):
    return asyncio.run(made.render(source, {}, CHAT | call, most))


@pytest.fixture(scope="module")
def made():
    made = hire(template_workers.build_template_workers(), seconds=0.2, memory=1 << 27)
    render(made, GOOD)
    yield made
    made.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_refused_in_time_and_the_next_works(made, source):
    before = len(os.listdir("/proc/self/fd"))
    began = time.monotonic()
    with suppress(RequestError, Overloaded):  # 429 on a machine that is busy
        said = render(made, source)
        assert source in NOTHING, said[:200]
        assert said == NOTHING[source]
    assert time.monotonic() - began < 30
    assert render(made, GOOD) == "hi!"
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_values_of_every_kind_come_through(made):
    given = {"a": 10**30, "b": "\ud800 ü 🙂", "c": [None, True, 1.5, {"d": []}], "e": float("inf")}
    found = render(made, "{{ x.a }}{{ x.b }}{{ x.c }}{{ x.e }}", variables={"x": given})
    assert found == f"{10**30}\ud800 ü 🙂[None, True, 1.5, {{'d': []}}]inf"


def test_a_result_is_as_long_as_the_server_reads_and_no_longer(made):
    assert len(render(made, "{{ 'a' * 1000 }}", most=1000)) == 1000
    with pytest.raises(RequestError, match="at most 999"):
        render(made, "{{ 'a' * 1000 }}", most=999)


def test_what_is_nested_too_deep_does_not_reach_a_worker(made):
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match="deeper than"):
        render(made, GOOD, variables={"x": deep})


def test_one_who_hangs_holds_up_nobody_else(made):
    async def both():
        hangs = asyncio.create_task(made.render(HOSTILE["powers of powers"], {}, CHAT, MOST))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        said = await made.render(GOOD, {}, CHAT, MOST)
        took = time.monotonic() - began
        with pytest.raises((RequestError, Overloaded)):
            await hangs
        return said, took, hangs.done()

    said, _, _ = asyncio.run(both())
    assert said == "hi!"


def test_a_worker_that_is_killed_is_replaced(made):
    render(made, GOOD)
    for pid in made.idle_workers:
        os.kill(pid, 9)
    assert render(made, GOOD) == "hi!"


def test_too_many_who_wait_are_told_so(made, monkeypatch):
    monkeypatch.setattr(made._workers, "_max_waiting", 3)

    async def many():
        return await asyncio.gather(
            *(made.render(GOOD, {}, CHAT, MOST) for _ in range(7)), return_exceptions=True
        )

    found = asyncio.run(many())
    assert [isinstance(one, Overloaded) for one in found] == [False] * (2 + 3) + [True] * 2


def test_a_worker_has_no_secret_no_file_and_no_way_out(made, monkeypatch):
    """What a template could do that had broken out of Jinja's sandbox."""
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    made = hire(made)
    render(made, GOOD)
    (pid,) = made.idle_workers
    with open(f"/proc/{pid}/limits") as limits:
        assert next(line.split()[3] for line in limits if line.startswith("Max open files")) == "1"
    assert "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()
    assert "secret" not in Path(f"/proc/{pid}/environ").read_text()
    made.close()


def test_doors_that_are_closed_stay_closed():
    script = (
        "import os, socket, sys\nfrom quire.sandbox.landlock import restrict_process\n"
        "version = restrict_process()\nbad = []\n"
        "def no(name, act):\n"
        "    try: act()\n"
        "    except OSError: return\n"
        "    bad.append(name)\n"
        "no('open', lambda: open('/etc/passwd'))\n"
        "no('socket', lambda: socket.socket())\n"
        "no('pipe', os.pipe)\n"
        "if version >= 1: no('unlink', lambda: os.unlink(sys.argv[1]))\n"
        "if version >= 6: no('kill', lambda: os.kill(os.getppid(), 0))\n"
        "sys.exit(repr(bad) if bad else 0)\n"
    )
    with tempfile.NamedTemporaryFile() as file:
        done = subprocess.run(
            [sys.executable, "-c", script, file.name], capture_output=True, check=False
        )
    assert done.returncode == 0, done.stderr.decode()


# -- the operator's template, and what users make of it ---------------------------------------

OWN = {
    "it joins all to all": "{% for m in messages %}{% for n in messages %}{{ m.role }}{% endfor %}{% endfor %}",
    "it grows a text": "{% set ns = namespace(x='') %}{% for m in messages %}"
    "{% set ns.x = ns.x ~ m.content %}{% endfor %}{{ ns.x }}",
    "it searches the first in each": "{% for m in messages %}{% if 'zz' in messages[0].content %}a{% endif %}{% endfor %}",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", OWN.values(), ids=OWN)
def test_messages_without_end_do_not_make_a_good_template_hang(source, monkeypatch):
    monkeypatch.setattr(
        jinja_sandbox,
        "make_fuel_meter",
        functools.partial(jinja_sandbox.make_fuel_meter, seconds=0.5),
    )
    messages = [{"role": "user", "content": "z a" * 400_000}]
    messages += [{"role": "user", "content": "a" * 400}] * 20_000
    began = time.thread_time()
    with pytest.raises(RequestError):
        ChatTemplate(source).render(messages)
    assert time.thread_time() - began < 12


def test_a_hundred_thousand_developers_become_one_system_in_a_moment():
    messages = [{"role": "developer", "content": "a" * 50}] * 100_000
    began = time.thread_time()
    text = ChatTemplate("{{ messages|length }}{{ messages[0].content|length }}").render(messages)
    assert text == f"1{100_000 * 52 - 2}"
    assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    "name", [*sorted(RESERVED_VARIABLES), "_quire_meter", "_quire_check", "__class__", "_"]
)
def test_no_variable_steers_the_rendering(name):
    with pytest.raises(RequestError, match=name) as refused:
        ChatTemplate(GOOD).render(CHAT["messages"], variables={name: 1})
    assert refused.value.param == "chat_template_kwargs"


# -- served -----------------------------------------------------------------------------------

KWARGS = [
    Case(id=f"chat_template_kwargs {name}", origin="21", fields={"chat_template_kwargs": {name: 1}},
         routes=dialects.ALL, streams=name == "tokenize")
    for name in ("tokenize", "add_generation_prompt", "messages", "tools", "return_tensors", "conversation",
                 "padding", "max_length", "chat_template", "_quire_meter")
]  # fmt: skip
KWARGS += [
    Case(id="a template", origin="19", fields={"chat_template": GOOD}, routes=dialects.ALL),
    Case(id="a template's path", origin="19", fields={"chat_template": "/etc/passwd"}, routes=dialects.ALL),
    Case(id="a template's name", origin="19", fields={"chat_template": "default"}, routes=dialects.ALL),
    Case(id="a huge variable", origin="21", fields={"chat_template_kwargs": {"x": "a" * 7_000_000}},
         routes=dialects.ALL, expect="answered", streams=False),
    Case(id="variables named as globals", origin="21", routes=dialects.ALL, expect="either",
         fields={"chat_template_kwargs": {"range": 1, "self": 2, "namespace": 3, "raise_exception": "a", "caller": 4}}),
]  # fmt: skip


def deep(levels):
    made = "a"
    for _ in range(levels):
        made = [made]
    return made


def talk(*messages):
    return {"messages": [*messages, {"role": "user", "content": "a"}]}


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = [
    Case(id=name, origin="22", fields=fields, routes=(dialects.CHAT, dialects.TOKENIZE_CHAT), expect=expect,
         streams=False)
    for name, fields, expect in (
        ("an unknown role", talk({"role": "ghost", "content": "a"}), "either"),
        ("a role that is a list", talk({"role": ["user"], "content": "a"}), "refused"),
        ("a role of a megabyte", talk({"role": "a" * 1_100_000, "content": "a"}), "refused"),
        ("content null", talk({"role": "user", "content": None}), "refused"),
        ("content a number", talk({"role": "user", "content": 5}), "refused"),
        ("content nested", talk({"role": "user", "content": deep(500)}), "refused"),
        ("a part nested", talk({"role": "user", "content": [{"type": "text", "text": deep(400)}]}), "refused"),
        ("a key nested", talk({"role": "user", "content": "a", "x": deep(400)}), "refused"),
        ("a hundred thousand messages", {"messages": [{"role": "user", "content": "a"}] * 100_000}, "refused"),
        ("a hundred thousand parts", talk({"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}),
         "refused"),
        ("a result without a call", talk({"role": "tool", "tool_call_id": "x", "content": "a"}), "either"),
        ("a call twice", talk({"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}), "either"),
        ("arguments nested", talk({"role": "assistant", "content": "a", "tool_calls": [
            CALL | {"function": {"name": "f", "arguments": "[" * 100_000}}]}), "either"),
        ("no message", {"messages": []}, "refused"),
    )
]  # fmt: skip


def test_variables_and_messages_do_not_harm_a_server(victim):
    with victim.unharmed():
        victim.check(KWARGS)
        victim.check(MESSAGES)


SERVED = (
    "a macro that calls itself twice",
    "six thousand parentheses",
    "a class",
    "a wide method",
    "a long truth",
)
BROUGHT = [
    Case(id=name, origin="20", fields={"chat_template": HOSTILE[name]}, streams=False,
         routes=(dialects.CHAT, dialects.BATCH, dialects.TOKENIZE_CHAT))
    for name in SERVED
] + [Case(id="a good one", origin="20", fields={"chat_template": GOOD}, routes=dialects.ALL, expect="answered")]  # fmt: skip


@pytest.fixture(scope="module")
def trusting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trusting")
    keys = f"{KEY},{OTHER_KEY}"
    words = ("embedded", *FLAGS, "--trust-request-chat-template")
    with running.serving(*words, folder=folder, QUIRE_API_KEY=keys) as server:
        made = Victim(server, folder)
        yield made
        made.close()


def test_a_server_that_trusts_templates_is_not_harmed_by_them(trusting):
    trusting.check(BROUGHT[-1:] * 16)  # at once: all workers and their threads are there
    trusting.rest = trusting.settled()
    with trusting.unharmed():
        trusting.check(BROUGHT)
