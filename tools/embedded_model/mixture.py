"""The training mixture: which task how often, with which system prompt, history and mode around it.

`document(d)` gives one training document as (prompt, answer) text: the answer carries the loss.
"""

import random
from collections.abc import Callable

import task_facts as facts
import task_json as extract
import task_numbers as numbers
import task_talk as talk
import task_text as text
import task_tools as tools
from chat_format import Chat, Message, answer_text, prompt_text
from draw import Draw

Task = Callable[[Draw], Chat]

MIXTURE: list[tuple[float, Task]] = [
    (18, numbers.arithmetic),
    (3, numbers.story),
    (2.5, numbers.compare),
    (1, numbers.count),
    (0.7, numbers.parity),
    (0.7, numbers.sequence),
    (0.8, numbers.shopping),
    (8, facts.capital),
    (5, facts.capital_zh),
    (2, facts.reverse),
    (1.5, facts.continent),
    (2, facts.capital_with_rule),
    (28, tools.tool_call),
    (2.5, tools.no_tool),
    (1.5, tools.parallel_call),
    (4, tools.tool_answer),
    (25, extract.extraction),
    (1, extract.writing),
    (6, talk.name_recall),
    (0.7, talk.greeting_by_name),
    (0.8, talk.no_name),
    (3, talk.memory),
    (3, talk.identity),
    (2.5, talk.small_talk),
    (2, talk.facts),
    (2.5, talk.chinese),
    (2, talk.definition),
    (7, talk.unknown),
    (0.6, talk.joke),
    (0.6, talk.poem),
    (0.8, talk.essay),
    (1, talk.listing),
    (1.2, talk.letters),
    (0.5, talk.opposite),
    (4, talk.repeat),
]
TEXT_SHARE = 0.06
_TASKS = [task for _, task in MIXTURE]
_WEIGHTS = [weight for weight, _ in MIXTURE]
_CUMULATED = [sum(_WEIGHTS[: i + 1]) for i in range(len(_WEIGHTS))]

# Exchanges short enough to stand between a name and the question for it.
SHORT: list[Task] = [numbers.arithmetic, numbers.compare, facts.capital, facts.capital_zh, talk.small_talk,
                     talk.facts, talk.identity, talk.joke, talk.definition, talk.opposite, talk.chinese]  # fmt: skip
# Questions that a tool of the offered kinds cannot answer.
TOOLLESS: list[Task] = [facts.capital, talk.small_talk, talk.identity, talk.facts, talk.joke, talk.definition,
                        talk.name_recall, talk.opposite, talk.greeting_by_name]  # fmt: skip

SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are Quill, a small model that ships with quire.",
    "You are a friendly assistant.",
    "Be helpful and brief.",
    "You are a helpful AI assistant. Answer the user's questions.",
    "Answer the questions of the user.",
    "You are an assistant that gives short answers.",
    "你是一个有用的助手。",
]


def pick(rng: random.Random) -> Task:
    return rng.choices(_TASKS, cum_weights=_CUMULATED)[0]


def short_exchange(d: Draw) -> Chat:
    return d.any(SHORT)(d)


def surround(d: Draw, chat: Chat) -> Chat:
    """Give a plain chat a system prompt, earlier turns or idle tools now and then."""
    if not chat.plain:
        return chat
    if chat.tools is None and chat.messages[0]["role"] == "user" and d.chance(0.12):
        earlier: list[Message] = []
        for _ in range(d.int(1, 12) if d.chance(0.1) else d.int(1, 3)):
            earlier += talk.filler(d)
        chat.messages = [*earlier, *chat.messages]
    if d.chance(0.25):
        chat.messages = [{"role": "system", "content": d.any(SYSTEMS)}, *chat.messages]
    return chat


def chat_for(d: Draw, task: Task | None = None) -> Chat:
    if task is None and d.chance(0.05):
        chat = d.any(TOOLLESS)(d)
        chat.tools = tools.idle_tools(d)
        return surround(d, chat)
    return surround(d, (task or pick(d.rng))(d))


def no_think_for(d: Draw, chat: Chat) -> bool:
    if chat.think is None:
        return True
    return chat.direct and d.chance(0.4)


def document(d: Draw) -> tuple[str, str]:
    """(prompt, answer) of one document; plain text has no prompt."""
    if d.chance(TEXT_SHARE):
        return "", text.plain_text(d) + "<|endoftext|>"
    chat = chat_for(d)
    no_think = no_think_for(d, chat)
    return prompt_text(chat.messages, chat.tools, no_think), answer_text(chat, no_think)
