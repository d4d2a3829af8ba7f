"""Cases of regular expressions, schemas, grammars and tools.

"either": a form may be honoured or refused, but in time, without harm, and by all dialects alike.
"""

import json

from tests.abuse.dialects import CHAT, CHATS, COMPLETE, GENERATING
from tests.abuse.harness import LONG, Case

PORT = 9
"""Of addresses in references: a test sets its own, and sees that nobody comes."""
COMPILED_S = 90.0
"""For one form: workers compile beside all else that runs, and yield to it on a busy machine."""


def _each(origin, word, found, expect="refused", **more):
    both = more.pop("fields", {})
    more.setdefault("within_s", COMPILED_S)
    for name, value in found.items():
        fields = {**both, word: value}
        yield Case(id=f"{word}: {name}", origin=origin, fields=fields, expect=expect, **more)


def _regexes():
    refused = {
        "invalid": "[",
        "half a group": "(a",
        "a stray bracket": "a)",
        "nothing to repeat": "*a",
        "counts the wrong way": "a{3,1}",
        "empty": "",
        "a NUL": "a\0b",
        "half a character": "a\ud800",
        "a million times": "a{1,1000000}",
        "a thousand thousands": "(a{1,1000}){1,1000}",
        "a thousand of thousands of thousands": "((a{1000}){1000}){1000}",
        "look-behind": "(?<=a)b",
        "negative look-behind": "(?<!a)b",
        "a reference back": r"(a)\1",
        "a named reference": "(?P<x>a)(?P=x)",
        "recursion": "(a(?R)?b)",
        "a condition": "(a)?(?(1)b|c)",
        "a megabyte": "a" * 1_000_000,
        "a megabyte of groups": "(a|b)" * 200_000,
        "10,000 nested groups": "(" * 10_000 + "a" + ")" * 10_000,
        "no type": 5,
        "a list": ["a"],
        "matches nothing": "a^b",
    }
    yield from _each("11 CVE-2026-55574 vllm#17313", "regex", refused)
    odd = {
        "nested plus": "(a+)+b",
        "nested stars": "(.*)*",
        "alternation of alike": "(a|a|aa)*b",
        "a class of characters": r"\p{L}{1,9}",
        "words": r"\w+\s\w+",
        "look-ahead": "(?=a)a",
        "possessive": "a++b",
        "lazy": "a+?b",
        "flags": "(?i)abc",
        "anchors": "^a$",
        "a thousand letters": "a{1000}",
        "a hundred options": "|".join(f"word{i}" for i in range(100)),
        "exponential when determined": "(a|b)*a(a|b){14}",
        "any character": ".{1,200}",
        "emoji": "[\U0001f600-\U0001f64f]{1,3}",
        "beyond characters": r"\x{110000}",
        "octal": r"\08",
    }
    yield from _each("11 PYSEC-2026-3933", "regex", odd, "either")


def _deep(depth, leaf, wrap):
    for _ in range(depth):
        leaf = wrap(leaf)
    return leaf


def _any_of(depth):
    leaf = {"type": "string"}
    return _deep(depth, leaf, lambda one: {"anyOf": [one, {"oneOf": [one, {"type": "null"}]}]})


