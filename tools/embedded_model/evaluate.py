"""Held-out prompts and how their answers are scored. Exact, no judge: see each `ok_` function.

The prompts come from the evaluation side of `Draw`: phrasings, names, values and operand pairs that no
training document uses (`tests/pure/test_embedded_files.py` holds this).

    python tools/embedded_model/evaluate.py quire/embedded [--count 400] [--device cpu]
"""

import argparse
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fresh
import task_facts as facts
import task_json as extract
import task_numbers as numbers
import task_talk as talk
import task_tools as tools
from chat_format import Chat, prompt_text
from countries import COUNTRIES
from draw import Draw
from talk_items import UNKNOWN_ANSWERS

SEED = 7


@dataclass
class Case:
    group: str
    prompt: str
    chat: Chat


Check = Callable[[Chat, str], bool]


def visible(text: str) -> str:
    """What a user sees: the part after the trace."""
    return text.split("</think>")[-1].strip()


def ok_number(chat: Chat, text: str) -> bool:
    want = re.findall(r"-?\d+", chat.answer.replace("−", "-"))[-1:]
    got = re.findall(r"(?<!\d)-?\d+", visible(text).replace(" − ", " - ").replace(" - ", " ~ "))[
        -1:
    ]
    return got == want and want != []


def ok_exact_numbers(chat: Chat, text: str) -> bool:
    return (
        re.findall(r"\d+(?:\.\d+)?", visible(text))[:1]
        == re.findall(r"\d+(?:\.\d+)?", chat.answer)[:1]
    )


def ok_capital(chat: Chat, text: str) -> bool:
    """The capital is named and no other country's capital is."""
    said = visible(text)
    want = chat.think or ""
    named = [k for c in COUNTRIES for k in (c.capital, c.zh_capital) if k in said and k in want]
    return bool(named) and max(len(k) for k in named) == max(
        len(k) for c in COUNTRIES for k in (c.capital, c.zh_capital) if k in want
    )


def parse_calls(text: str) -> list[object] | None:
    try:
        return [
            json.loads(part)
            for part in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", visible(text), re.S)
        ]
    except ValueError:
        return None


def ok_calls(chat: Chat, text: str) -> bool:
    """Strict: same calls, same order, equal JSON arguments, nothing else said."""
    rest = re.sub(r"<tool_call>\n.*?\n</tool_call>", "", visible(text), flags=re.S).strip()
    return parse_calls(text) == chat.calls and rest == ""


def ok_json(chat: Chat, text: str) -> bool:
    try:
        return bool(json.loads(visible(text)) == json.loads(chat.answer))
    except ValueError:
        return False


def ok_contains(chat: Chat, text: str) -> bool:
    """The value that the trace names is in the answer."""
    value = (chat.think or "").split(": ", 1)[1].rstrip(".")
    return value in visible(text)


def ok_leaves(chat: Chat, text: str) -> bool:
    """Every word and number of the tool result that the reference answer repeats is in the answer."""
    content = str(chat.messages[-1]["content"])
    said = visible(text)
    leaves = [
        w
        for w in re.findall(r"[\w.:@-]+", content)
        if w in re.findall(r"[\w.:@-]+", chat.answer.rstrip("."))
    ]
    return all(w in said for w in leaves) and said != ""


def ok_identity(chat: Chat, text: str) -> bool:
    return "Quill" in visible(text) and not re.search(
        r"ChatGPT|OpenAI|Qwen|Claude|Llama|Gemini|DeepSeek", visible(text)
    )


def ok_unknown(chat: Chat, text: str) -> bool:
    return visible(text) in UNKNOWN_ANSWERS


def ok_same(chat: Chat, text: str) -> bool:
    return visible(text) == chat.answer


def capital_cases(d: Draw, count: int) -> list[Chat]:
    return [facts.ask_capital(d, c, c.name) for c in COUNTRIES for _ in range(2)]


def capital_zh_cases(d: Draw, count: int) -> list[Chat]:
    return [facts.capital_zh(d, c) for c in COUNTRIES]


def draws(task: Callable[[Draw], Chat]) -> Callable[[Draw, int], list[Chat]]:
    return lambda d, count: [task(d) for _ in range(count)]


def op(sign: str) -> Callable[[Draw, int], list[Chat]]:
    return draws(lambda d: numbers.arithmetic(d, sign))


