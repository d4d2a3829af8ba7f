"""Templates, their choice, the settling of messages, and what a template may not do."""

import contextlib
import json
import os
import time

import pytest

from quire.errors import ConfigError, RequestError, Unsupported
from quire.text.templates import jinja_sandbox
from quire.text.templates.chat_template import (
    MAX_TEMPLATE_BYTES,
    RESERVED_VARIABLES,
    ChatTemplate,
    load_chat_template,
)
from quire.text.templates.message_normalizer import normalize_messages
from quire.text.tokenizing.tokenizer import load_tokenizer
from tests.pure.text.made import face, folder_of
from tests.pure.text.templates import ALL, CHATML, HEADERS, INST, PARTS_ONLY, TURNS

USER = [{"role": "user", "content": "hi"}]
ECHO = "{{ messages | tojson }}"


def seen(messages, template=ECHO, **options):
    """The messages as a template sees them."""
    return json.loads(ChatTemplate(template).render(messages, **options))


# -- which form of content ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "string"),
        (INST, "string"),
        (HEADERS, "string"),
        (TURNS, "openai"),
        (PARTS_ONLY, "openai"),
        (
            "{% macro show(content) %}{% for c in content %}{{ c.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages[1:] %}{{ show(m['content']) }}{% endfor %}",
            "openai",
        ),
        (
            "{% set ns = namespace(all=[]) %}{% set ns.all = messages %}{% for m in ns.all %}"
            "{% set body = m.get('x') or m.content %}{% for p in m.content | list %}{{ p }}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% set m = messages[0] %}{% set c = m.content %}{% for p in c %}{{ p }}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% for call in m.tool_calls %}{{ call }}{% endfor %}{% endfor %}",
            "string",
        ),
        ("{% for t in tools %}{% for p in t.content %}{{ p }}{% endfor %}{% endfor %}", "string"),
    ],
)
def test_the_form_of_content_is_read_from_the_template(template, expected):
    assert ChatTemplate(template).content_format == expected


def test_parts_are_joined_for_text_templates_and_kept_for_others():
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}],
        }
    ]
    assert seen(messages)[0]["content"] == "a\nb"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert seen(messages, content_format="openai")[0]["content"] == parts
    assert (
        ChatTemplate(TURNS).render(messages)
        == "<start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n"
    )


def test_text_becomes_parts_only_for_a_template_that_takes_nothing_else():
    assert ChatTemplate(PARTS_ONLY).render(USER) == "user: hi"
    assert ChatTemplate(TURNS).render(USER).startswith("<start_of_turn>user\nhi")


# -- messages ----------------------------------------------------------------------------------


def test_tool_calls_are_normalized():
    call = {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    bad = {"function": {"name": "g", "arguments": "not json"}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call, bad]}]
    made = seen(messages)[1]
    assert made["content"] == ""
    assert made["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    assert made["tool_calls"][1]["function"]["arguments"] == {}
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": [1]}'  # ours, not theirs
    assert "tool_calls" not in seen([{"role": "assistant", "content": "x", "tool_calls": []}])[0]


def test_reasoning_is_there_by_both_names():
    for name in ("reasoning", "reasoning_content"):
        made = seen([{"role": "assistant", "content": "x", name: "why"}])[0]
        assert made["reasoning"] == made["reasoning_content"] == "why"


def test_other_keys_and_roles_are_kept():
    message = {"role": "ipython", "content": "x", "name": "n", "tool_call_id": "1", "extra": [1]}
    assert seen([message]) == [message]


def test_a_template_without_developer_sees_a_system_message():
    messages = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, *USER]
    assert seen(messages) == [{"role": "system", "content": "a\n\nb"}, *USER]
    assert seen([messages[1]])[0]["role"] == "system"
    knows = "{# developer #}" + ECHO
    assert [m["role"] for m in seen(messages, knows)] == ["system", "developer", "user"]


def test_objects_of_the_openai_client_are_messages_and_tools():
    class Sent:
        def __init__(self, **fields):
            self.fields = fields

        def model_dump(self, *, exclude_none):
            return {k: v for k, v in self.fields.items() if v is not None or not exclude_none}

    message = Sent(role="assistant", content="x", refusal=None)
    assert seen([message]) == [{"role": "assistant", "content": "x"}]
    assert ChatTemplate("{{ tools[0].type }}").render(USER, [Sent(type="function")]) == "function"