def _schemas():
    obj = {"type": "object"}
    away = {f"to {place}": {"$ref": f"{place}{PORT}/x.json"} for place in ("http://127.0.0.1:",)}
    refused = {
        **away,
        "to a file": {"$ref": "file:///etc/passwd"},
        "to a path": {"$ref": "../../etc/passwd"},
        "to a place without a scheme": {"$ref": f"//127.0.0.1:{PORT}/x"},
        "to nowhere": {"$ref": "#/$defs/nobody"},
        "to itself": {"$ref": "#"},
        "two to each other": {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        },
        "endless": {
            "type": "object",
            "properties": {"a": {"$ref": "#"}},
            "required": ["a"],
        },
        "a number for a reference": {"$ref": 5},
        "a number for a type": {"type": 5},
        "no such type": {"type": "text"},
        "conflict": {"allOf": [{"type": "string"}, {"type": "number"}]},
        "nothing allowed": {"not": {}},
        "an empty enum": {"enum": []},
        "min over max": {"type": "string", "minLength": 5, "maxLength": 2},
        "negative length": {"type": "string", "minLength": -1},
        "length of text": {"type": "string", "minLength": "5"},
        "a billion characters": {"type": "string", "minLength": 10**9},
        "a bad pattern": {"type": "string", "pattern": "["},
        "a heavy pattern": {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
        "10,000 deep": _deep(150, obj, lambda one: {"type": "object", "properties": {"a": one}}),
        "a list": [],
        "text": "a",
        "a number": 5,
        "properties of a list": {"type": "object", "properties": []},
        "required of text": {"type": "object", "required": "a"},
        "items of a number": {"type": "array", "items": 5},
    }
    yield from _each("12 CVE-2025-48944 vllm#17248", "schema", refused)
    many = {f"p{i}": {"type": "integer"} for i in range(10_000)}
    odd = {
        "a billion items": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
        "at least a billion items": {"type": "array", "items": {}, "minItems": 10**9},
        "100,000 values": {"enum": [f"value {i}" for i in range(100_000)]},
        "10,000 properties": {"type": "object", "properties": many},
        "all of them required": {
            "type": "object",
            "properties": dict(list(many.items())[:2000]),
            "required": list(many)[:2000],
        },
        "any of any": _any_of(12),
        "any of any, a little": _any_of(4),
        "a recursive tree": {
            "$defs": {"t": {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}}},
            "$ref": "#/$defs/t",
        },
        "a tuple of draft 7": {"type": "array", "items": [{"type": "string"}, {"type": "number"}]},
        "a list of types": {"type": ["null", "string"]},
        "null alone": {"type": ["null"]},
        "an empty schema": {},
        "true": True,
        "a heavy pattern, legal": {"type": "string", "pattern": "^(a+)+$"},
        "a format": {"type": "string", "format": "date-time"},
        "a pattern that looks behind": {"type": "string", "pattern": "(?<=a)b"},
        "no such format": {"type": "string", "format": "nobody"},
        "a huge number": {"type": "number", "maximum": 1e308, "multipleOf": 1e-300},
        "a huge integer": {"type": "integer", "maximum": 10**300, "minimum": -(10**300)},
        "odd names": {
            "type": "object",
            "properties": {key: {} for key in ("", '"', "\n", "\x00", "__proto__", "{{", "\u202e")},
        },
        "all together": {"allOf": [{"type": "object"}, {"properties": {"a": {"const": 1}}}]},
        "unevaluated": {"type": "object", "unevaluatedProperties": False},
        "if": {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "null"}},
        "names by pattern": {"type": "object", "patternProperties": {"^(a|a)*$": {}}},
        "product of patterns": {
            "type": "object",
            "patternProperties": {f"^.*{chr(97 + i)}.*$": {"minimum": i} for i in range(20)},
        },
        "a thousand references": {
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(999)}
            | {"d999": {"type": "null"}},
            "$ref": "#/$defs/d0",
        },
        "doubling references": {
            "$defs": {
                f"d{i}": {"type": "array", "items": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}
                for i in range(30)
            }
            | {"d30": {"type": "null"}},
            "$ref": "#/$defs/d0",
        },
    }
    yield from _each("12 CVE-2026-105757 vllm#12131", "schema", odd, "either")


def _empty_fields():
    """Fields of structured output, empty or of another type; on all routes that have them."""
    for name in ("structured_outputs", "guided_decoding"):
        for value in ({}, {"json": {}, "regex": "a"}, {"nobody": 1}, [], "a", 5, {"json": None}):
            yield Case(
                id=f"{name}: {json.dumps(value)}", origin="12 16 PR30346", fields={name: value}
            )
    empty = {
        "guided_json": ("", "[", [], 5),
        "guided_regex": ("", 5, []),
        "guided_choice": ([], [""], "a", [1], {}),
        "guided_grammar": ("", 5),
        "guided_json_object": ("", 5, {}),
        "structural_tag": ("", "[", [], {}, 5, '{"type":"nobody"}'),
        "response_format": ("", [], {}, {"type": "nobody"}, {"type": "json_schema"}, 5),
    }
    for name, values in empty.items():
        for value in values:
            # One empty text is a choice that ends the answer at once
            expect = "either" if value == [""] else "refused"
            yield Case(
                id=f"{name}: {json.dumps(value)}",
                origin="12 PR30346",
                fields={name: value},
                expect=expect,
            )
    both = {"guided_json": {"type": "object"}, "guided_regex": "a"}
    yield Case(id="two forms", origin="16", fields=both)
    both = {"schema": {"type": "object"}, "regex": "a"}
    yield Case(id="two forms in other words", origin="16", fields=both)
    for backend in ("nobody", "", "../x", "os", "xgrammar:nobody"):
        both = {"guided_regex": "a+", "guided_decoding_backend": backend}
        yield Case(id=f"backend: {backend}", origin="16 18 llama.cpp#19051", fields=both)
    for backend in ("xgrammar", "guidance", "outlines", "lm-format-enforcer", "auto"):
        both = {"guided_regex": "a+", "guided_decoding_backend": backend}
        yield Case(id=f"backend: {backend}", origin="16 18", fields=both, expect="either")
    tag = json.dumps({"type": "structural_tag", "format": {"type": "any_text"}})
    yield from _each("12", "tag", {"fine": tag}, "either")
    yield from _each("12", "tag", {"5000 deep": _tag_of(5000), "70 deep": _tag_of(70)})


def _tag_of(depth):
    """A structural tag that json.dumps() would not write: it is nested too deep."""
    inner = '{"type":"sequence","elements":[' * depth + '{"type":"any_text"}' + "]}" * depth
    return '{"type":"structural_tag","format":' + inner + "}"


