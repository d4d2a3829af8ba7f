"""The chat templates of examples/: calls that they show are calls that the dialect's reader reads."""

import json
import pathlib

import pytest

import quire
from quire.text.output.parsed_text import collect_pieces
from quire.text.templates.chat_template import load_chat_template
from quire.text.tokenizing.tokenizer import load_tokenizer
from quire.text.tools.select import select_tool_parser

FOLDER = pathlib.Path(quire.__file__).parents[1] / "examples"
NAMES = sorted(
    path.stem.removeprefix("tool_chat_template_") for path in FOLDER.glob("tool_chat_template_*")
)
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    }}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]  # fmt: skip
GIVEN = [("get_weather", {"city": 'Zürich "Ü" 汉', "days": 2}), ("now", {})]
CALLS = [
    {"id": f"call_{i}", "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
    for i, (n, a) in enumerate(GIVEN)
]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "And the weather?"}]},
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(pathlib.Path(quire.__file__).parent / "embedded")


def source(name):
    return load_chat_template(FOLDER / f"tool_chat_template_{name}.jinja")


def rendered(tokenizer, name, messages, tools=TOOLS, **more):
    return tokenizer.template(source(name), tools).render(messages, tools, **more)


def test_there_are_templates_of_several_dialects():
    assert {"hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_dialect_is_found_in_the_template(name):
    assert select_tool_parser("auto", template=source(name)).name == name


@pytest.mark.parametrize("name", NAMES)
def test_calls_in_a_history_are_written_as_the_model_writes_them(tokenizer, name):
    said = {"role": "assistant", "content": None, "tool_calls": CALLS}
    before = rendered(tokenizer, name, TALK, add_generation_prompt=True)
    whole = rendered(tokenizer, name, [*TALK, said], add_generation_prompt=False)
    assert whole.startswith(before)
    text = whole[len(before) :]
    for end in ("<|eot_id|>", "<|im_end|>\n", tokenizer.eos_token or "</s>"):
        text = text.removesuffix(end)
    speech = collect_pieces(select_tool_parser(name).create(TOOLS).push(text, last=True))
    assert [(call.name, json.loads(call.arguments)) for call in speech.calls] == GIVEN
    assert (speech.text, speech.notes) == ("", [])


@pytest.mark.parametrize("name", NAMES)
def test_results_texts_and_tools_are_shown(tokenizer, name):
    talk = [
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "call_0", "content": "It rains."},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Thanks"},
    ]
    text = rendered(tokenizer, name, talk, add_generation_prompt=True)
    places = [text.index(one) for one in ("Be brief.", "And the weather?", "It rains.", "Rain.")]
    assert places == sorted(places)
    assert '"days"' in text
    assert "get_weather" not in rendered(tokenizer, name, TALK, None, add_generation_prompt=True)
