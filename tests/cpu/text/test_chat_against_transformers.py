"""Chat templates make the text that transformers makes."""

import pytest

from quire.text.tokenizing.tokenizer import load_tokenizer
from tests.pure.text.made import folder_of
from tests.pure.text.templates import ALL, CONVERSATIONS, TOOL

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = folder_of(tmp_path_factory.mktemp("chat"), "llama", bos_token="<s>")
    return load_tokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))


def made(tokenizer, messages, **kwargs):
    """The text, or "refused"."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    except Exception:  # noqa: BLE001  what transformers raises is Jinja's or a ValueError
        return "refused"


@pytest.mark.parametrize("template", ALL)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"tools": [TOOL, TOOL], "add_generation_prompt": True},
        {"add_generation_prompt": True, "enable_thinking": False},
        {"continue_final_message": True},
        {"documents": [{"title": "T", "text": "x"}]},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_templates_render_alike(pair, template, conversation, options):
    ours, peer = pair
    messages = CONVERSATIONS[conversation]
    text = made(peer, messages, chat_template=ALL[template], **options)
    assert made(ours, messages, chat_template=ALL[template], **options) == text


@pytest.mark.parametrize("template", ALL)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_normalized_messages_render_as_in_transformers(pair, template, conversation):
    """`render`, which LLM.chat uses, changes nothing where there is nothing to settle."""
    ours, peer = pair
    messages = CONVERSATIONS[conversation]
    text = made(peer, messages, chat_template=ALL[template], add_generation_prompt=True)
    try:
        rendered = ours.template(ALL[template]).render(messages)
    except ValueError:
        rendered = "refused"
    assert rendered == text


def test_ids_of_a_conversation_are_alike_and_bos_is_there_once(pair):
    ours, peer = pair
    messages = CONVERSATIONS["turns"]
    options = {"chat_template": ALL["inst"], "add_generation_prompt": True}
    ids = ours.apply_chat_template(messages, **options)
    assert ids == peer.apply_chat_template(messages, return_dict=False, **options)
    assert ids.count(ours.bos_token_id) == 1
    both = ours.apply_chat_template([messages, messages], return_dict=True, **options)
    assert both.input_ids == [ids, ids]