def _grammars():
    refused = {
        "empty": "",
        "no rule": "a",
        "no root": "x ::= y",
        "half a rule": "root ::= (",
        "half a text": 'root ::= "a',
        "a megabyte": 'root ::= "' + "a" * 1_000_000 + '"',
        "10,000 rules": "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(10_001)),
        "10,000 brackets": 'root ::= "a"' + "(" * 10_000 + '"a"' + ")" * 10_000,
        "a rule of nobody": "root ::= nobody",
        "a NUL": 'root ::= "a\0"',
        "a number": 5,
        "a file": 'start: A\n%import .etc.passwd\nA: "a"',
    }
    yield from _each("14 llama.cpp#11400", "grammar", refused)
    odd = {
        "left recursion": 'root ::= root "a" | "a"',
        "left recursion by two": 'root ::= x "a" | "a"\nx ::= root "b"',
        "hidden left recursion": 'root ::= e root "a" | "a"\ne ::= ""',
        "nothing but itself": "root ::= root",
        "endless": 'root ::= "a" root',
        "all of nothing": 'root ::= ("" | "")*',
        "stars of stars": 'root ::= (("a"*)*)*',
        "a million times": 'root ::= "a"{1,1000000}',
        "a thousand thousands": 'root ::= x{1000}\nx ::= "a"{1000}',
        "ambiguous": 'root ::= root root | "a"',
        "Lark": 'start: "a"+',
        "Lark, left recursion": 'start: start "a" | "a"',
        "Lark imports": "start: WORD\n%import common.WORD",
        "Lark, heavy": "start: A\nA: /(a+)+b/",
    }
    yield from _each("14 llama.cpp#21600", "grammar", odd, "either")
    if LONG:  # each takes a worker for all the time that a grammar may take
        rules = "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(2000))
        heavy = {"2,000 rules": f'{rules}\nr2000 ::= "b"\nroot ::= r0'}
        yield from _each("14 58", "grammar", heavy, "either", within_s=300)


def _tool(name="f", description="d", **more):
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": {}},
        **more,
    }


def _tools():
    several = {
        "128": [_tool(f"f{i}", "") for i in range(128)],
        "two of one name": [_tool(), _tool()],
        "a name of marks": [_tool('"'), _tool("\\"), _tool("{{7*7}}"), _tool("</tool_call>")],
        "a name of controls": [_tool("\n"), _tool("\0"), _tool("\x1b")],
        "a name of letters": [_tool("\u00e9\u4e2d\u202e"), _tool("__proto__"), _tool("a b")],
        "a long name": [_tool("f" * 2000)],
        "a description of marks": [_tool(description='"""{{%#}} <|im_end|></tool_call> \\" ]]>')],
        "a recursive schema": [
            _tool(parameters={"type": "object", "properties": {"a": {"$ref": "#"}}})
        ],
        "a strict one": [_tool(strict=True)],
    }
    yield from _each("13 llama.cpp#27619", "tools", several, "either", routes=CHATS)
    forced = {f"{name}, forced": one for name, one in several.items()}
    fields = {"force": True, "max_tokens": 40}
    yield from _each("13 16", "tools", forced, "either", routes=CHATS, fields=fields)
    refused = {
        "10,000": [_tool(f"f{i}", "") for i in range(10_000)],
        "a megabyte": [_tool(description="a" * 1_500_000)],
        "no name": [_tool("")],
        "a number for a name": [_tool(5)],
    }
    yield from _each("13", "tools", refused, routes=CHATS)
    bad = {
        "a reference away": {"$ref": f"http://127.0.0.1:{PORT}/x"},
        "a reference to a file": {"$ref": "file:///etc/passwd"},
        "a heavy pattern": {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": "(a{1,1000}){1,1000}"}},
        },
        "no schema": {"type": 5},
    }
    for name, parameters in bad.items():
        fields = {"tools": [_tool(parameters=parameters)], "force": "f"}
        yield Case(id=f"parameters: {name}", origin="12 13", fields=fields, routes=CHATS)
    named = {"tools": [_tool()], "force": "nobody"}
    yield Case(id="a call of nobody", origin="13", fields=named, routes=CHATS)
    yield Case(id="a call without tools", origin="13", fields={"force": True}, routes=CHATS)


def _together():
    """16: a form with much else."""
    warm = {"temperature": 1.0, "n": 8, "regex": "[a-z]{1,9}"}
    routes = tuple(route for route in GENERATING if route in (CHAT, COMPLETE))
    yield Case(id="n of a form", origin="16", fields=warm, expect="answered", routes=routes)
    yield Case(
        id="a form with logprobs and penalties",
        origin="7 16 CVE-2026-44223",
        fields={
            "regex": "[a-z]{1,9}",
            "logprobs": 5,
            "frequency_penalty": 2.0,
            "presence_penalty": -2.0,
            "repetition_penalty": 2.0,
            "min_tokens": 2,
        },
        expect="answered",
        routes=routes,
    )
    banned = {"choice": ["a"], "allowed_token_ids": [5]}
    yield Case(
        id="a form that nothing allowed can say", origin="18", fields=banned, expect="either"
    )


CASES = [*_regexes(), *_schemas(), *_empty_fields(), *_grammars(), *_tools(), *_together()]
