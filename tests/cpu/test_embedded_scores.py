"""What the embedded model must be able to do, on small held-out samples, through quire's own API.

The full scores, with hundreds of prompts a task, are in the model card; these samples hold the floor.
Also that its folder is one that transformers reads, and that its template writes what training wrote.
"""

import importlib
import json
import sys
from pathlib import Path

import pytest

from quire import LLM, SamplingParams, embedded
from tests import tiers

pytestmark = pytest.mark.slow("the embedded model answers 90 prompts, once")

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "embedded_model"
# task -> (prompts in the long tier, least share right); half of them every day
FLOORS = {
    "capitals": (40, 0.95),
    "add": (15, 0.95),
    "subtract": (15, 0.95),
    "multiply": (15, 0.95),
    "tool_call": (20, 0.9),
    "json": (20, 0.85),
    "name_recall": (20, 0.9),
    "fresh_tools": (20, 0.9),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=220, skip_special_tokens=False)


@pytest.fixture(scope="module")
def tools():
    sys.path.insert(0, str(TOOLS))
    before = set(sys.modules)
    yield {
        name: importlib.import_module(name)
        for name in ("draw", "mixture", "evaluate", "chat_format")
    }
    sys.path.remove(str(TOOLS))
    for name in set(sys.modules) - before:
        if str(TOOLS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def llm():
    return LLM("embedded", max_num_seqs=64)


@pytest.fixture(scope="module")
def right(tools, llm):
    """(right, total) per task, all prompts of all tasks in one batch."""
    evaluate = tools["evaluate"]
    some = []
    for group, (most, _) in FLOORS.items():
        count = tiers.amount(most // 2, most)
        made = [c for c in evaluate.cases(count, [group]) if c.group == group]
        step = max(1, len(made) // count)
        some += made[::step][:count]
    answers = [
        o.outputs[0].text for o in llm.generate([c.prompt for c in some], GREEDY, use_tqdm=False)
    ]
    return evaluate.score(some, [a.removesuffix("<|im_end|>") for a in answers])[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("task", FLOORS)
def test_the_model_keeps_its_scores_on_held_out_prompts(task, right):
    good, asked = right[task]
    assert asked >= min(FLOORS[task][0] // 2, 15)
    assert good / asked >= FLOORS[task][1], right


def test_it_says_who_it_is_and_not_that_it_is_another(llm):
    asks = ["Who are you?", "Are you ChatGPT?", "你是谁？"]
    outs = llm.chat([[{"role": "user", "content": a}] for a in asks], GREEDY, use_tqdm=False)
    said = [o.outputs[0].text.split("</think>")[-1] for o in outs]
    assert all("Quill" in s for s in said)
    assert not any("OpenAI" in s or "我是ChatGPT" in s or "am ChatGPT" in s for s in said)


def test_thinking_can_be_switched_off(llm):
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    on = llm.chat(ask, GREEDY, use_tqdm=False)[0]
    off = llm.chat(ask, GREEDY, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})[0]
    assert on.outputs[0].text.startswith("<think>")
    assert "<think>" not in off.outputs[0].text
    assert "Paris" in on.outputs[0].text
    assert "Paris" in off.outputs[0].text


def test_it_stops_by_itself(llm):
    outs = llm.generate(["The capital of France is", "Hello, my name is"], GREEDY, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outs] == ["stop", "stop"]
    assert "Paris" in outs[0].outputs[0].text


def test_the_template_writes_what_training_wrote(tools):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded.path())
    draw = tools["draw"].Draw(11)
    for _ in range(300):
        chat = tools["mixture"].chat_for(draw)
        for no_think in (False, True):
            messages = [with_function(m) for m in chat.messages]
            text = tokenizer.apply_chat_template(
                messages,
                tools=chat.tools,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=not no_think,
            )
            assert text == tools["chat_format"].prompt_text(chat.messages, chat.tools, no_think)


def with_function(message):
    """A message with its calls as the OpenAI API writes them, arguments as text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {
            "type": "function",
            "function": {
                "name": c["name"],
                "arguments": json.dumps(c["arguments"], ensure_ascii=False),
            },
        }
        for c in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def test_transformers_answers_the_same(llm):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded.path())
    model = AutoModelForCausalLM.from_pretrained(embedded.path(), dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 478 + 356?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    made = model.generate(ids, max_new_tokens=100, do_sample=False)[0, ids.shape[1] :]
    assert "834" in tokenizer.decode(made).split("</think>")[-1]
