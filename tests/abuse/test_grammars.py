"""Regular expressions, schemas, grammars, tools: too heavy, too many, wrong, or leading elsewhere."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.abuse import dialects, grammars
from tests.abuse.harness import AUTH, KEY, LONG, Case, metric
from tests.abuse.wire import address, post

FLOOD = 10_000 if LONG else 24
MOST_KEPT = (1 << 26) + (1 << 20)
"""Bytes of grammars that nobody uses: the default of the engine, and some that are in use."""


def test_no_form_does_harm(victim):
    with victim.unharmed():
        victim.check(grammars.CASES)


def test_no_two_cases_have_one_name():
    names = [case.id for case in grammars.CASES]
    assert len(set(names)) == len(names)


IGNORED = ("$dynamicRef", "$recursiveRef")


def test_references_are_never_fetched(victim):
    """Whatever scheme, wherever in a schema: nobody comes to the address that they name."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        wheres = [
            *(f"{scheme}://127.0.0.1:{port}/x" for scheme in ("http", "https", "ftp", "ws")),
            f"//127.0.0.1:{port}/x",
        ]
        cases = []
        for ref in wheres:
            inside = {"type": "object", "properties": {"a": {"$ref": ref}}, "required": ["a"]}
            for word, expect in (("$ref", "refused"), *dict.fromkeys(IGNORED, "either").items()):
                fields = {"schema": {word: ref}}
                cases.append(Case(id=f"{word} {ref}", origin="12", fields=fields, expect=expect))
            cases.append(Case(id=f"inside {ref}", origin="12", fields={"schema": inside}))
            tool = {"name": "f", "parameters": {"$ref": ref}}
            fields = {"tools": [tool], "force": "f"}
            cases.append(Case(id=f"tool {ref}", origin="12", fields=fields))
            for word in ("$schema", "$id"):  # a name and nothing more
                fields = {"schema": {word: ref, "type": "boolean"}}
                cases.append(Case(id=f"{word} {ref}", origin="12", fields=fields, expect="either"))
        with victim.unharmed():
            victim.check(cases)
        try:
            listener.accept()
        except TimeoutError:
            return
    raise AssertionError("somebody came")


def test_a_flood_of_schemas_that_differ_leaves_bounded_caches(victim):
    """15: each is compiled, and what is kept of them has a bound."""

    def case(i):
        schema = {"type": "object", "properties": {f"name{i}": {"type": "integer", "maximum": i}}}
        return Case(
            id=f"schema {i}",
            origin="15 CVE-2025-29770",
            fields={"schema": schema},
            expect="answered",
            routes=(dialects.GENERATING[i % len(dialects.GENERATING)],),
            streams=False,
            within_s=300 if LONG else 60,
        )

    with victim.unharmed():
        victim.check([case(i) for i in range(FLOOD)], at_once=32)
        with httpx.Client(base_url=victim.url, headers=AUTH, timeout=60) as client:
            text = client.get("/metrics").text
        assert metric(text, "quire:grammars_kept_bytes") < MOST_KEPT
        assert metric(text, "quire:grammars_kept") <= 1024
        assert metric(text, "quire:grammars_waiting") == 0


def test_leaving_while_a_form_is_compiled_leaves_nothing(victim):
    """16: eight answers each, gone in the middle of it; those who stay get theirs."""

    def body(i):
        options = "|".join(f"(word{i}{k}|w{k}[a-z]{{1,30}})" for k in range(40))
        return {"prompt": "a", "max_tokens": 4, "n": 8, "guided_regex": f"({options}){{1,9}}"}

    def leave(i):
        with socket.create_connection(address(victim), timeout=60) as made:
            raw = post(json.dumps({**body(i), "stream": i % 2 == 0}).encode(), key=KEY)
            made.sendall(raw)

    with victim.unharmed(), ThreadPoolExecutor(8) as pool:
        staying = pool.submit(
            httpx.post,
            f"{victim.url}/v1/completions",
            json={"prompt": "a", "max_tokens": 3, "guided_regex": "[xyz]{3}"},
            headers=AUTH,
            timeout=120,
        )
        list(pool.map(leave, range(24)))
        answer = staying.result()
        assert answer.status_code == 200, answer.text
        assert set(answer.json()["choices"][0]["text"]) <= set("xyz")


def test_what_is_answered_has_the_form_that_was_asked_for(victim):
    """18: never 200 with a text that is free."""
    asked = {
        "[0-9]{3}": {"structured_outputs": {"regex": "[0-9]{3}"}},
        "(ja|nein)": {"structured_outputs": {"choice": ["ja", "nein"]}},
        "(xx|y)": {"structured_outputs": {"grammar": 'root ::= "xx" | "y"'}},
    }
    for form, fields in asked.items():
        for backend in ("auto", "guidance", "xgrammar"):
            body = {"prompt": "Say:", "max_tokens": 9, "temperature": 1.0, **fields}
            body["structured_outputs"] = {**fields["structured_outputs"], "backend": backend}
            got = httpx.post(f"{victim.url}/v1/completions", json=body, headers=AUTH, timeout=60)
            assert got.status_code == 200, (form, backend, got.text)
            said = got.json()["choices"][0]["text"]
            assert re.fullmatch(form, said), (form, backend, said)
