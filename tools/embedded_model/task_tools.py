"""Tool calling: which of one to four offered tools, with which arguments, and what to say about the result."""

import re

from chat_format import Chat, Message, dumps
from combos import combo
from draw import Draw, checksum
from tool_list import ASPECTS, EXTRAS, THINGS, TOOLS, UNSEEN, VERB_WORDS, VERBS, Tool
from values import draw_value, json_type, made_up, place
from wording import loosen
from words import NOUNS

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
        spec["description"] = (
            about  # only the description tells "San Francisco" from "San Francisco, CA"
        )
    return spec


# Kinds whose values may be any words: nothing may follow them without a mark.
OPEN = {
    "topic",
    "task",
    "message",
    "phrase",
    "title",
    "item",
    "food",
    "noun",
    "hobby",
    "job",
    "genre",
    "room",
}
AFTER = """ for me| today| right now| please| if you can| as soon as possible| so that I can plan| and tell me| this evening| again| later
 when you have time| because I need it| before dinner| and let me know| once more| after work| quickly| for my boss| and that is all
 or so| at once| thanks| okay| will you| can you| right away| next time| as always| like last time| and be quick| as we said""".replace(
    "\n", "|"
).split("|")


def closed(d: Draw, tool: Tool, ask: str) -> str:
    """In training, let words follow a value whose end cannot be mistaken."""
    bare = ask.rstrip(".?!")
    if d.held_out or not bare.endswith("}") or d.chance(0.6):
        return ask
    last = bare[bare.rindex("{") + 1 : -1]
    kinds = {p.split(":")[0].split("/")[0]: p.split(":")[1].split("=")[0] for p in tool.params}
    return (
        ask
        if kinds.get(last) in OPEN
        else bare + d.any(AFTER) + d.any([".", "", "?" if "?" in ask else "."])
    )


def wish_for(d: Draw, tool: Tool, taken: set[str]) -> Wish | None:
    """Draw names, a sentence and values for a listed tool; None when its name is taken."""
    name = d.any(tool.names)
    if name in taken:
        return None
    ask = closed(d, tool, d.pattern(tool.asks, drop=False))
    if not d.held_out and tool in TOOLS and d.chance(0.45):
        made = combo(d.rng, TOOLS.index(tool))
        ask = made if made and not d.is_kept(tool.asks, made) else ask
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
    if len(set(words.values())) < len(words):
        return None
    text = ask.format(**words)
    if d.chance(0.08) and ask[0] != "{":
        text = text[0].lower() + text[1:].rstrip(".?")
    return Wish(Offer(name, d.any(tool.about), params, required), text, arguments)


def made_name(d: Draw) -> tuple[str, str]:
    """A verb and a thing; one pair in ten is kept for evaluation."""
    while True:
        verb, thing = d.any(VERBS), d.any(THINGS)
        if (checksum(f"{verb}_{thing}") % 10 == 0) == d.held_out:
            return verb, thing


MADE_ASKS = [
    "{V} the {t} {p}.",
    "{V} a {t} {p}.",
    "{V} a {t} {p}",
    "{V} the {t}: {p}.",
    "{V} {t} {p}",
    "{V} {t}, {p}",
    "Please {v} the {t} {p}.",
    "Please {v} a {t} {p}.",
    "Can you {v} a {t} {p}?",
    "Can you {v} the {t} {p}?",
    "Could you please {v} the {t} {p}?",
    "I want to {v} a {t} {p}.",
    "I would like to {v} the {t} {p}.",
    "I need you to {v} the {t} {p}.",
    "I need to {v} a {t} {p}.",
    "Let's {v} a {t} {p}.",
    "{V} my {t} {p}.",
    "{V} our {t} {p}, please.",
    "We have to {v} a {t} {p}.",
    "Would you {v} a {t} {p} for me?",
    "Go and {v} the {t} {p}.",
    "Time to {v} the {t} {p}.",
    "Help me {v} a {t} {p}.",
    "{V} one {t} {p}.",
    "{v} the {t} {p} now",
    "My wish: {v} a {t} {p}.",
]
ASPECT_ASKS = [
    "What is the {a} of the {t} {p}?",
    "Tell me the {a} of the {t} {p}.",
    "Show me the {a} of the {t} {p}.",
    "{t} {a} {p}",
    "What's the {a} of my {t} {p}?",
    "Give me the {a} of the {t} {p}.",
    "I need the {a} of a {t} {p}.",
    "Look up the {a} of the {t} {p}.",
    "Can you check the {a} of the {t} {p}?",
    "Do you know the {a} of the {t} {p}?",
    "Which {a} does the {t} {p} have?",
    "Get the {t} {a} {p}.",
    "Find out the {a} of the {t} {p}.",
    "I would like to know the {a} of our {t} {p}.",
]
ASPECT_NAMES = [
    "get_{t}_{a}",
    "{t}_{a}",
    "get_{a}",
    "find_{t}_{a}",
    "lookup_{t}_{a}",
    "get{T}{A}",
    "fetch_{t}_{a}",
    "check_{t}_{a}",
]
JOINS = [", ", " and ", " "]


