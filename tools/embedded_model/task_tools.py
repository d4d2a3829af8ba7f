"""Tool calling: which of one to four offered tools, with which arguments, and what to say about the result."""

import re

from chat_format import Chat, Message, dumps
from draw import Draw, checksum
from tool_list import EXTRAS, THINGS, TOOLS, UNSEEN, VERBS, Tool
from values import draw_value, json_type, place

Spec = dict[str, object]


class Offer:
    """One tool as a conversation sees it: its JSON and one way of asking for it."""

    def __init__(self, name: str, about: str, params: dict[str, Spec], required: list[str]) -> None:
        self.name = name
        self.about = about
        self.params = params
        self.required = required

    def spec(self, d: Draw) -> Message:
        shape: Spec = {"type": "object", "properties": self.params, "required": self.required}
        if d.chance(0.08):
            shape["additionalProperties"] = False
        function: Spec = {"name": self.name, "description": self.about, "parameters": shape}
        if d.chance(0.05):
            del function["description"]
        if d.chance(0.05):
            function["strict"] = True
        return {"type": "function", "function": function}


class Wish:
    """What the user asks for: an offer, the sentence, the arguments that follow from it."""

    def __init__(self, offer: Offer, text: str, arguments: dict[str, object]) -> None:
        self.offer = offer
        self.text = text
        self.arguments = arguments


def schema_of(d: Draw, kind: str, about: str) -> Spec:
    spec: Spec = {"type": json_type(kind)}
    if json_type(kind) == "integer" and d.chance(0.2):
        spec["type"] = "number"
    if kind.startswith("enum("):
        spec["enum"] = kind[5:-1].split(",")
        if d.chance(0.5):
            return spec
    if about and (kind == "us_city" or d.chance(0.6)):
        spec["description"] = about  # only the description tells "San Francisco" from "San Francisco, CA"
    return spec


def wish_for(d: Draw, tool: Tool, taken: set[str]) -> Wish | None:
    """Draw names, a sentence and values for a listed tool; None when its name is taken."""
    name = d.any(tool.names)
    if name in taken:
        return None
    ask = d.phrase(tool.asks)
    params: dict[str, Spec] = {}
    arguments: dict[str, object] = {}
    required, words = [], {}
    for line in tool.params:
        head, _, about = line.partition("=")
        keys, _, kind = head.partition(":")
        first = keys.split("/")[0]
        used = "{" + first + "}" in ask
        if not used and d.chance(0.35):
            continue
        key = first if d.chance(0.6) else d.any(keys.split("/"))
        if key in params:
            continue
        params[key] = schema_of(d, kind, about)
        if used:
            words[first], arguments[key] = draw_value(d, kind)
            if len(required) == 0 or d.chance(0.6):
                required.append(key)
        elif first == "unit" and d.chance(0.3):  # asked for, not said: the first of its choices
            required.append(key)
            arguments[key] = kind[5:-1].split(",")[0]
    if len({w for w in words.values()}) < len(words):
        return None
    text = ask.format(**words)
    if d.chance(0.08):
        text = text[0].lower() + text[1:].rstrip(".?")
    return Wish(Offer(name, d.any(tool.about), params, required), text, arguments)


def made_name(d: Draw) -> tuple[str, str]:
    """A verb and a thing; one pair in ten is kept for evaluation."""
    while True:
        verb, thing = d.any(VERBS), d.any(THINGS)
        if (checksum(f"{verb}_{thing}") % 10 == 0) == d.held_out:
            return verb, thing


MADE_ASKS = [
    "{V} the {t} with {p}.",
    "{V} a {t} with {p}.",
    "Please {v} the {t}: {p}.",
    "Can you {v} a {t} with {p}?",
    "I want to {v} a {t}. Use {p}.",
    "{v} {t}, {p}",
    "Could you please {v} the {t} with {p}?",
    "I need you to {v} the {t} with {p}.",
    "{V} my {t} using {p}.",
    "Let's {v} a {t} with {p}.",
]
JOINS = [", ", " and "]