def test_tool_results_in_parts_become_lines():
    result = {
        "role": "tool",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    assert seen([result], content_format="openai")[0]["content"] == "a\nb"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hi", "must be a list of messages"),
        ([], "is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
        ([{"role": "user", "content": [5]}], r"content\[0\]"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "one of text"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a string"),
        ([{"role": "assistant", "tool_calls": [{"type": "code"}]}], "'function'"),
        ([{"role": "assistant", "tool_calls": "x"}], "a list of tool calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "'name' and 'arguments'"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages, said):
    with pytest.raises(RequestError, match=said) as e:
        normalize_messages(messages, "string")
    assert e.value.param == "messages"


def test_media_are_refused_by_name():
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(Unsupported, match="image_url"):
        normalize_messages([{"role": "user", "content": [image]}], "string")


def test_nesting_without_end_is_refused():
    value = []
    for _ in range(10_000):
        value = [value]
    with pytest.raises(RequestError, match="nested deeper"):
        ChatTemplate("x").render([{"role": "user", "content": "hi", "deep": value}])


# -- ends of the prompt ------------------------------------------------------------------------


def test_the_last_message_can_be_left_open():
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}")
    messages = [*USER, {"role": "assistant", "content": "The answer "}]
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == (
        "<user>hi</><assistant>The answer "
    )
    trims = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    )
    assert trims.render(messages, add_generation_prompt=False, continue_final_message=True) == (
        "<user>hi</><assistant>The answer"
    )


def test_a_message_text_that_occurs_before_does_not_confuse_the_cut():
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    assert (
        template.render(messages, add_generation_prompt=False, continue_final_message=True)
        == "[x][x"
    )


def test_one_cannot_begin_a_message_and_go_on_with_the_last():
    with pytest.raises(RequestError, match="both true"):
        ChatTemplate("x").render(USER, add_generation_prompt=True, continue_final_message=True)


def test_going_on_needs_text_and_a_template_that_writes_it():
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(RequestError, match="does not write"):
        ChatTemplate("nothing").render(USER, **options)
    with pytest.raises(RequestError, match="no text"):
        ChatTemplate("x").render_as_is([{"role": "assistant"}], **options)


# -- the choice of a template ------------------------------------------------------------------


def test_files_of_templates_are_found_and_chosen(tmp_path):
    folder = folder_of(tmp_path, "byte_level", chat_template=None)
    tokenizer = load_tokenizer(folder)
    with pytest.raises(RequestError, match="chat_template=") as e:
        tokenizer.apply_chat_template(USER)
    assert e.value.param == "chat_template"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load_tokenizer(folder).chat_template == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert load_tokenizer(folder).chat_template == "jinja"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template(USER, tokenize=False) == "jinja"
    assert (
        tokenizer.apply_chat_template(USER, tools=[{"type": "function"}], tokenize=False) == "tools"
    )
    assert tokenizer.apply_chat_template(USER, chat_template="tool_use", tokenize=False) == "tools"
    assert tokenizer.apply_chat_template(USER, chat_template="{{ 1 }}", tokenize=False) == "1"


def test_a_list_of_named_templates_is_read(tmp_path):
    named = [{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t"}]
    tokenizer = load_tokenizer(folder_of(tmp_path, "byte_level", chat_template=named))
    with pytest.raises(RequestError, match="by name only \\(rag, tool_use\\)"):
        tokenizer.apply_chat_template(USER)
    assert tokenizer.apply_chat_template(USER, chat_template="rag", tokenize=False) == "r"


def test_a_template_comes_as_a_path_or_as_text(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ 1 }} ü", encoding="utf-8")
    assert load_chat_template(str(path)) == load_chat_template(path) == "{{ 1 }} ü"
    assert load_chat_template("{{ 2 }}") == "{{ 2 }}"
    assert load_chat_template(None) is None
    with pytest.raises(ConfigError, match="neither the text"):
        load_chat_template(str(tmp_path / "missing.jinja"))


def test_a_template_that_is_too_large_is_refused_with_its_size_and_its_file(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ 1 }}" + " " * MAX_TEMPLATE_BYTES)
    with pytest.raises(
        ConfigError, match=rf"t\.jinja has {MAX_TEMPLATE_BYTES + 7} bytes; the maximum"
    ):
        load_chat_template(path)
    with pytest.raises(ConfigError, match=rf"has {MAX_TEMPLATE_BYTES + 7} characters; at most"):
        load_chat_template(path.read_text())


def test_a_template_is_not_waited_for_at_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.jinja")
    with pytest.raises(ConfigError, match="neither the text"):
        load_chat_template(tmp_path / "pipe.jinja")


@pytest.mark.parametrize("name", sorted(RESERVED_VARIABLES))
def test_variables_cannot_steer_the_rendering(name):
    with pytest.raises(RequestError, match=name) as e:
        ChatTemplate("x").render(USER, variables={name: "y"})
    assert e.value.param == "chat_template_kwargs"


def test_variables_reach_the_template():
    assert (
        ChatTemplate("{{ a }}{{ bos_token }}", {"bos_token": "<s>"}).render(
            USER, variables={"a": 1}
        )
        == "1<s>"
    )


def test_special_tokens_in_the_text_of_a_user_are_shown_to_the_template_as_they_are():
    tokenizer = face("byte_level")
    text = tokenizer.template().render([{"role": "user", "content": "<|im_end|>"}])
    assert text.count("<|im_end|>") == 2


# -- errors and bounds -------------------------------------------------------------------------


def test_what_a_template_refuses_is_the_callers_error():
    with pytest.raises(RequestError, match="Roles must alternate") as e:
        ChatTemplate(INST, {"bos_token": "<s>", "eos_token": "</s>"}).render([*USER, *USER])
    assert e.value.param == "chat_template"


@pytest.mark.parametrize(
    "source", ["{{ x.y.z }}", "{{ 1 / 0 }}", "{{ messages[9].role.x }}", "{{ [] + 1 }}"]
)
def test_errors_inside_a_template_are_the_callers(source):
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ 'a",
        "{% endfor %}",
        "{{ " + "(" * 6000,
        "{{ x | nofilter }}",
        "{% for m in messages %}" * 21 + "{% endfor %}" * 21,
        "{% for m in messages %}" * 100 + "{% endfor %}" * 100,
        "{{ 1" + "0" * 5000 + " }}",
    ],
)
def test_a_template_that_is_no_jinja_is_refused(source):
    with pytest.raises(RequestError, match="not valid Jinja"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(a=1).__init__ }}x{{ namespace.__mro__[0] }}",
        "{% include '/etc/passwd' %}",
        "{{ self.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source):
    with contextlib.suppress(RequestError):  # or Jinja shows what is not there as nothing
        assert ChatTemplate(source).render(USER) in ("", "x")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**12) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}xxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{% set x = 'A' * 10**6 %}{% for i in range(999) %}{{ x }}{% endfor %}",
        "{{ 'A' * 10**10 }}",
        "{{ [1] * 10**10 }}",
        "{{ 10 ** 10000 ** 10 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    ],
)
def test_what_a_template_may_use_is_bounded(source):
    began = time.process_time()
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source).render(USER)
    assert time.process_time() - began < 20
    assert ChatTemplate("ok").render(USER) == "ok"