def spoken_of(
    d: Draw, thing: str, params: dict[str, Spec], arguments: dict[str, object], count: int
) -> str:
    """Draw parameters and values into the two dicts; the clauses that say the values, in any order."""
    said = []
    for option in d.some(EXTRAS, count):
        key = word = d.any(option.names)
        about = f"The {key.replace('_', ' ')}" if d.chance(0.5) else ""
        if d.chance(0.25):
            key = f"{thing}_{key}"
        elif d.chance(0.06):
            key, about = (
                d.any(["x", "y", "p1", "p2", "arg", "value", "input", "field", "data"]),
                f"The {word.replace('_', ' ')}",
            )
        if key in params:
            continue
        params[key] = schema_of(d, option.kind, about)
        if about and key != word and not key.startswith(thing):
            params[key]["description"] = about
        spoken = word.replace("_", " ") if d.chance(0.85) else word
        if said and d.chance(0.35):
            continue
        word, arguments[key] = draw_value(d, option.kind)
        form = d.any(option.says)
        if " " in word and "{k}" in form:
            form = form.replace("{v}", '"{v}"')
        said.append(form.format(k=spoken, v=word))
    if not said:
        return ""
    d.rng.shuffle(said)
    tail = (d.any(JOINS) if len(said) > 1 else "") + said[-1]
    return ", ".join(said[:-1]) + tail if d.chance(0.5) else " ".join(said)


def named(d: Draw, verb: str, thing: str) -> tuple[str, str, str]:
    """(tool name, description, sentence with {p}) for an action on a thing or a question about it."""
    if d.chance(0.3):
        aspect = d.any(ASPECTS)
        form = d.any(ASPECT_NAMES)
        name = form.format(t=thing, a=aspect, T=thing.capitalize(), A=aspect.capitalize())
        about = d.any(
            ["Get the {a} of a {t}", "Look up the {a} of a {t}", "Returns the {a} of the {t}"]
        ).format(a=aspect, t=thing)
        return (
            name,
            about,
            d.pattern(ASPECT_ASKS, drop=False).replace("{a}", aspect).replace("{t}", thing),
        )
    word = d.any(VERB_WORDS.get(verb, [verb])) if d.chance(0.5) else verb
    name = d.any(
        [f"{verb}_{thing}", f"{verb}_{thing}", f"{thing}_{verb}", f"{verb}{thing.capitalize()}"]
    )
    about = d.any(
        ["{V} a {t}", "{V} the {t}", "{V} a {t} in the system", "Used to {v} a {t}", "{V}s a {t}"]
    )
    ask = (
        d.pattern(MADE_ASKS, drop=False)
        .replace("{V}", word[0].upper() + word[1:])
        .replace("{v}", word)
        .replace("{t}", thing)
    )
    return name, about.format(V=verb.capitalize(), v=verb, t=thing), ask


def made_wish(d: Draw, taken: set[str]) -> Wish | None:
    """A tool made up on the spot, so that the schema has to be read."""
    verb, thing = made_name(d)
    form = 1.0 if d.held_out else d.rng.random()
    if form < 0.2:
        thing = made_up(d).lower()
    elif form < 0.5:
        thing = d.value(NOUNS)
    if form < 0.1:
        verb = made_up(d).lower()
    name, about, ask = named(d, verb, thing)
    if 0.9 < form < 1.0:  # only the description says what it does
        name = (
            d.any(["tool", "do", "run", "call", "helper", "action", "service", "api"])
            + d.any(["_", ""])
            + d.any([str(d.int(1, 9)), d.value(NOUNS)])
        )
    if name in taken:
        return None
    params: dict[str, Spec] = {}
    arguments: dict[str, object] = {}
    said = spoken_of(d, thing, params, arguments, d.int(1, 5))
    text = ask.replace("{p}", said) if "{p}" in ask else f"{ask} {said}"
    required = [k for k in arguments if d.chance(0.8)]
    return Wish(Offer(name, about, params, required), text, arguments)


