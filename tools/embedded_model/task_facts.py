"""Capitals of countries, in both directions and two languages, and which continent a country is on."""

from chat_format import Chat
from countries import ALIASES, COUNTRIES, NOTES, Country
from draw import Draw

ASK = [
    "What is the capital of {c}?",
    "What's the capital of {c}?",
    "what is the capital of {c}",
    "whats the capital of {c}?",
    "Capital of {c}?",
    "capital of {c}",
    "The capital of {c} is?",
    "Name the capital of {c}.",
    "Tell me the capital of {c}.",
    "Which city is the capital of {c}?",
    "What city is the capital of {c}?",
    "Do you know the capital of {c}?",
    "Can you tell me the capital of {c}?",
    "Could you tell me what the capital of {c} is?",
    "Please name the capital city of {c}.",
    "What is the capital city of {c}?",
    "What is {p} capital?",
    "What is {p} capital city?",
    "I'd like to know the capital of {c}.",
    "I forgot the capital of {c}. Which city is it?",
    "Quick quiz: capital of {c}?",
    "Geography question: what is the capital of {c}?",
    "Which city serves as the capital of {c}?",
    "In which city is the government of {c}? I mean the capital.",
    "Give me the capital of {c}.",
    "Hey, what's the capital city of {c}?",
    "I am planning a trip to {c}. What is its capital?",
    "Where is the capital of {c}, which city?",
    "For my homework: what is the capital of {c}?",
    "Hello! Do you happen to know the capital of {c}?",
    "{c}: what is the capital?",
    "Say the capital of {c}, please.",
    "What would be the capital of {c}?",
    "If I travel to the capital of {c}, which city do I visit?",
    "Name {p} capital city.",
    "Tell me which city is the capital of {c}.",
    "My daughter asks for the capital of {c}.",
    "Let's talk about {c}. What is its capital?",
    "Which is the capital of {c}?",
    "Remind me, what is the capital of {c}?",
]
ASK_ZH = [
    "要去{c}的首都，应该去哪个城市？",
    "我要去{c}的首都，那是哪里？",
    "{c}的政府在哪个首都？",
    "{c}，首都是？",
    "首都：{c}",
    "{c}的首都是___",
    "我忘了{c}的首都是哪里。",
    "老师问{c}的首都是哪里。",
    "写出{c}的首都。",
    "{c}的首都城市叫什么？",
    "可以告诉我{c}的首都吗？",
    "能说说{c}的首都吗？",
    "你知道{c}首都在哪里吗？",
    "哪一个城市是{c}的首都？",
    "查一下{c}的首都。",
    "回答：{c}的首都是什么？",
    "地理题：{c}的首都是哪里？",
    "说一下{c}的首都",
    "{c}以哪个城市为首都？",
    "{c}的首都位于哪里？",
    "{c}的首都在哪里？",
    "{c}的首都在哪儿",
    "{c}的首都是哪个城市？",
    "{c}的首都城市是？",
    "{c}的首都",
    "{c}的首都是哪一个？",
    "哪座城市是{c}的首都？",
    "什么城市是{c}的首都？",
    "哪里是{c}的首都？",
    "{c}这个国家的首都是哪里？",
    "国家：{c}。首都是哪里？",
    "作为首都，{c}选了哪个城市？",
    "说出{c}的首都。",
    "请说出{c}首都的名字。",
    "{c}首都叫什么名字？",
    "{c}有哪个首都？",
    "去{c}的首都要到哪个城市？",
    "{c}的首都是哪里？",
    "{c}的首都是什么？",
    "{c}首都是哪里",
    "{c}的首都是哪座城市？",
    "请问{c}的首都是哪里？",
    "你知道{c}的首都吗？",
    "哪个城市是{c}的首都？",
    "告诉我{c}的首都。",
    "{c}的首都叫什么？",
    "我想知道{c}的首都是哪里。",
]
ZH_LEADS = [
    "",
    "请问",
    "请告诉我，",
    "我想问一下，",
    "问题：",
    "你好，",
    "快问快答：",
    "那么，",
    "麻烦问一下，",
    "我忘了，",
]
ZH_TAILS = ["", "？", "?", "呢？", "啊？", "，谢谢。", "？请回答。", "？你知道吗？"]
ANSWERS = [
    "The capital of {c} is {k}.",
    "The capital of {c} is {k}.",
    "{k} is the capital of {c}.",
    "{k}.",
    "It is {k}.",
]
ANSWERS_ZH = ["{c}的首都是{k}。", "{c}的首都是{k}。", "是{k}。"]
THINK = ["{c}: the capital is {k}.", "The capital of {c} is {k}.", "{c} -> {k}"]


