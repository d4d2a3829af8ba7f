"""The parser in every format: malformed text, ids, types, one call only, linear time."""

import gc
import itertools
import json
import weakref

import pytest

from quire.text.output.parsed_text import ParsedCallDelta, ParsedPiece
from quire.text.tools.base import closing_literals, tools_by_name
from tests import tiers
from tests.pure.tools.rendering import CallToRender, render_calls
from tests.pure.tools.samples import (
    DECLARED,
    FORMATS,
    TEXT,
    calls_of,
    corpus,
    format_of,
    function,
    pieces_of,
    read,
    reader,
)

WEATHER = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rom", "days": 2}}</tool_call>'


def pieces(tool_format, text, **options):
    return pieces_of(reader(tool_format, **options), [text])


def test_arguments_are_emitted_as_they_arrive():
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


def test_content_is_emitted_at_once_and_a_partial_mark_is_not():
    parser = reader("hermes")
    assert parser.push("It is <b>") == [ParsedPiece("It is <b>")]
    assert parser.push(" so <tool") == [ParsedPiece(" so")]
    assert parser.push("ing>") == [ParsedPiece(" <tooling>")]


def test_a_partial_mark_at_the_end_is_content():
    parser = reader("hermes")
    parser.push("a <tool_ca")
    assert parser.push("", last=True) == [ParsedPiece(" <tool_ca")]


def test_a_call_that_breaks_after_it_was_emitted_is_broken_and_its_rest_is_content():
    parsed = read("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1 oops}}</tool_call> x')
    (call,) = parsed.calls
    assert (call.arguments, call.outcome) == ('{"a": 1', "broken")
    assert parsed.text == " oops}}</tool_call> x"
    assert len(parsed.notes) == 1


def test_several_objects_in_one_tag_are_several_calls():
    one = '{"name": "now", "arguments": {}}'
    parsed = read("jamba", f"<tool_calls>\n{one}\n{one}\n</tool_calls>")
    assert (calls_of(parsed), parsed.text, parsed.notes) == ([("now", {})] * 2, "", [])


def test_malformed_text_after_the_arguments_leaves_the_call_whole():
    text = '<tool_call>{"name": "now", "arguments": {}, "id": "x" oops}</tool_call> y'
    parsed = read("hermes", text)
    assert calls_of(parsed) == [("now", {})]
    assert parsed.text == " oops} y"
    assert len(parsed.notes) == 1


def test_with_eager_off_a_broken_call_is_content():
    text = '<tool_call>{"name": "now", "arguments": {"a": 1 oops}}</tool_call> x'
    parsed = read("hermes", text, eager=False)
    assert (parsed.calls, parsed.text) == ([], text)


def test_with_eager_off_a_broken_call_takes_no_index():
    broken = '<tool_call>{"name": "now", "arguments": {"a": 1 oops}}'
    (call,) = read("hermes", broken + WEATHER, eager=False).calls
    assert (call.index, call.name) == (0, "get_weather")


@pytest.mark.parametrize("tool_format", FORMATS)
def test_with_eager_off_calls_are_emitted_whole(tool_format):
    for sample in corpus(tool_format):
        emitted = [p.call for p in pieces(tool_format, sample["text"], eager=False) if p.call]
        found = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in emitted]
        assert found == sample["calls"]
        assert {c.outcome for c in emitted} <= {"whole"}


def test_a_truncated_call_is_cut_with_a_note():
    parsed = read("hermes", '<tool_call>{"name": "write_file", "arguments": {"path": "a')
    assert parsed.calls[0].outcome == "cut"
    assert parsed.calls[0].arguments == '{"path": "a'
    assert (parsed.text, len(parsed.notes)) == ("", 1)


def test_a_call_cut_before_its_arguments_is_content():
    text = '<tool_call>{"name": "write_file", "argum'
    parsed = read("hermes", text)
    assert (parsed.calls, parsed.text, len(parsed.notes)) == ([], text, 1)


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("llama3_json", '{"name": "now", "parameters": {}}; '),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}},\n'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n</tool_'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'),
    ],
)
def test_separators_at_the_end_of_the_text_are_not_content(tool_format, text):
    parsed = read(tool_format, text)
    assert (calls_of(parsed), parsed.text) == ([("now", {})], "")