@pytest.mark.parametrize(
    "source", ["{% set _quire_meter = namespace %}", "{% set _quire_check = 1 %}"]
)
def test_a_template_cannot_replace_its_meters(source):
    with pytest.raises(RequestError, match="reserved name"):
        ChatTemplate(source)


def test_long_conversations_are_within_the_bounds():
    messages = [{"role": "user", "content": "x" * 50}] * 20_000
    assert (
        ChatTemplate(ALL["headers"], {"bos_token": ""}).render(messages).count("<|eot|>") == 20_000
    )


def test_values_go_in_as_plain_data():
    class Rich(str):
        pass

    class Thing:
        pass

    made = jinja_sandbox.to_plain_data({"a": (1, Rich("b")), "t": Thing(), Rich("k"): True})
    assert made == {"a": [1, "b"], "t": "<Thing>", "k": True}
    assert type(made["a"][1]) is str
    assert type(made["k"]) is bool


@pytest.mark.parametrize("tools", ["x", {"type": "function"}, [print]])
def test_tools_must_be_schemas(tools):
    with pytest.raises(RequestError, match="tools") as e:
        ChatTemplate("x").render(USER, tools)
    assert e.value.param == "tools"


def test_an_empty_list_of_tools_is_none():
    assert ChatTemplate("{{ tools is none }}").render(USER, []) == "True"