# Ways to say "the capital of a country", and frames around it: training draws every pairing of the two.
NAMED = ["the capital of {c}", "the capital of {c}", "the capital city of {c}", "{p} capital", "{p} capital city", "capital of {c}",
         "the capital city in {c}", "the capital for {c}", "the capital city for {c}", "the city that is the capital of {c}"]  # fmt: skip
FRAMES = ["What is {x}?", "{x}?", "{x}", "What's {x}?", "Name {x}.", "Tell me {x}.", "I need {x}.", "Do you know {x}?", "Which city is {x}?",
          "Give me {x}.", "Please tell me {x}.", "Can you name {x}?", "I want to know {x}.", "I am looking for {x}.", "What do you call {x}?",
          "Write {x}.", "Look up {x}.", "Remind me of {x}.", "What is {x} called?", "How is {x} called?", "Identify {x}.", "Find {x}.",
          "My question is about {x}.", "Please answer: {x}?", "Quiz: {x}?", "Which place is {x}?", "{x} is", "{x} is?", "{x} please", "{x}, please.",
          "Any idea what {x} is?", "Do you happen to know {x}?", "Which town is {x}?", "State {x}.", "What city would {x} be?", "{x} is called what?",
          "Let me know {x}.", "Help me find {x}.", "I must learn {x}. What is it?", "Someone asked me for {x}.", "Is there a name for {x}?"]  # fmt: skip
OPENINGS = ["{c}: capital?", "{c} capital", "{c}, capital?", "{c} has which capital?", "For {c}, what is the capital?", "Country: {c}. Capital?",
            "In {c}, which city is the capital?", "{c} - its capital?", "{c} is governed from which city?", "Which capital does {c} have?",
            "What capital does {c} have?", "Which capital belongs to {c}?", "Does {c} have a capital? Which one?", "Capital? Country is {c}."]  # fmt: skip


def capital_pattern(d: Draw) -> str:
    """A question with {c} or {p}; the evaluation side keeps to its plain patterns."""
    form = d.rng.random()
    if d.held_out or form < 0.4:
        return d.pattern(ASK)
    if form < 0.55:
        return d.any(OPENINGS)
    text = d.pattern(FRAMES).replace("{x}", d.any(NAMED))
    if d.is_kept(ASK, text):
        return capital_pattern(d)
    return text[0].upper() + text[1:] if d.chance(0.6) else text


def possessive(name: str) -> str:
    return name + ("'" if name.endswith("s") else "'s")


def ask_capital(d: Draw, country: Country, name: str) -> Chat:
    """Ask for one country under one of its names."""
    form = capital_pattern(d)
    shown = name[0].upper() + name[1:] if form.startswith("{c}") else name
    text = form.format(c=shown, p=possessive(name))
    if d.chance(0.12):
        text = text.lower()
    answer = d.any(ANSWERS).format(c=name, k=country.capital)
    if country.name in NOTES and d.chance(0.5):
        answer = f"The capital of {name} is {country.capital}. {NOTES[country.name]}"
    think = d.any(THINK).format(c=name[0].upper() + name[1:], k=country.capital)
    if think.startswith("The capital"):
        think = f"The capital of {name} is {country.capital}."
    return Chat(
        [{"role": "user", "content": text}],
        answer.replace(".C..", ".C."),
        think.replace(".C..", ".C."),
    )


