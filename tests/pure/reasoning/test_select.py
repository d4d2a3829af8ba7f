"""Selection of a reasoning format."""

import pytest

from quire.errors import ConfigError
from quire.text.reasoning.deepseek_r1 import FORMAT as R1
from quire.text.reasoning.qwen3 import FORMAT as QWEN3
from quire.text.reasoning.select import detect_reasoning_format, select_reasoning_format

TEMPLATES = {
    "qwen3": "<|im_start|>{{ x.split('</think>') }}",
    "deepseek_r1": "{{'<｜Assistant｜>'}}{{ content.split('</think>')[-1] }}<think>\n",
    "deepseek_v3": "{% if not thinking is defined %}<｜Assistant｜></think>{% endif %}",
    "glm45": "[gMASK]<sop><|assistant|>{{ '<think></think>' }}",
    "kimi_k2": "<|tool_calls_section_begin|><think></think>",
    "minimax_m2": "<minimax:tool_call>]~b]ai\n<think>\n</think>",
    "minimax_m3": "<mm:think>",
    "seed_oss": "<seed:think></seed:think>",
    "step3": "<think></think><steptml:invoke>",
    "olmo3": "<function_calls><think></think>",
    "ernie45": "<think></think><response></response>",
    "hunyuan_a13b": "<think></think><answer></answer>",
    "granite": "Write 'Here is my thought process:' first",
    "mistral": "[THINK][/THINK]",
    "gemma4": "<|channel>thought\n<channel|>",
    "openai_gptoss": "<|start|>assistant<|channel|>final<|message|>",
    "cohere_command3": "<|START_THINKING|><|START_RESPONSE|>",
    "cohere_command4": "<|START_THINKING|><|START_TEXT|>",
    "muse": "<|start|>assistant to=self<|message|><atem:function_calls>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_selects_the_format(name):
    assert detect_reasoning_format(TEMPLATES[name]) == name
    assert select_reasoning_format("auto", TEMPLATES[name]) is select_reasoning_format(name)


def test_a_template_without_reasoning_has_no_format():
    assert select_reasoning_format("auto", "<|im_start|>{{ messages[0].content }}") is None


def test_a_name_may_have_dashes():
    assert select_reasoning_format("deepseek-r1") is R1


@pytest.mark.parametrize("name", ["hf", "beam"])
def test_a_format_that_is_not_built_is_refused_with_what_to_do(name):
    with pytest.raises(ConfigError, match=f"{name!r}.*response_template.*not built yet; .*plug"):
        select_reasoning_format(name)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ConfigError, match="did you mean qwen3"):
        select_reasoning_format("qwen33")


PLUGIN = "from quire.text.reasoning.base import TaggedReasoning\nFORMAT = TaggedReasoning(('<a>', '</a>'))\n"


@pytest.mark.parametrize(
    ("extra", "name"), [("", "mine"), ("NAME = 'yours'\n", "yours"), ("", "auto")]
)
def test_a_plug_in_file_has_a_format(tmp_path, extra, name):
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN + extra)
    assert (
        select_reasoning_format(name, plugin=str(file)).initial_mode("x<a>", {}) == "reasoning <a>"
    )
    assert select_reasoning_format("qwen3", plugin=str(file)) is QWEN3


@pytest.mark.parametrize(
    ("text", "fault"),
    [("", "has no FORMAT"), ("1 / 0", "failed: ZeroDivisionError"), ("FORMAT = 1", "must be a")],
)
def test_a_plug_in_file_without_a_format_is_refused(tmp_path, text, fault):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=fault):
        select_reasoning_format("mine", plugin=str(file))


def test_a_missing_plug_in_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a file"):
        select_reasoning_format("mine", plugin=str(tmp_path / "mine.py"))