DIRECT_VERBS = """hire invite call ask meet greet thank follow visit watch read write bring fetch buy sell praise warn help teach paint wash cook
draw explain define describe google ping email notify alert book tag mark hide show print burn freeze melt lift drop throw catch pull push carry
feed walk pay bill charge refund promote fire train coach guide block mute ban admit welcome seat serve drive fly rent lend borrow return swap
test probe trace map chart rate rank grade score judge vote pick choose order track trust find text message contact phone add remove""".split()
DIRECT_KINDS = {
    "name",
    "full_name",
    "city",
    "noun",
    "item",
    "food",
    "company",
    "topic",
    "code",
    "title",
    "country",
    "email",
    "job",
    "room",
}
DIRECT = [e for e in EXTRAS if e.kind in DIRECT_KINDS]
DIRECT_ASKS = ["{V} {x}", "{V} {x}", "Please {v} {x}", "Can you {v} {x}", "I want to {v} {x}", "Could you {v} {x}", "{v} {x}", "Go and {v} {x}", "We should {v} {x}",
               "I need to {v} {x}", "{V} my {x}", "{V} the {x}", "Let us {v} {x}", "Now {v} {x}", "{V} {x} for me", "Somebody must {v} {x}"]  # fmt: skip
DIRECT_ENDS = [
    "",
    "",
    "",
    "",
    " for the {n}",
    " to the {n}",
    " at the {n}",
    " because of the {n}",
    " and nothing else",
    " for me",
    " in the {n}",
    " of the {n}",
]


def direct_wish(d: Draw, taken: set[str]) -> Wish | None:
    """A made-up tool whose verb stands right before its main value: "Hire Kate as a nurse"."""
    verb = made_up(d).lower() if d.chance(0.1) else d.any(DIRECT_VERBS)
    main = d.any(DIRECT)
    key = d.any(main.names)
    name = d.any(
        [
            f"{verb}_{key}",
            f"{verb}_{d.value(NOUNS)}",
            f"{verb}_tool",
            verb,
            f"do_{verb}",
            f"{key}_{verb}",
        ]
    )
    if name in taken:
        return None
    word, value = draw_value(d, main.kind)
    params: dict[str, Spec] = {
        key: schema_of(d, main.kind, f"Whom or what to {verb}" if d.chance(0.4) else "")
    }
    arguments: dict[str, object] = {key: value}
    rest = spoken_of(d, verb, params, arguments, d.int(1, 3)) if d.chance(0.75) else ""
    if len({str(v) for v in arguments.values()}) < len(arguments):
        return None
    text = d.any(DIRECT_ASKS).format(V=verb.capitalize(), v=verb, x=word)
    text += (
        d.any(DIRECT_ENDS).format(n=d.any(THINGS))
        if main.kind in ("name", "full_name", "city", "code", "email")
        else ""
    )
    text += (" " if rest else "") + rest + d.any([".", "", ".", "!", "?"])
    about = d.any(
        ["{V} someone or something", "Used to {v}", "{V} a {k}", "Lets you {v} a {k}", "{V}"]
    ).format(V=verb.capitalize(), v=verb, k=key.replace("_", " "))
    return Wish(
        Offer(name, about, params, [k for k in arguments if d.chance(0.8)]), text, arguments
    )


def any_wish(d: Draw, taken: set[str], pool: list[Tool] | None = None) -> Wish:
    while True:
        if pool is None and d.chance(0.3 if d.held_out else 0.45):
            wish = (
                direct_wish(d, taken) if not d.held_out and d.chance(0.35) else made_wish(d, taken)
            )
        else:
            wish = wish_for(d, d.any(pool or TOOLS), taken)
        if wish is not None:
            return wish


def related(a: Wish, b: Wish) -> bool:
    """Whether two tools could answer the same sentence."""
    x, y = set(re.split(r"[_]", a.offer.name.lower())), set(re.split(r"[_]", b.offer.name.lower()))
    return (
        bool(x & y)
        or a.offer.about == b.offer.about
        or set(FAMILY.get(a.offer.name, ())) & set(FAMILY.get(b.offer.name, ())) != set()
    )


# Tools that would be fair answers to each other's sentences are never offered together.
_CLOSE = [
    (0, 1, 2),
    (3, 4),
    (5, 6),
    (12, 13, 14, 15),
    (16, 33, 34),
    (17, 18, 19),
    (21, 22),
    (7, 27, 37),
    (28, 37, 38),
    (29, 35, 40),
]
FAMILY: dict[str, set[int]] = {}
for _i, _tool in enumerate(TOOLS):
    for _name in _tool.names:
        FAMILY.setdefault(_name, set()).update(
            {100 + _i} | {g for g, c in enumerate(_CLOSE) if _i in c}
        )