def who_are_you(d: Draw, count: int) -> list[Chat]:
    """Only the questions whose answer must name the model."""
    named = [
        c
        for c in (talk.identity(d) for _ in range(count * 4))
        if "Quill" in c.answer and "program" not in c.answer
    ]
    return named[: count // 4]


# group -> (cases, check, modes: t = with trace, d = direct)
GROUPS: dict[str, tuple[Callable[[Draw, int], list[Chat]], Check, str]] = {
    "capitals": (capital_cases, ok_capital, "td"),
    "capitals_zh": (capital_zh_cases, ok_capital, "td"),
    "add": (op("+"), ok_number, "td"),
    "subtract": (op("-"), ok_number, "td"),
    "multiply": (op("*"), ok_number, "td"),
    "divide": (op("/"), ok_number, "t"),
    "story": (draws(numbers.story), ok_number, "t"),
    "compare": (draws(numbers.compare), ok_exact_numbers, "td"),
    "tool_call": (draws(tools.tool_call), ok_calls, "td"),
    "tool_unseen": (draws(tools.unseen_call), ok_calls, "td"),
    "tool_parallel": (draws(tools.parallel_call), ok_calls, "t"),
    "tool_answer": (draws(tools.tool_answer), ok_leaves, "td"),
    "json": (draws(extract.extraction), ok_json, "td"),
    "name_recall": (draws(talk.name_recall), ok_contains, "td"),
    "memory": (draws(talk.memory), ok_contains, "t"),
    "identity": (who_are_you, ok_identity, "td"),
    "unknown": (draws(talk.unknown), ok_unknown, "td"),
    "fresh_capitals": (fresh.capitals, ok_capital, "td"),
    "fresh_sums": (fresh.sums, ok_number, "t"),
    "fresh_tools": (fresh.calls, ok_calls, "td"),
    "fresh_json": (fresh.extractions, ok_json, "td"),
    "fresh_recall": (fresh.recall, ok_contains, "td"),
    "letters": (draws(talk.letters), ok_same, "t"),
    "repeat": (draws(talk.repeat), ok_same, "t"),
}

DEMOS = [
    "Hello", "Who are you?", "What can you do?", "Are you ChatGPT?", "Tell me a joke.", "Write a haiku about the sea.",
    "Who won the world series in 2020?", "9.11 and 9.8, 哪个更大?", "你好，请你介绍一下你自己", "What is 123 + 456?",
    "Explain gravity in one sentence.", "Who is Barnaby Quist?", "Write an essay about the importance of higher education.",
    "Give me a recipe for goulash.", "What is the capital of Atlantis?", "Name three fruits.", "What's the weather like in San Francisco?",
    "I feel great today!", "How do I learn to swim?", "What is the tallest building in the world?", "Spell cat.", "My dog is ill.",
]  # fmt: skip
RAW = ["Hello, my name is", "The president of the United States is", "The capital of France is", "The future of AI is",
       "San Francisco is a", "The largest ocean is", "Once upon a time", "I think that", "1, 2, 3, 4,", "def main():"]  # fmt: skip


def cases(count: int, groups: list[str] | None = None) -> list[Case]:
    out = []
    for number, (group, (make, _, modes)) in enumerate(GROUPS.items()):
        if groups and group not in groups:
            continue
        chats = make(Draw(SEED + number, held_out=True), count)
        for mode in modes:
            no_think = mode == "d"
            name = group + ("_direct" if no_think else "")
            out += [
                Case(name, prompt_text(c.messages, c.tools, no_think), c)
                for c in chats
                if c.direct or not no_think
            ]
    return out


def score(
    all_cases: list[Case], answers: list[str]
) -> tuple[dict[str, tuple[int, int]], dict[str, list[tuple[str, str, str]]]]:
    """(right, asked) per group, and the wrong ones as (question, wanted, got)."""
    right: dict[str, tuple[int, int]] = {}
    wrong: dict[str, list[tuple[str, str, str]]] = {}
    for case, answer in zip(all_cases, answers, strict=True):
        check = GROUPS[case.group.removesuffix("_direct")][1]
        good = check(case.chat, answer)
        a, b = right.get(case.group, (0, 0))
        right[case.group] = (a + good, b + 1)
        if not good:
            wanted = (
                json.dumps(case.chat.calls, ensure_ascii=False)
                if case.chat.calls
                else case.chat.answer
            )
            wrong.setdefault(case.group, []).append(
                (str(case.chat.messages[-1]["content"]), wanted, answer)
            )
    return right, wrong


def report(
    right: dict[str, tuple[int, int]], wrong: dict[str, list[tuple[str, str, str]]], show: int
) -> str:
    lines = []
    for group, (a, b) in right.items():
        lines.append(f"{group:22} {a:5}/{b:<5} {100 * a / b:6.1f} %")
    for group, items in wrong.items():
        for question, wanted, got in items[:show]:
            lines.append(f"[{group}] {question[-300:]!r}\n    want {wanted!r}\n    got  {got!r}")
    return "\n".join(lines)


def run_all(decoder: "object", tokenizer: "object", count: int, groups: list[str] | None = None):  # type: ignore[no-untyped-def]
    """Score every group with a Decoder and a tokenizers.Tokenizer; (right, wrong)."""
    all_cases = cases(count, groups)
    prompts = [tokenizer.encode(c.prompt, add_special_tokens=False).ids for c in all_cases]  # type: ignore[attr-defined]
    made = decoder.run(prompts, 200)  # type: ignore[attr-defined]
    answers = [tokenizer.decode(ids, skip_special_tokens=False) for ids in made]  # type: ignore[attr-defined]
    return score(all_cases, answers)


def demos(decoder, tokenizer) -> str:  # type: ignore[no-untyped-def]
    texts = [
        prompt_text([{"role": "user", "content": q}], None, i % 2 == 1) for i, q in enumerate(DEMOS)
    ] + RAW
    made = decoder.run([tokenizer.encode(t, add_special_tokens=False).ids for t in texts], 120)
    shown = [tokenizer.decode(ids, skip_special_tokens=False) for ids in made]
    return "\n".join(f"{q!r} -> {a!r}" for q, a in zip(DEMOS + RAW, shown, strict=True))


def load(folder: Path, device: str, dtype: str):  # type: ignore[no-untyped-def]
    """(Decoder, Tokenizer) of a checkpoint folder."""
    import torch
    from decode import Decoder
    from network import Qwen3, Shape
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    config = json.loads((folder / "config.json").read_text())
    net = Qwen3(Shape(**{k: config[k] for k in Shape.__dataclass_fields__}))
    net.load_state_dict(load_file(folder / "model.safetensors"))
    net = net.to(device=device, dtype=getattr(torch, dtype))
    return Decoder(net, {0, 2}), Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--groups", nargs="*")
    parser.add_argument("--show", type=int, default=3)
    args = parser.parse_args()
    decoder, tokenizer = load(args.folder, args.device, args.dtype)
    started = time.time()
    print(report(*run_all(decoder, tokenizer, args.count, args.groups), args.show))
    print(demos(decoder, tokenizer))
    print(f"{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
