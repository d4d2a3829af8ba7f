"""What the one machine does in every dialect: malformed text, ids, types, one call only, its time."""

import gc
import itertools
import json
import weakref

import pytest

from quire.text.output.parsed_text import ParsedCallDelta, ParsedPiece
from quire.text.tools.base import closing_literals, tools_by_name
from tests.pure.tools.rendering import CallToRender, render_calls
from tests.pure.tools.samples import (
    DECLARED,
    FORMATS,
    TEXT,
    calls_of,
    corpus,
    dialect_of,
    function,
    pieces_of,
    read,
    reader,
)

WEATHER = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rom", "days": 2}}</tool_call>'


def pieces(dialect, text, **options):
    return pieces_of(reader(dialect, **options), [text])


def test_arguments_are_told_as_they_come():
    parser = reader("hermes")
    assert parser.push('<tool_call>{"name": "write_file", "arguments": {"path"') == []
    (first,) = parser.push(': "a b')
    assert first.call == ParsedCallDelta(
        0, "chatcmpl-tool-" + "0123456789abcdef" * 2, "write_file", '{"path": "a b'
    )
    (second,) = parser.push(" c")
    assert second == ParsedPiece(call=ParsedCallDelta(0, arguments=" c"))
    (third,) = parser.push('"}}')
    assert third == ParsedPiece(call=ParsedCallDelta(0, arguments='"}', outcome="whole"))


def test_content_comes_at_once_and_the_beginning_of_a_mark_does_not():
    parser = reader("hermes")
    assert parser.push("It is <b>") == [ParsedPiece("It is <b>")]
    assert parser.push(" so <tool") == [ParsedPiece(" so")]
    assert parser.push("ing>") == [ParsedPiece(" <tooling>")]


def test_a_mark_that_is_never_finished_comes_back_at_the_end():
    parser = reader("hermes")
    parser.push("a <tool_ca")
    assert parser.push("", last=True) == [ParsedPiece(" <tool_ca")]


def test_a_call_that_breaks_after_it_was_told_ends_as_broken_and_its_rest_is_content():
    said = read("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1 oops}}</tool_call> x')
    (call,) = said.calls
    assert (call.arguments, call.outcome) == ('{"a": 1', "broken")
    assert said.text == " oops}}</tool_call> x"
    assert len(said.notes) == 1


def test_several_objects_in_one_tag_are_several_calls():
    one = '{"name": "now", "arguments": {}}'
    said = read("jamba", f"<tool_calls>\n{one}\n{one}\n</tool_calls>")
    assert (calls_of(said), said.text, said.notes) == ([("now", {})] * 2, "", [])


def test_what_breaks_behind_the_arguments_leaves_the_call_whole():
    text = '<tool_call>{"name": "now", "arguments": {}, "id": "x" oops}</tool_call> y'
    said = read("hermes", text)
    assert calls_of(said) == [("now", {})]
    assert said.text == " oops} y"
    assert len(said.notes) == 1


def test_with_eager_off_a_call_that_breaks_is_content_to_its_beginning():
    text = '<tool_call>{"name": "now", "arguments": {"a": 1 oops}}</tool_call> x'
    said = read("hermes", text, eager=False)
    assert (said.calls, said.text) == ([], text)


def test_with_eager_off_a_call_that_breaks_takes_no_place():
    broken = '<tool_call>{"name": "now", "arguments": {"a": 1 oops}}'
    (call,) = read("hermes", broken + WEATHER, eager=False).calls
    assert (call.index, call.name) == (0, "get_weather")


@pytest.mark.parametrize("dialect", FORMATS)
def test_with_eager_off_calls_come_whole(dialect):
    for sample in corpus(dialect):
        told = [p.call for p in pieces(dialect, sample["text"], eager=False) if p.call]
        found = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in told]
        assert found == sample["calls"]
        assert {c.outcome for c in told} <= {"whole"}