# Sums, translations, searches and the like have other answers when no tool is there.
NOT_ASKED = {100 + i for i in (7, 8, 9, 10, 20, 27, 29, 32, 33, 34)}


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
    ("weather", "{a} and {b}: what is the weather?"),
    ("weather", "Tell me the weather in {a} and also in {b}."),
    ("weather", "Is it warmer in {a} or in {b}?"),
    ("weather", "Which city has better weather, {a} or {b}?"),
    ("weather", "I need the weather of {a} and {b}."),
    ("weather", "Check the weather for both {a} and {b}."),
    ("weather", "Compare {a} with {b}: how is the weather?"),
    ("weather", "What is the weather like in {a}, and what about {b}?"),
    ("weather", "weather {a} {b}"),
    ("time", "What is the time in {a} and {b} right now?"),
    ("time", "Compare the time in {a} with the time in {b}."),
    ("time", "Compare the clocks of {a} and {b}."),
    ("time", "How late is it in {a} and {b}?"),
    ("time", "Is it later in {a} or in {b}?"),
    ("time", "time in {a} and {b}"),
]


def parallel_call(d: Draw) -> Chat:
    """Two calls of one tool in one turn."""
    kind, ask = d.phrase(PAIR_ASKS)
    if not d.held_out:
        ask = loosen(d.rng, ask)
    tool = TOOLS[0] if kind == "weather" else TOOLS[3]
    first = wish_for(d, Tool(tool.names, tool.about, tool.params[:1], ["{city}"]), set())
    assert first is not None
    key = next(iter(first.offer.params))
    a, b = place(d), place(d)
    wishes = [Wish(first.offer, "", {key: city}) for city in (a, b)]
    chat = Chat(
        [{"role": "user", "content": ask.format(a=a, b=b)}],
        "",
        think_of(wishes),
        [call_of(w) for w in wishes],
    )
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
    why = d.any(
        [
            "not found",
            "timeout",
            "permission denied",
            "service unavailable",
            "invalid argument",
            "rate limit reached",
        ]
    )
    said = d.any(
        [
            "The call failed: {w}.",
            "I could not do that. The tool says: {w}.",
            "Sorry, {n} failed: {w}.",
        ]
    )
    return {"error": why}, said.format(w=why, n=wish.offer.name)


def plain_result(d: Draw, wish: Wish) -> tuple[object, str]:
    """A result of a few named values, read back."""
    word, value = draw_value(
        d, d.any(["number", "code", "name", "price", "date", "clock", "title", "small"])
    )
    key = d.any(
        [
            "result",
            "value",
            "answer",
            "id",
            "status",
            "total",
            "price",
            "time",
            "number",
            "code",
            "date",
        ]
    )
    if d.chance(0.2):
        return str(word), d.any(
            [f"The result is {word}.", f"It is {word}.", f"The answer is {word}."]
        )
    label = {"result": "The result is", "answer": "The answer is"}.get(key, f"The {key} is")
    if d.chance(0.35):
        other, second = draw_value(d, d.any(["number", "name", "clock", "date"]))
        extra = d.any(["owner", "count", "end", "name", "start", "sender"])
        return {key: value, extra: second}, f"{label} {word} and the {extra} is {other}."
    return {key: value}, f"{label} {word}."


def done_result(d: Draw, wish: Wish) -> tuple[object, str]:
    ok = d.any(
        [
            {"status": "ok"},
            {"success": True},
            {"status": "success"},
            {"result": "done"},
            "ok",
            "done",
        ]
    )
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


NO_TOOL = [
    "I have no tool for that here.",
    "I cannot do that without a tool.",
    "I would need a tool for that, and none was given to me.",
    "Sorry, I have no tool that could do that.",
]


def no_tool(d: Draw) -> Chat:
    """A wish for an action with no tools on offer."""
    while True:
        wish = any_wish(d, set())
        if not FAMILY.get(wish.offer.name, set()) & NOT_ASKED:
            break
    return Chat(
        [{"role": "user", "content": wish.text}],
        d.any(NO_TOOL),
        d.any(["No tools are offered.", "There is no tool for this."]),
    )


def idle_tools(d: Draw) -> list[Message]:
    """Tools that have nothing to do with a chat about capitals, numbers or people."""
    specs, taken = [], set()
    while len(specs) < d.int(1, 3):
        wish = (
            made_wish(d, taken)
            if d.chance(0.6)
            else wish_for(d, d.any(TOOLS[:6] + TOOLS[11:27]), taken)
        )
        if wish is not None and wish.offer.name not in taken:
            taken.add(wish.offer.name)
            specs.append(wish.offer.spec(d))
    return specs