def made_wish(d: Draw, taken: set[str]) -> Wish | None:
    """A tool made up on the spot, so that the schema has to be read."""
    verb, thing = made_name(d)
    name = d.any([f"{verb}_{thing}", f"{verb}_{thing}", f"{thing}_{verb}", f"{verb}{thing.capitalize()}"])
    if name in taken:
        return None
    chosen = d.some(EXTRAS, d.int(1, 4))
    params: dict[str, Spec] = {}
    arguments: dict[str, object] = {}
    said = []
    for i, (key, kind, form) in enumerate(chosen):
        params[key] = schema_of(d, kind, f"The {key.replace('_', ' ')} of the {thing}" if d.chance(0.5) else "")
        if i == 0 or d.chance(0.8):
            word, arguments[key] = draw_value(d, kind)
            said.append(form.format(v=word))
    order = list(range(len(said)))
    d.rng.shuffle(order)
    spoken = [said[i] for i in order]
    parts = ", ".join(spoken[:-1]) + (d.any(JOINS) if len(spoken) > 1 else "") + spoken[-1]
    text = d.phrase(MADE_ASKS).format(V=verb.capitalize(), v=verb, t=thing, p=parts)
    about = d.any(["{V} a {t}", "{V} the {t}", "{V} a {t} in the system", "Used to {v} a {t}"])
    about = about.format(V=verb.capitalize(), v=verb, t=thing)
    required = [k for k in params if k in arguments and d.chance(0.8)]
    return Wish(Offer(name, about, params, required), text, arguments)


def any_wish(d: Draw, taken: set[str], pool: list[Tool] | None = None) -> Wish:
    while True:
        if pool is None and d.chance(0.35):
            wish = made_wish(d, taken)
        else:
            wish = wish_for(d, d.any(pool or TOOLS), taken)
        if wish is not None:
            return wish


def related(a: Wish, b: Wish) -> bool:
    """Whether two tools could answer the same sentence."""
    x, y = set(re.split(r"[_]", a.offer.name.lower())), set(re.split(r"[_]", b.offer.name.lower()))
    return bool(x & y) or a.offer.about == b.offer.about or set(FAMILY.get(a.offer.name, ())) & set(
        FAMILY.get(b.offer.name, ())) != set()


# Tools that would be fair answers to each other's sentences are never offered together.
_GROUPS = [t.names for t in TOOLS[:3]] + [t.names for t in TOOLS]
_CLOSE = [(0, 1, 2), (3, 4), (5, 6), (12, 13, 14, 15), (16, 33, 34), (17, 18, 19), (21, 22), (7, 27, 37), (28, 37, 38), (29, 35, 40)]
FAMILY: dict[str, set[int]] = {}
for _i, _tool in enumerate(TOOLS):
    for _name in _tool.names:
        FAMILY.setdefault(_name, set()).update({100 + _i} | {g for g, c in enumerate(_CLOSE) if _i in c})


def think_of(wishes: list[Wish]) -> str:
    lines = []
    for wish in wishes:
        args = "; ".join(f"{k}: {v}" for k, v in wish.arguments.items())
        lines.append(f"{wish.offer.name} fits. {args}")
    return "\n".join(lines)


def offers(d: Draw, wish: Wish, extra: int) -> list[Message]:
    """The wanted tool among others, in any order."""
    taken, specs = {wish.offer.name}, [wish.offer.spec(d)]
    while len(specs) <= extra:
        other = any_wish(d, taken)
        if related(other, wish):
            continue
        taken.add(other.offer.name)
        specs.append(other.offer.spec(d))
    d.rng.shuffle(specs)
    return specs


def call_of(wish: Wish) -> Message:
    return {"name": wish.offer.name, "arguments": wish.arguments}


def tool_call(d: Draw, pool: list[Tool] | None = None) -> Chat:
    wish = any_wish(d, set(), pool)
    chat = Chat([{"role": "user", "content": wish.text}], "", think_of([wish]), [call_of(wish)])
    chat.tools = offers(d, wish, d.int(0, 3))
    return chat


def unseen_call(d: Draw) -> Chat:
    """A tool no training document holds; evaluation only."""
    return tool_call(d, UNSEEN)


PAIR_ASKS = [
    ("weather", "What is the weather in {a} and in {b}?"),
    ("weather", "Compare the weather in {a} and {b}."),
    ("weather", "Weather for {a} and {b}, please."),
    ("weather", "How is the weather in {a} and {b}?"),
    ("time", "What time is it in {a} and in {b}?"),
    ("time", "Tell me the time in {a} and {b}."),
    ("time", "Current time in {a} and {b}?"),
]