def test_a_cut_call_is_told_as_cut_and_says_so():
    said = read("hermes", '<tool_call>{"name": "write_file", "arguments": {"path": "a')
    assert said.calls[0].outcome == "cut"
    assert said.calls[0].arguments == '{"path": "a'
    assert (said.text, len(said.notes)) == ("", 1)


def test_a_call_cut_before_its_arguments_is_content():
    text = '<tool_call>{"name": "write_file", "argum'
    said = read("hermes", text)
    assert (said.calls, said.text, len(said.notes)) == ([], text, 1)


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("llama3_json", '{"name": "now", "parameters": {}}; '),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}},\n'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n</tool_'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'),
    ],
)
def test_what_stands_between_calls_is_no_content_where_the_text_ends(dialect, text):
    said = read(dialect, text)
    assert (calls_of(said), said.text) == ([("now", {})], "")


@pytest.mark.parametrize("text", ["<tool_calls>[]</tool_calls>", "<tool_calls>[ ] and more"])
def test_a_list_of_no_calls_is_content_with_a_note(text):
    said = read("jamba", text)
    assert (said.calls, said.text, len(said.notes)) == ([], text, 1)


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("hermes", '<tool_call>{"name": "now", "name": "search", "arguments": {}}</tool_call>'),
        (
            "hermes",
            '<tool_call>{"arguments": {}, "arguments": {"a": 1}, "name": "now"}</tool_call>',
        ),
        (
            "glm45",
            "<tool_call>now\n<arg_key>a</arg_key> lost? <arg_value>1</arg_value></tool_call>",
        ),
    ],
)
def test_what_could_be_read_in_two_ways_is_content(dialect, text):
    said = read(dialect, text)
    assert (said.calls, said.text, len(said.notes)) == ([], text, 1)


def test_one_call_only_tells_the_first_and_counts_the_others():
    said = read("hermes", WEATHER * 3, parallel=False)
    assert calls_of(said) == [("get_weather", {"city": "Rom", "days": 2})]
    assert said.notes == ["2 more calls were dropped: only one was allowed"]
    assert said.text == ""


def test_arguments_too_deep_for_json_readers_are_content():
    deep = '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 100_000
    said = read("hermes", deep)
    assert said.calls[0].outcome == "broken"
    assert len(said.calls[0].arguments) < 300


def test_a_number_without_end_is_no_number():
    said = read("hermes", '<tool_call>{"name": "now", "arguments": {"a": ' + "1" * 5000 + "}}")
    assert said.calls[0].outcome == "broken"


@pytest.mark.parametrize(
    "word", ["NaN", "Infinity", "-Infinity", "undefined", "01", "1.", ".5", "+1"]
)
def test_what_is_no_json_never_ends_whole(word):
    said = read("hermes", f'<tool_call>{{"name": "now", "arguments": {{"a": {word}}}}}</tool_call>')
    assert said.calls[0].outcome == "broken"


def string_as_read(dialect, literal):
    """What a string is that was written so; the same whether or not it came in characters."""
    form = '<tool_call>{{"name": "search", "arguments": {{"query": {}}}}}</tool_call>'
    text = (form if dialect == "hermes" else "[search(query={})]").format(literal)
    (found,) = calls_of(read(dialect, text))
    assert calls_of(read(dialect, *text, "")) == [found]
    return found[1]["query"]


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        (r'"\d\/\'\\"', "\\d/'\\"),
        (r'"\u00e9\ud83d\ude00"', "é😀"),
        (r'"\uZZ \u12"', r"\uZZ \u12"),
        (r'"\x41"', r"\x41"),
        (r"""'it is "so"'""", 'it is "so"'),
        ('"a\nb"', "a\nb"),
    ],
)
def test_a_string_of_json_and_its_slips(literal, value):
    assert string_as_read("hermes", literal) == value


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        (r'"\d\/\'\\"', "\\d\\/'\\"),
        (r"'\x41\u00e9\U0001f600'", "Aé😀"),
        (r"'\ud83d\ude00'", "😀"),
        (r"'\x4 \uZZ \U99999999'", r"\x4 \uZZ \U99999999"),
        (r"'\a\v\0'", "\a\v\0"),
        ("'a\\\nb'", "ab"),
        ("''", ""),
        ("'''a''b'''", "a''b"),
    ],
)
def test_a_string_of_python(literal, value):
    assert string_as_read("pythonic", literal) == value


