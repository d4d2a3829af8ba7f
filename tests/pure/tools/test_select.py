"""Selection of a format: by name, by chat template, or from a plug-in file."""

import importlib.metadata

import pytest

from quire import registry
from quire.errors import ConfigError
from quire.registry import PluginRegistry
from quire.text.output.parsed_text import ParsedPiece
from quire.text.tools.select import TOOL_FORMATS, detect_tool_formats, select_tool_parser
from tests.pure.tools.samples import FORMATS, format_of

TEMPLATES = {
    "hermes": "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=one>\nvalue\n</parameter>",
    "seed_oss": "<seed:tool_call>\n<function=example>\n<parameter=one>value</parameter>",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary}.',
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2), func_name2(params)]",
    "llama4_pythonic": "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
    "lfm2": "List of tools: <|tool_list_start|> ... <|tool_call_start|>",
    "olmo3": "<function_calls>\nget_weather(city='x')\n</function_calls>",
    "mistral": '{{- "[TOOL_CALLS] [" }}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n```json",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="$TOOL">',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="$TOOL">',
    "granite": "write <|tool_call|> followed by a JSON list of tools used",
    "granite_20b_fc": '<function_call> {"name": "no_function", "arguments": {}}',
    "internlm": "<|im_start|>system name=<|plugin|>\n[",
    "jamba": '<tool_calls>[{"name": "func_name1", "arguments": {}}]</tool_calls>',
    "phi4_mini": 'formatted as functools[{"name": [function name]}]',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "hy_v3": "<tool_calls>\n<tool_call>name<tool_sep>\n<arg_key>k</arg_key>",
    "minimax_m2": "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}",
    "openai": "<|start|>assistant<|channel|>commentary to=functions.x<|message|>",
    "functiongemma": "<start_function_call>call:",
    "gemma4": "<|tool_call>call:",
    "longcat": "<longcat_tool_call>",
    "apertus": "{%- set tool_calls_token = '<|tools_prefix|>' -%}",
    "xlam": '[{"name": "tool_call_name", "arguments": {}}, ... (additional parallel tool calls as needed)]',
    "cohere_command3": "<|START_ACTION|>",
    "minimax_m3": "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"tool\">",
    "plamo3": "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>",
    "muse": "<atem:function_calls>\n<atem:invoke name=\"$FUNCTION_NAME\">",
}  # fmt: skip


@pytest.mark.parametrize("tool_format", TEMPLATES)
def test_a_template_selects_its_format(tool_format):
    assert detect_tool_formats(TEMPLATES[tool_format]) == [tool_format]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_no_two_formats_match_one_template(tool_format):
    signs = format_of(tool_format).template_markers
    for texts in signs:
        assert detect_tool_formats(" ".join(texts)) == [tool_format]


def test_auto_selects_the_format_of_the_template():
    assert select_tool_parser("auto", template=TEMPLATES["kimi_k2"]).name == "kimi_k2"


def test_auto_lists_the_matches_if_there_is_not_one():
    with pytest.raises(ConfigError, match="several tool parsers: kimi_k2, mistral;"):
        select_tool_parser("auto", template=TEMPLATES["kimi_k2"] + TEMPLATES["mistral"])
    with pytest.raises(ConfigError, match=r"no tool parser that is known; name one of: .*hermes"):
        select_tool_parser("auto", template="{{ messages }}")
    with pytest.raises(ConfigError, match="no chat template"):
        select_tool_parser("auto")


@pytest.mark.parametrize("name", TOOL_FORMATS.names())
def test_every_name_creates_a_parser(name):
    assert select_tool_parser(name).create([]).push("Hello.", last=True) == [ParsedPiece("Hello.")]


def test_names_may_be_written_with_dashes():
    assert select_tool_parser("granite-20b-fc").name == "granite_20b_fc"


def test_a_wrong_name_gets_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean .*hermes"):
        select_tool_parser("hermees")