def capital(d: Draw) -> Chat:
    country = d.any(COUNTRIES)
    names = [country.name] * 3 + ALIASES.get(country.name, [])
    return ask_capital(d, country, d.any(names))


def capital_zh(d: Draw, country: Country | None = None) -> Chat:
    country = country or d.any(COUNTRIES)
    text = d.phrase(ASK_ZH)
    if not d.held_out and d.chance(0.4):
        text = d.any(ZH_LEADS) + text.rstrip("？。") + d.any(ZH_TAILS)
    text = text.format(c=country.zh)
    answer = d.any(ANSWERS_ZH).format(c=country.zh, k=country.zh_capital)
    return Chat(
        [{"role": "user", "content": text}], answer, f"{country.zh}的首都是{country.zh_capital}。"
    )


REVERSE = [
    "{k} is the capital of which country?",
    "Which country has {k} as its capital?",
    "What country is {k} the capital of?",
    "Of which country is {k} the capital?",
    "In which country is {k}?",
    "Where is {k}?",
    "Which country is {k} in?",
    "{k} is in which country?",
    "Name the country whose capital is {k}.",
]


def reverse(d: Draw) -> Chat:
    country = d.any(COUNTRIES)
    if country.capital == country.name or country.capital in ("Georgetown", "Kingston", "Victoria"):
        return capital(d)
    form = d.pattern(REVERSE, drop=False)
    where = f"{country.capital} is the capital of {country.name}."
    answer = where
    if "in" in form.split() or "Where" in form:
        answer = d.any([where, f"{country.capital} is in {country.name}."])
    return Chat([{"role": "user", "content": form.format(k=country.capital)}], answer, where)


CONTINENT = [
    "Which continent is {c} on?",
    "What continent is {c} in?",
    "On which continent is {c}?",
    "Where is {c}?",
    "Where in the world is {c}?",
    "Is {c} in Asia?",
    "Is {c} in Africa?",
    "Is {c} in Europe?",
    "Tell me the continent of {c}.",
]


def continent(d: Draw) -> Chat:
    country = d.any(COUNTRIES)
    form = d.phrase(CONTINENT)
    shown = country.name[0].upper() + country.name[1:]
    answer = f"{shown} is in {country.continent}."
    if form.startswith("Is"):
        yes = country.continent in form
        answer = ("Yes, " if yes else "No, ") + f"{country.name} is in {country.continent}."
    think = f"{shown} is in {country.continent}."
    return Chat([{"role": "user", "content": form.format(c=country.name)}], answer, think)


SHORT_RULES = [
    ("Answer in one word.", "{k}"),
    ("Reply with only the answer, nothing else.", "{k}"),
    ("Give one-word answers.", "{k}"),
    ("Be as brief as possible.", "{k}."),
    ("Answer with the name of the city only.", "{k}"),
    ("Use only capital letters.", "{u}."),
    ("Write everything in upper case.", "{u}."),
    ("Always end your answer with an exclamation mark.", "The capital of {c} is {k}!"),
    ("Start every answer with the word Sure.", "Sure, the capital of {c} is {k}."),
    ("Answer in full sentences.", "The capital of {c} is {k}."),
    ("请用中文回答。", "{z}的首都是{zk}。"),
    ("Answer in Chinese.", "{z}的首都是{zk}。"),
    ("Put your answer in square brackets.", "[{k}]"),
]


def capital_with_rule(d: Draw) -> Chat:
    """A system prompt that says how to answer."""
    country = d.any(COUNTRIES)
    rule, form = d.any(SHORT_RULES)
    chat = ask_capital(d, country, country.name)
    values = {"c": country.name, "k": country.capital, "z": country.zh, "zk": country.zh_capital}
    values["u"] = country.capital.upper()
    chat.answer = form.format(**values)
    lead = d.any(["", "", "You are a helpful assistant. "])
    if d.chance(0.75):
        chat.messages.insert(0, {"role": "system", "content": lead + rule})
    else:
        chat.messages[-1]["content"] += " " + rule
    chat.plain = False
    return chat