def test_a_null_character_in_a_string_is_escaped():
    said = read("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\0\x1f"}}</tool_call>')
    assert calls_of(said) == [("now", {"a": "\0\x1f"})]


@pytest.mark.parametrize("name", ["", " ", "a b", "<x>", "x" * 600, 'a"b', "{}"])
def test_what_is_no_name_makes_no_call(name):
    text = f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {{}}}}</tool_call>'
    said = read("hermes", text)
    assert (said.calls, said.text) == ([], text)


def test_a_strange_name_is_a_name_if_it_was_declared():
    tools = [function('say "hi"')]
    text = '<tool_call>{"name": "say \\"hi\\"", "arguments": {}}</tool_call>'
    assert calls_of(read("hermes", text, tools=tools)) == [('say "hi"', {})]


def test_an_undeclared_function_is_told_where_marks_make_it_a_call():
    said = read("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>')
    assert calls_of(said) == [("other", {})]


@pytest.mark.parametrize("dialect", FORMATS)
def test_an_undeclared_function_is_a_call_unless_the_format_has_declared_ones_only(dialect):
    text = render_calls(dialect_of(dialect), [CallToRender("other", {"city": "Rom"})])
    said = read(dialect, text)
    bare = dialect in ("llama3_json", "pythonic", "xlam")
    if bare or dialect_of(dialect).declared_only:
        assert (said.calls, said.text) == ([], text)
    else:
        assert [call.name for call in said.calls] == ["other"]
    if dialect not in ("llama3_json", "pythonic"):  # without tools any answer is a call there
        assert [call.name for call in read(dialect, text, tools=None).calls] == ["other"]


@pytest.mark.parametrize(
    ("dialect", "text"),
    [("llama3_json", '{"name": "f", "parameters": {}}'), ("pythonic", "[f()]")],
)
def test_bare_calls_are_told_when_nothing_was_declared_and_nothing_was_said(dialect, text):
    assert calls_of(read(dialect, text, tools=None)) == [("f", {})]
    assert read(dialect, "See:\n" + text, tools=None).text == "See:\n" + text


def test_bare_calls_of_declared_functions_are_found_at_the_beginning_of_a_line():
    said = read("llama3_json", 'I will look.\n{"name": "now", "parameters": {}}')
    assert (said.text, calls_of(said)) == ("I will look.", [("now", {})])


def test_an_answer_in_json_is_not_held_back_until_its_end():
    parser = reader("llama3_json")
    assert parser.push('{"temperature": 2') == [ParsedPiece('{"temperature": 2')]


def ids(dialect, text):
    counter = itertools.count(1)
    made = reader(dialect, ids=lambda: f"{next(counter):032x}")
    return [p.call.id for p in pieces_of(made, [text]) if p.call and p.call.id]


def test_ids_are_hex_and_each_is_fresh():
    assert ids("hermes", WEATHER * 2) == [f"chatcmpl-tool-{n:032x}" for n in (1, 2)]


def test_ids_of_mistral_are_nine_letters_and_digits():
    (one, two) = ids("mistral", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}")
    assert len(one) == len(two) == 9
    assert one.isalnum()
    assert one != two


def test_an_id_that_mistral_wrote_is_kept_if_it_is_one():
    assert ids("mistral", "[TOOL_CALLS]now[CALL_ID]AbCdEf123[ARGS]{}") == ["AbCdEf123"]
    (made,) = ids("mistral", "[TOOL_CALLS]now[CALL_ID]../etc[ARGS]{}")
    assert made != "../etc"


def test_ids_of_kimi_are_its_own():
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    assert ids("kimi_k2", text) == ["functions.now:3"]


def typed(schema, text, **root):
    tool = function("f", v=schema)
    tool["function"]["parameters"].update(root)
    call = (
        f"<tool_call>\n<function=f>\n<parameter=v>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )
    (found,) = calls_of(read("qwen3_coder", call, tools=[tool]))
    return found[1]["v"]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (TEXT, "5", "5"),
        (TEXT, "null", "null"),
        ({}, "5", "5"),
        ({"type": "integer"}, "-5", -5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "1" * 2000, "1" * 2000),
        ({"type": "number"}, "5e3", 5000.0),
        ({"type": "number"}, "inf", "inf"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, "[1, 'a', (2,)]", [1, "a", [2]]),
        ({"type": "array"}, "[1", "[1"),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
        ({"type": "object"}, "{1}", "{1}"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "twelve", "twelve"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({"$ref": "#/$defs/n"}, "3", 3),
        ({"$ref": "#/$defs/loop"}, "3", "3"),
        ({"$ref": "http://x.y/z"}, "3", "3"),
        ({"type": 5}, "3", "3"),
        ({"items": {}}, "[]", []),
        ({"type": "int"}, "-5", -5),
        ({"type": "uint32"}, "05", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "float"}, "5e3", 5000.0),
        ({"type": "bool"}, "True", True),
        ({"type": "dict"}, "{'a': 1}", {"a": 1}),
        ({"type": "list"}, "('a', {1, 2})", ["a", [1, 2]]),
        ({"type": "array"}, "{'a', 'b'}", ["a", "b"]),
        ({"type": "str"}, "5", "5"),
        ({"type": ["int", "None"]}, "null", None),
        ({"anyOf": [{"type": "float"}, {"type": "null"}]}, "0.5", 0.5),
        ({"type": "object"}, "{'a', 'b'}", "{'a', 'b'}"),
        ({"type": "what"}, "5", "5"),
    ],
)
def test_values_between_tags_become_what_their_schema_says(schema, text, value):
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]}
    found = typed(schema, text, **{"$defs": {"n": {"type": "integer"}, "loop": loop}})
    assert found == value
    assert type(found) is type(value)