@pytest.mark.parametrize("text", ["<tool_calls>[]</tool_calls>", "<tool_calls>[ ] and more"])
def test_a_list_of_no_calls_is_content_with_a_note(text):
    parsed = read("jamba", text)
    assert (parsed.calls, parsed.text, len(parsed.notes)) == ([], text, 1)


@pytest.mark.parametrize(
    ("tool_format", "text"),
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
def test_ambiguous_markup_is_content(tool_format, text):
    parsed = read(tool_format, text)
    assert (parsed.calls, parsed.text, len(parsed.notes)) == ([], text, 1)


def test_without_parallel_calls_the_first_is_emitted_and_the_others_are_counted():
    parsed = read("hermes", WEATHER * 3, parallel=False)
    assert calls_of(parsed) == [("get_weather", {"city": "Rom", "days": 2})]
    assert parsed.notes == ["2 more calls were dropped: only one was allowed"]
    assert parsed.text == ""


def test_arguments_nested_too_deep_are_broken():
    deep = '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 100_000
    parsed = read("hermes", deep)
    assert parsed.calls[0].outcome == "broken"
    assert len(parsed.calls[0].arguments) < 300


def test_a_number_that_is_too_long_is_broken():
    parsed = read("hermes", '<tool_call>{"name": "now", "arguments": {"a": ' + "1" * 5000 + "}}")
    assert parsed.calls[0].outcome == "broken"


@pytest.mark.parametrize(
    "word", ["NaN", "Infinity", "-Infinity", "undefined", "01", "1.", ".5", "+1"]
)
def test_invalid_json_is_broken(word):
    parsed = read(
        "hermes", f'<tool_call>{{"name": "now", "arguments": {{"a": {word}}}}}</tool_call>'
    )
    assert parsed.calls[0].outcome == "broken"


def string_as_read(tool_format, literal):
    """What a string is that was written so; the same whether or not it came in characters."""
    form = '<tool_call>{{"name": "search", "arguments": {{"query": {}}}}}</tool_call>'
    text = (form if tool_format == "hermes" else "[search(query={})]").format(literal)
    (found,) = calls_of(read(tool_format, text))
    assert calls_of(read(tool_format, *text, "")) == [found]
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
def test_json_strings_with_common_mistakes(literal, value):
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
def test_python_strings(literal, value):
    assert string_as_read("pythonic", literal) == value


def test_a_null_character_in_a_string_is_escaped():
    parsed = read("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\0\x1f"}}</tool_call>')
    assert calls_of(parsed) == [("now", {"a": "\0\x1f"})]


@pytest.mark.parametrize("name", ["", " ", "a b", "<x>", "x" * 600, 'a"b', "{}"])
def test_an_invalid_name_is_no_call(name):
    text = f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {{}}}}</tool_call>'
    parsed = read("hermes", text)
    assert (parsed.calls, parsed.text) == ([], text)


def test_a_strange_name_is_a_name_if_it_was_declared():
    tools = [function('say "hi"')]
    text = '<tool_call>{"name": "say \\"hi\\"", "arguments": {}}</tool_call>'
    assert calls_of(read("hermes", text, tools=tools)) == [('say "hi"', {})]


def test_an_undeclared_function_is_a_call_in_tags():
    parsed = read("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>')
    assert calls_of(parsed) == [("other", {})]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_an_undeclared_function_is_a_call_unless_the_format_is_declared_only(tool_format):
    text = render_calls(format_of(tool_format), [CallToRender("other", {"city": "Rom"})])
    parsed = read(tool_format, text)
    bare = tool_format in ("llama3_json", "pythonic", "xlam")
    if bare or format_of(tool_format).declared_only:
        assert (parsed.calls, parsed.text) == ([], text)
    else:
        assert [call.name for call in parsed.calls] == ["other"]
    if tool_format not in ("llama3_json", "pythonic"):  # without tools any answer is a call there
        assert [call.name for call in read(tool_format, text, tools=None).calls] == ["other"]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [("llama3_json", '{"name": "f", "parameters": {}}'), ("pythonic", "[f()]")],
)
def test_bare_calls_without_declared_functions_are_calls_before_any_content(tool_format, text):
    assert calls_of(read(tool_format, text, tools=None)) == [("f", {})]
    assert read(tool_format, "See:\n" + text, tools=None).text == "See:\n" + text