def parallel_call(d: Draw) -> Chat:
    """Two calls of one tool in one turn."""
    kind, ask = d.phrase(PAIR_ASKS)
    tool = TOOLS[0] if kind == "weather" else TOOLS[3]
    first = wish_for(d, Tool(tool.names, tool.about, tool.params[:1], ["{city}"]), set())
    assert first is not None
    key = next(iter(first.offer.params))
    a, b = place(d), place(d)
    wishes = [Wish(first.offer, "", {key: city}) for city in (a, b)]
    chat = Chat([{"role": "user", "content": ask.format(a=a, b=b)}], "", think_of(wishes), [call_of(w) for w in wishes])
    chat.tools = offers(d, first, d.int(0, 2))
    return chat


WEATHER = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy"]


def weather_result(d: Draw, wish: Wish) -> tuple[object, str]:
    city, sky, warm = next(iter(wish.arguments.values())), d.any(WEATHER), d.int(-15, 40)
    unit = str(wish.arguments.get("unit", d.any(["celsius", "fahrenheit"])))
    form = d.int(0, 3)
    said = f"It is {warm} degrees and {sky} in {city}."
    if form == 0:
        return {"temperature": warm, "condition": sky}, said
    if form == 1:
        said = f"It is {warm} degrees {unit} and {sky} in {city}."
        return {"city": city, "temperature": warm, "unit": unit, "sky": sky}, said
    if form == 2:
        return f"{warm} degrees, {sky}", said
    return {"temp": warm, "conditions": sky}, said


def error_result(d: Draw, wish: Wish) -> tuple[object, str]:
    why = d.any(["not found", "timeout", "permission denied", "service unavailable", "invalid argument", "rate limit reached"])
    said = d.any(["The call failed: {w}.", "I could not do that. The tool says: {w}.", "Sorry, {n} failed: {w}."])
    return {"error": why}, said.format(w=why, n=wish.offer.name)


def plain_result(d: Draw, wish: Wish) -> tuple[object, str]:
    """A result of a few named values, read back."""
    word, value = draw_value(d, d.any(["number", "code", "name", "price", "date", "clock", "title", "small"]))
    key = d.any(["result", "value", "answer", "id", "status", "total", "price", "time", "number", "code", "date"])
    if d.chance(0.2):
        return str(word), d.any([f"The result is {word}.", f"It is {word}.", f"The answer is {word}."])
    label = {"result": "The result is", "answer": "The answer is"}.get(key, f"The {key} is")
    if d.chance(0.35):
        other, second = draw_value(d, d.any(["number", "name", "clock", "date"]))
        extra = d.any(["owner", "count", "end", "name", "start", "sender"])
        return {key: value, extra: second}, f"{label} {word} and the {extra} is {other}."
    return {key: value}, f"{label} {word}."


def done_result(d: Draw, wish: Wish) -> tuple[object, str]:
    ok = d.any([{"status": "ok"}, {"success": True}, {"status": "success"}, {"result": "done"}, "ok", "done"])
    said = d.any(["Done.", "Done, it worked.", "That is done.", "It worked.", "All done."])
    if isinstance(ok, dict) and d.chance(0.5):
        number = d.int(10, 9999)
        ok = {**ok, "id": number}
        said = f"{said.rstrip('.')}. The id is {number}."
    return ok, said


def tool_answer(d: Draw) -> Chat:
    """The turn after a tool has answered."""
    wish = any_wish(d, set(), TOOLS[:2] if d.chance(0.35) else None)
    if FAMILY.get(wish.offer.name, set()) & {100, 101}:
        result, said = weather_result(d, wish)
    else:
        result, said = d.any([plain_result, plain_result, done_result])(d, wish)
    if d.chance(0.1):
        result, said = error_result(d, wish)
    call: Message = {"role": "assistant", "content": "", "tool_calls": [call_of(wish)]}
    if d.chance(0.5):
        call["reasoning_content"] = think_of([wish])
    content = result if isinstance(result, str) else dumps(result)
    messages = [{"role": "user", "content": wish.text}, call, {"role": "tool", "content": content}]
    chat = Chat(messages, said, f"{wish.offer.name} answered: {content}", plain=False)
    chat.tools = offers(d, wish, d.int(0, 2)) if d.chance(0.9) else None
    return chat


def idle_tools(d: Draw) -> list[Message]:
    """Tools that have nothing to do with a chat about capitals, numbers or people."""
    specs, taken = [], set()
    while len(specs) < d.int(1, 3):
        wish = made_wish(d, taken) if d.chance(0.6) else wish_for(d, d.any(TOOLS[:6] + TOOLS[11:27]), taken)
        if wish is not None and wish.offer.name not in taken:
            taken.add(wish.offer.name)
            specs.append(wish.offer.spec(d))
    return specs