@pytest.mark.parametrize("name", ["hf", "beam"])
def test_a_format_that_is_not_built_is_refused_with_what_to_do(name):
    with pytest.raises(ConfigError, match=f"{name!r}.*response_template.*not built yet; .*plug"):
        select_tool_parser(name)


PLUGIN = """
from quire.text.tools.base import CallSyntax, CallTemplate, CloseStep, ObjectStep, ToolFormat
FORMAT = ToolFormat(
    "mine",
    (CallSyntax(("<mine>",), (ObjectStep(), CloseStep(("</mine>",)))),),
    CallTemplate("<mine>{}</mine>"),
)
"""
OWN_WAY = """
from quire.text.output.parsed_text import ParsedPiece
class Parser:
    def __init__(self, tools, *, parallel, eager, ids): pass
    def push(self, text, *, last=False): return [ParsedPiece(text.upper())]
"""


def written(folder, source, name="my-parser.py"):
    path = folder / name
    path.write_text(source)
    return str(path)


@pytest.mark.parametrize("name", ["mine", "my-parser", "my_parser", "auto"])
def test_a_plug_in_is_selected_by_its_name_or_its_files(tmp_path, name):
    chosen = select_tool_parser(name, plugin=written(tmp_path, PLUGIN))
    (piece,) = chosen.create([]).push('<mine>{"name": "f", "arguments": {}}</mine>', last=True)
    assert piece.call.name == "f"


def test_a_plug_in_may_have_its_own_parser(tmp_path):
    chosen = select_tool_parser("my-parser", plugin=written(tmp_path, OWN_WAY))
    assert chosen.create([]).push("a", last=True) == [ParsedPiece("A")]


def test_a_plug_in_does_not_replace_other_formats(tmp_path):
    assert select_tool_parser("hermes", plugin=written(tmp_path, PLUGIN)).name == "hermes"
    with pytest.raises(
        ConfigError, match=r"no tool parser 'mien'; .* has 'mine'; did you mean mine"
    ):
        select_tool_parser("mien", plugin=written(tmp_path, PLUGIN))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1", "neither a FORMAT nor a Parser"),
        ("x =", "cannot be loaded"),
        ("import nope_", "nope_"),
    ],
)
def test_an_invalid_plug_in_is_refused(tmp_path, source, says):
    with pytest.raises(ConfigError, match=says):
        select_tool_parser("mine", plugin=written(tmp_path, source))


def test_a_missing_plug_in_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no tool parser plug-in at"):
        select_tool_parser("mine", plugin=str(tmp_path / "none.py"))


def test_entry_points_add_names(monkeypatch):
    entry = importlib.metadata.EntryPoint("mine", "quire.text.tools.longcat", "quire.tool_parsers")
    installed = {"quire.tool_parsers": [entry]}
    monkeypatch.setattr("quire.registry.find_entry_points", installed.__getitem__)
    fresh = PluginRegistry(TOOL_FORMATS.package, TOOL_FORMATS.group)
    monkeypatch.setattr("quire.text.tools.select.TOOL_FORMATS", fresh)
    assert select_tool_parser("mine").format is format_of("longcat")


def test_entry_points_are_read_once(monkeypatch):
    read = []
    installed = importlib.metadata.EntryPoints(
        [importlib.metadata.EntryPoint("mine", "a.b", "one"),
         importlib.metadata.EntryPoint("yours", "a.c", "other")]
    )  # fmt: skip
    monkeypatch.setattr("quire.registry.entry_points", lambda: read.append(1) or installed)
    registry._read_entry_points.cache_clear()
    try:
        assert [one.name for one in registry.find_entry_points("one")] == ["mine"]
        assert [one.name for one in registry.find_entry_points("other")] == ["yours"]
        assert not list(registry.find_entry_points("none"))
    finally:
        registry._read_entry_points.cache_clear()
    assert read == [1]


def test_an_unknown_parser_is_called_what_users_call_it():
    with pytest.raises(ConfigError, match="there is no tool parser 'nonesuch'; known: "):
        TOOL_FORMATS.load("nonesuch")