def test_types_of_other_languages_are_standard_types_in_the_declaration():
    properties = {"type": {"type": "float"}, "b": {"items": {"type": "bool"}}}
    (tool,) = tools_by_name([function("f", **properties, c={"enum": [{"type": "int"}]})]).values()
    assert tool.parameters["properties"] == {
        "type": {"type": "number"},
        "b": {"items": {"type": "boolean"}},
        "c": {"enum": [{"type": "int"}]},
    }
    deep = schema = {}
    for _ in range(2000):
        schema["items"] = schema = {}
    assert tools_by_name([function("f", v=deep)])["f"].parameters["properties"]["v"] is deep


def test_only_one_line_break_on_each_side_of_a_value_is_layout():
    assert typed(TEXT, "\n a \n\n") == "\n a \n\n"


def test_nested_elements_have_the_types_of_the_schema():
    item = {"type": "object", "properties": {"sku": TEXT, "quantity": {"$ref": "#/$defs/n"}}}
    tool = function(
        "order",
        user={"type": "integer"},
        to={"type": "object", "properties": {"city": TEXT, "zip": {"type": "integer"}}},
        items={"type": "array", "items": item},
        labels={"type": "object", "additionalProperties": {"type": "boolean"}},
        count={"type": ["integer", "null"]},
    )
    tool["function"]["parameters"]["$defs"] = {"n": {"type": "integer"}}

    def element(name, inner):
        return f"]<]minimax[>[<{name}>{inner}]<]minimax[>[</{name}>"

    arguments = (
        element("user", "42")
        + element("to", element("city", "Rom") + "\n" + element("zip", "00118"))
        + element("items", element("row", element("sku", "7") + element("quantity", "2")))
        + element("labels", element("new", "true"))
        + element("count", "null")
    )
    text = f']<]minimax[>[<invoke name="order">{arguments}]<]minimax[>[</invoke>'
    assert calls_of(read("minimax_m3", text, tools=[tool])) == [
        (
            "order",
            {
                "user": 42,
                "to": {"city": "Rom", "zip": 118},
                "items": [{"sku": "7", "quantity": 2}],
                "labels": {"new": True},
                "count": None,
            },
        )
    ]


