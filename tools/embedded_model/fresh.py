"""A second set of held-out prompts, in wordings written apart from the training patterns and used only here.

The patterns of `evaluate.py` were looked at between training runs, so they steered the data. These were not:
they are scored once, at the end. Values, names and operands still come from the evaluation side of `Draw`.
"""

import task_tools as tools
from chat_format import Chat, Message, dumps
from countries import COUNTRIES
from draw import Draw
from task_json import schema_text
from values import draw_value, name

CAPITALS = [
    "I would love to hear what the capital of {c} is.",
    "Which city do people call the capital of {c}?",
    "My friend is from {c}. What is the capital there?",
    "Can you recall the capital of {c}?",
    "Trivia time! The capital of {c}?",
    "What's the name of the capital of {c}?",
    "In one line: capital city of {c}.",
    "As far as you know, which city is the capital of {c}?",
]
SUMS = {
    "+": ["What comes out when I add {a} and {b}?", "I have {a} plus {b}. How much do I have?", "Kindly compute {a} + {b}", "So what is {a} + {b} then?"],
    "-": ["What remains of {a} - {b}?", "I would like you to compute {a} - {b}.", "So what is {a} minus {b} then?", "{a} - {b} comes to what?"],
    "*": ["So what is {a} times {b} then?", "I would like you to compute {a} * {b}.", "{a} x {b} comes to what?", "What comes out when I multiply {a} by {b}?"],
}  # fmt: skip
RECALL = [
    ("Good evening, they call me {n}.", "Earlier I told you my name. What is it?"),
    ("Hey! {n} is what I am called.", "So, what is my name?"),
    ("Nice to meet you, I am {n}.", "Please tell me what my name is."),
    (
        "Hello there, my name is {n} and I have a question.",
        "Have you kept my name in mind? What is it?",
    ),
]
# tool index in TOOLS, sentence
CALLS = [
    (0, "I wonder what the weather is like in {city}."),
    (0, "Please find out what the weather in {city} is, in {unit}."),
    (0, "Would you check how the weather is in {city} today?"),
    (3, "Any idea what time it is in {city}?"),
    (3, "Please check what time it is in {city} at the moment."),
    (5, 'I have to email {to}. Subject "{subject}", text "{body}".'),
    (6, 'Could you text {recipient} the message "{message}"?'),
    (7, "I am curious about {query}. Search for it."),
    (7, "Could you run a web search for {query}?"),
    (8, "Could you use the tool and add {a} and {b}?"),
    (11, "Could you start a timer of {minutes} minutes?"),
    (12, "Please let the alarm ring at {time} on {day}."),
    (13, "Could you remind me on {date} at {time} to {text}?"),
    (16, "I would like a flight from {origin} to {destination} on {date}."),
    (17, "Could you find us a hotel in {city} for {nights} nights?"),
    (20, 'Could you translate "{text}" into {target_language}?'),
    (21, "Could you convert {amount} {from_currency} into {to_currency}?"),
    (23, "Could you check what {symbol} costs at the moment?"),
    (24, "Could you turn {state} the light in the {room}?"),
    (25, "I would like it to be {temperature} degrees in the {room}."),
    (26, "Could you play some {genre} for me?"),
    (30, "Could you check the status of order {order_id}?"),
    (33, "Could you tell me how far it is from {origin} to {destination}?"),
]
TEXTS = [
    (
        ["name:full_name", "age:age", "city:city"],
        "We had a visit from {name}, who is {age} years old and lives in {city}.",
    ),
    (["name:full_name", "email:email"], "If you have questions, please contact {name} ({email})."),
    (["product:item", "price:price"], "Last week I bought a {product} for {price} dollars."),
    (["name:full_name", "job:job", "company:company"], "{name} is a {job} at {company}."),
    (["city:city", "date:date"], "The meeting will be held in {city} on {date}."),
    (["name:name", "age:age"], "Today we celebrate {name}, who is turning {age}."),
    (
        ["invoice_number:code", "total:price"],
        "Attached you find invoice {invoice_number} with a total of {total} dollars.",
    ),
    (
        ["origin:city", "destination:city", "date:date"],
        "She flew from {origin} to {destination} on {date}.",
    ),
    (
        ["title:title", "author:full_name", "year:year"],
        'In {year} {author} wrote the book "{title}".',
    ),
    (
        ["event:title", "date:date", "time:clock"],
        'Please note: "{event}" will be on {date} at {time}.',
    ),
    (["name:full_name", "phone:phone"], "You can call {name} at {phone}."),
    (
        ["product:item", "color:colour", "quantity:small"],
        "We need {quantity} pieces of the {product} in {color}.",
    ),
]
JSON_ASKS = [
    "Please extract {k} from the text below and answer in JSON.\n\n{t}",
    "Here is a text: {t}\n\nGive me a JSON object with the keys {k}.",
]
JSON_SCHEMA_ASKS = [
    "Extract information from the text according to this JSON schema.\nSchema: {s}\nText: {t}",
    "{t}\n\nReturn a JSON object that follows this schema: {s}",
]


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def capitals(d: Draw, count: int) -> list[Chat]:
    out = []
    for i, c in enumerate(COUNTRIES):
        think = f"The capital of {c.name} is {c.capital}."
        out.append(Chat(user(CAPITALS[i % len(CAPITALS)].format(c=c.name)), think, think))
    return out


def sums(d: Draw, count: int) -> list[Chat]:
    from task_numbers import operands, result

    out = []
    for i in range(count):
        op = "+-*"[i % 3]
        a, b = operands(d, op)
        text = d.any(SUMS[op]).format(a=a, b=b)
        trace, r = result(op, a, b)
        out.append(Chat(user(text), f"{r}", "\n".join(trace)))
    return out


def recall(d: Draw, count: int) -> list[Chat]:
    from task_talk import filler

    out = []
    for _ in range(count):
        who, (tell, ask) = name(d), d.any(RECALL)
        messages = [*user(tell.format(n=who)), {"role": "assistant", "content": f"Hello {who}!"}]
        for _ in range(d.int(0, 3)):
            messages += filler(d)
        out.append(Chat([*messages, *user(ask)], f"Your name is {who}.", f"The user said: {who}."))
    return out


def calls(d: Draw, count: int) -> list[Chat]:
    out = []
    while len(out) < count:
        index, ask = CALLS[len(out) % len(CALLS)]
        tool = tools.TOOLS[index]
        wish = tools.wish_for(d, tools.Tool(tool.names, tool.about, tool.params, [ask]), set())
        if wish is not None:
            chat = Chat(user(wish.text), "", tools.think_of([wish]), [tools.call_of(wish)])
            chat.tools = tools.offers(d, wish, len(out) // len(CALLS) % 4)
            out.append(chat)
    return out


def extractions(d: Draw, count: int) -> list[Chat]:
    out = []
    for i in range(count):
        fields, text = TEXTS[i % len(TEXTS)]
        kinds = dict(f.split(":") for f in fields)
        drawn = {k: draw_value(d, kind) for k, kind in kinds.items()}
        text = text.format(**{k: v[0] for k, v in drawn.items()})
        found = {k: v[1] for k, v in drawn.items()}
        if d.chance(0.5):
            prompt = d.any(JSON_ASKS).format(k=", ".join(found), t=text)
        else:
            prompt = d.any(JSON_SCHEMA_ASKS).format(s=schema_text(d, kinds), t=text)
        out.append(
            Chat(user(prompt), dumps(found), "; ".join(f"{k}: {v}" for k, v in found.items()))
        )
    return out