def test_bare_calls_of_declared_functions_are_found_at_the_beginning_of_a_line():
    parsed = read("llama3_json", 'I will look.\n{"name": "now", "parameters": {}}')
    assert (parsed.text, calls_of(parsed)) == ("I will look.", [("now", {})])


def test_a_json_answer_is_streamed():
    parser = reader("llama3_json")
    assert parser.push('{"temperature": 2') == [ParsedPiece('{"temperature": 2')]


def ids(tool_format, text):
    counter = itertools.count(1)
    parser = reader(tool_format, ids=lambda: f"{next(counter):032x}")
    return [p.call.id for p in pieces_of(parser, [text]) if p.call and p.call.id]


def test_ids_are_hex_and_each_is_fresh():
    assert ids("hermes", WEATHER * 2) == [f"chatcmpl-tool-{n:032x}" for n in (1, 2)]


def test_ids_of_mistral_are_nine_letters_and_digits():
    (one, two) = ids("mistral", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}")
    assert len(one) == len(two) == 9
    assert one.isalnum()
    assert one != two


def test_an_id_that_mistral_wrote_is_kept_if_it_is_one():
    assert ids("mistral", "[TOOL_CALLS]now[CALL_ID]AbCdEf123[ARGS]{}") == ["AbCdEf123"]
    (parser,) = ids("mistral", "[TOOL_CALLS]now[CALL_ID]../etc[ARGS]{}")
    assert parser != "../etc"


def test_ids_of_kimi_are_those_of_the_model():
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
def test_values_between_tags_have_the_types_of_their_schema(schema, text, value):
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
def test_mismatched_elements_are_no_call(inner):
    text = ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="now">' + inner.replace(
        "<a>", "]<]minimax[>[<a>"
    )
    parsed = read("minimax_m3", text + "]<]minimax[>[</invoke>")
    assert not calls_of(parsed)
    assert len(parsed.notes) == 1


def test_a_text_value_is_emitted_as_it_arrives():
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


def adverse(tool_format, template, length):
    forms = format_of(tool_format).syntaxes
    mark = forms[0].begin[0]
    close = ([c for form in forms for c in closing_literals(form.steps)] or ["]"])[0]
    unit = template.format(mark=mark, close=close)
    return (unit * (length // len(unit) + 1))[:length]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tool_format", FORMATS)
def test_work_is_linear_for_adverse_text_in_any_chunks(tool_format):
    for template in ADVERSE:
        for begun in ("", format_of(tool_format).syntaxes[0].begin[0], prefix_of_call(tool_format)):
            text = begun + adverse(tool_format, template, tiers.amount(300, 600))
            for size in (1, len(text)):
                parser = reader(tool_format)
                for at in range(0, len(text), size):
                    parser.push(text[at : at + size])
                parser.push("", last=True)
                assert parser.steps <= STEPS_PER_CHARACTER * len(text) + 200, (
                    template,
                    begun,
                    size,
                )


def prefix_of_call(tool_format):
    """A call that has begun to give the text of a file."""
    text = render_calls(format_of(tool_format), [CallToRender("write_file", {"path": "STOP"})])
    return text[: text.index("STOP")]


@pytest.mark.parametrize("template", ['{mark}{{"name": "', "</parameter>\n"])
def test_a_megabyte_takes_a_linear_number_of_steps(template):
    text = adverse("qwen3_coder", template, 1_000_000)
    parser = reader("qwen3_coder")
    for at in range(0, len(text), 4096):
        parser.push(text[at : at + 4096])
    parser.push("", last=True)
    assert parser.steps <= 4 * len(text)


def test_an_empty_list_of_tools_equals_none():
    assert calls_of(read("hermes", WEATHER, tools=[])) == calls_of(
        read("hermes", WEATHER, tools=None)
    )
    assert len(DECLARED) == 4


def test_a_finished_parser_is_freed_without_garbage_collection():
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