@pytest.mark.parametrize("inner", ["<a>]<]minimax[>[</b>", "<a>" * 300, "<>", "x"])
def test_elements_that_do_not_match_are_no_call(inner):
    text = ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="now">' + inner.replace(
        "<a>", "]<]minimax[>[<a>"
    )
    said = read("minimax_m3", text + "]<]minimax[>[</invoke>")
    assert not calls_of(said)
    assert len(said.notes) == 1


def test_a_text_value_is_told_as_it_comes():
    parser = reader("qwen3_coder")
    parser.push("<tool_call>\n<function=write_file>\n<parameter=text>\n")
    (piece,) = parser.push("one two\n")
    assert piece.call.arguments == "one two"


ADVERSE = [
    "{mark}",
    "{mark} ",
    "<",
    "[",
    "{{",
    '{mark}{{"name": "',
    '{{"name": "f", "arguments": [',
    " ",
    "\n",
    "</parameter>",
    "</parameter> ",
    "\\",
    '"',
    "'",
    "{mark}f(",
    "{close}",
    "{mark}{close}",
    "a",
]
STEPS_PER_CHARACTER = 24


def adverse(dialect, how, length):
    forms = dialect_of(dialect).syntaxes
    mark = forms[0].begin[0]
    close = ([c for form in forms for c in closing_literals(form.steps)] or ["]"])[0]
    unit = how.format(mark=mark, close=close)
    return (unit * (length // len(unit) + 1))[:length]


@pytest.mark.parametrize("dialect", FORMATS)
def test_work_is_linear_whatever_is_written_and_however_it_comes(dialect):
    for how in ADVERSE:
        for begun in ("", dialect_of(dialect).syntaxes[0].begin[0], prefix_of_call(dialect)):
            text = begun + adverse(dialect, how, 600)
            for size in (1, len(text)):
                parser = reader(dialect)
                for at in range(0, len(text), size):
                    parser.push(text[at : at + size])
                parser.push("", last=True)
                assert parser.steps <= STEPS_PER_CHARACTER * len(text) + 200, (how, begun, size)


def prefix_of_call(dialect):
    """A call that has begun to give the text of a file."""
    text = render_calls(dialect_of(dialect), [CallToRender("write_file", {"path": "STOP"})])
    return text[: text.index("STOP")]


@pytest.mark.parametrize("how", ['{mark}{{"name": "', "</parameter>\n"])
def test_a_megabyte_takes_a_megabyte_of_steps(how):
    text = adverse("qwen3_coder", how, 1_000_000)
    parser = reader("qwen3_coder")
    for at in range(0, len(text), 4096):
        parser.push(text[at : at + 4096])
    parser.push("", last=True)
    assert parser.steps <= 4 * len(text)


def test_no_tools_is_as_good_as_none_declared():
    assert calls_of(read("hermes", WEATHER, tools=[])) == calls_of(
        read("hermes", WEATHER, tools=None)
    )
    assert len(DECLARED) == 4


def test_a_reader_that_has_ended_is_gone_without_the_collector():
    one = reader("hermes")
    gone = weakref.ref(one)
    gc.disable()
    try:
        one.push(f"a {WEATHER} b")
        one.push("", last=True)
        del one
        assert gone() is None
    finally:
        gc.enable()
