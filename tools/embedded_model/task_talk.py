"""Conversation: who the model is, names it was told, small talk, things it knows and things it does not."""

from chat_format import Chat, Message
from draw import Draw
from talk_items import (
    CHINESE,
    DEFINITIONS,
    ESSAY_TOPICS,
    FACTS,
    IDENTITY,
    JOKES,
    LISTS,
    OPPOSITES,
    POEMS,
    SMALL_TALK,
    UNKNOWN_ANSWERS,
    UNKNOWN_ASKS,
)
from values import draw_value, made_up, name, rare
from words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    FOODS,
    HOBBIES,
    JOBS,
    NOUNS,
    PET_NAMES,
    TOPICS,
)

Item = tuple[list[str], list[str]]


def parse(block: str) -> list[Item]:
    """Read lines `question / question => answer / answer`."""
    out = []
    for line in block.strip().splitlines():
        asks, _, answers = line.partition(" => ")
        out.append((asks.split(" / "), answers.split(" / ")))
    return out


_PARSED = {key: parse(block) for key, block in
           {"identity": IDENTITY, "small": SMALL_TALK, "facts": FACTS, "zh": CHINESE}.items()}  # fmt: skip


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def loosen(d: Draw, text: str) -> str:
    """Type a sentence the way people do: sometimes without capital letter or full stop."""
    form = d.rng.random()
    if form < 0.1:
        return text.lower()
    if form < 0.2:
        return text.rstrip(".?!")
    if form < 0.24:
        return text.lower().rstrip(".?!")
    return text


def short_think(d: Draw, text: str, answer: str) -> str:
    """A trace for questions that need none."""
    if len(answer) < 60:
        return answer
    return answer.split(". ")[0].rstrip(".") + "."


def from_items(d: Draw, items: list[Item], think: list[str] | None = None) -> Chat:
    asks, answers = d.any(items)
    text, answer = d.pattern(asks), d.any(answers)
    why = d.any(think) if think else short_think(d, text, answer)
    text = text if d.held_out else loosen(d, text)
    return Chat(
        user(
            asks[0]
            if not d.held_out and d.is_kept(asks, text) and not d.is_kept(asks, asks[0])
            else text
        ),
        answer,
        why,
    )


WHO = [
    "The user asks about me. I am Quill.",
    "A question about me.",
    "I am Quill, a small model that ships with quire.",
]
CHAT = [
    "Small talk. A short friendly answer.",
    "The user is chatting.",
    "A short, friendly reply will do.",
]
ZH_THINK = ["用户在说中文，我用中文简短回答。", "我用中文回答。"]


def identity(d: Draw) -> Chat:
    return from_items(d, _PARSED["identity"], WHO)


def small_talk(d: Draw) -> Chat:
    return from_items(d, _PARSED["small"], CHAT)


def facts(d: Draw) -> Chat:
    return from_items(d, _PARSED["facts"])


def chinese(d: Draw) -> Chat:
    return from_items(d, _PARSED["zh"], ZH_THINK)


TELL_NAME = [
    "Hello, I am called {n}.",
    "I am called {n}.",
    "{n} is my name.",
    "The name is {n}.",
    "It's {n}.",
    "This is {n}.",
    "{n} here, hello!",
    "Hi Quill, it is {n} again.",
    "My friends call me {n}.",
    "You are talking to {n}.",
    "I would like to introduce myself. I am {n}.",
    "Hello. My name is {n} and I am from {c}.",
    "I am {n} from {c}, and I love {h}.",
    "Before we start: my name is {n}.",
    "Just so you know, I am {n}.",
    "Note my name: {n}.",
    "Hi, my name is {n}.",
    "Hello! I'm {n}.",
    "My name is {n}.",
    "I am {n}.",
    "Hey, {n} here.",
    "Hi there, I am {n}. Nice to meet you.",
    "You can call me {n}.",
    "Please call me {n}.",
    "Good morning, I'm {n}.",
    "Hello, this is {n} speaking.",
    "Hi! I'm {n} and I live in {c}.",
    "My name's {n}. I work as a {j}.",
    "My name is {n} and I like {h}.",
    "Let me introduce myself: {n}, from {c}.",
    "People call me {n}.",
    "I'm {n}, a {j} from {c}.",
    "Remember that my name is {n}.",
    "Hello Quill, I am {n}.",
    "I go by {n}.",
    "你好，我叫{n}。",
    "我的名字是{n}。",
]
GREET = [
    "Hello {n}, nice to meet you!",
    "Hi {n}! How can I help you?",
    "Nice to meet you, {n}. What can I do for you?",
    "Welcome, {n}!",
    "Hello, {n}!",
    "Good to meet you, {n}.",
]
GREET_ZH = ["你好，{n}！很高兴认识你。", "{n}，你好！有什么可以帮你？"]
ASK_NAME = [
    "How do people call me?",
    "What do you call me?",
    "What should you call me?",
    "How should you call me?",
    "Repeat my name.",
    "Write my name.",
    "Can you repeat my name, please?",
    "Could you say my name?",
    "Which name do I have?",
    "What name did I tell you?",
    "Who did I say I am?",
    "Who is talking to you?",
    "Tell me who I am.",
    "I forgot my own name. What is it?",
    "Is my name still known to you?",
    "My name is?",
    "What was my name?",
    "Under which name do you know me?",
    "By what name am I called?",
    "Do you recall my name?",
    "You know my name, right? What is it?",
    "Test: what is my name?",
    "What is my name?",
    "What's my name?",
    "what is my name",
    "Do you remember my name?",
    "Can you tell me my name?",
    "Who am I?",
    "What did I say my name was?",
    "Do you know my name?",
    "Tell me my name.",
    "What am I called?",
    "Say my name.",
    "Which name did I give you?",
    "Do you still know what I am called?",
    "And what was my name again?",
    "How am I called?",
    "Please repeat my name.",
    "Remind me, what is my name?",
    "我叫什么名字？",
    "你还记得我的名字吗？",
]
ASK_NAME_EN = ASK_NAME[:-2]
SAY_NAME = [
    "Your name is {n}.",
    "Your name is {n}.",
    "You are {n}.",
    "You told me that your name is {n}.",
]
SAY_ZH = ["你叫{n}。", "你的名字是{n}。"]
NO_NAME = ["You have not told me your name yet.", "I do not know your name. You have not told me yet.",
           "You did not tell me your name. What is it?"]  # fmt: skip


def filler(d: Draw) -> list[Message]:
    """One earlier exchange, answered without a trace as history shows it."""
    from mixture import short_exchange

    chat = short_exchange(d)
    return [*chat.messages, {"role": "assistant", "content": chat.answer}]


def introduction(d: Draw) -> tuple[str, list[Message]]:
    who = name(d)
    tell = d.pattern(TELL_NAME, drop=False)
    text = tell.format(n=who, c=d.value(CITIES), j=d.value(JOBS), h=d.value(HOBBIES))
    greet = d.any(GREET_ZH if "我" in tell else GREET).format(n=who)
    return who, [*user(text), {"role": "assistant", "content": greet}]


def name_recall(d: Draw) -> Chat:
    """The user gives a name, talks of other things and asks for the name."""
    who, messages = introduction(d)
    for _ in range(d.any([0, 0, 1, 1, 2, 3, 4])):
        messages += filler(d)
    ask = d.pattern(ASK_NAME, drop=False)
    answer = d.any(SAY_ZH if "名" in ask else SAY_NAME).format(n=who)
    return Chat([*messages, *user(ask)], answer, f"The user said: {who}.", plain=False)


def greeting_by_name(d: Draw) -> Chat:
    who, messages = introduction(d)
    return Chat(messages[:1], str(messages[1]["content"]), f"The user is {who}.")


def no_name(d: Draw) -> Chat:
    messages: list[Message] = []
    for _ in range(d.int(0, 2)):
        messages += filler(d)
    ask = d.pattern(ASK_NAME_EN, drop=False)
    return Chat(
        [*messages, *user(ask)], d.any(NO_NAME), "The user gave no name so far.", plain=False
    )


# (what the user says, what they ask later, the answer, kind of value)
MEMORIES = [
    (
        "My favourite colour is {v}.",
        "What is my favourite colour?",
        "Your favourite colour is {v}.",
        COLOURS,
    ),
    ("I like the color {v} most.", "Which color do I like most?", "You like {v} most.", COLOURS),
    ("I have a dog called {v}.", "What is my dog called?", "Your dog is called {v}.", PET_NAMES),
    ("My cat's name is {v}.", "What is the name of my cat?", "Your cat is called {v}.", PET_NAMES),
    ("I live in {v}.", "Where do I live?", "You live in {v}.", CITIES),
    ("I was born in {v}.", "Where was I born?", "You were born in {v}.", CITIES),
    ("I work as a {v}.", "What is my job?", "You work as a {v}.", JOBS),
    ("I am a {v} by trade.", "What do I do for a living?", "You are a {v}.", JOBS),
    ("My hobby is {v}.", "What is my hobby?", "Your hobby is {v}.", HOBBIES),
    ("I had {v} for lunch.", "What did I have for lunch?", "You had {v} for lunch.", FOODS),
    ("The secret word is {v}.", "What is the secret word?", "The secret word is {v}.", NOUNS),
    (
        "Remember this word: {v}.",
        "Which word did I ask you to remember?",
        "The word is {v}.",
        NOUNS,
    ),
    ("I own a {v}.", "Which animal do I own?", "You own a {v}.", ANIMALS),
    ("I am reading about {v}.", "What am I reading about?", "You are reading about {v}.", TOPICS),
]
NOTED = [
    "Thank you, I will remember that.",
    "Good to know.",
    "Noted.",
    "Thanks for telling me!",
    "I see, {v}.",
    "Nice!",
]


def memory(d: Draw) -> Chat:
    """Something else than a name, told and asked for later."""
    tell, ask, say, words = d.any(MEMORIES)
    value = rare(d, d.value(words))
    messages: list[Message] = [
        *user(tell.format(v=value)),
        {"role": "assistant", "content": d.any(NOTED).format(v=value)},
    ]
    for _ in range(d.any([0, 0, 1, 2, 3])):
        messages += filler(d)
    return Chat(
        [*messages, *user(ask)], say.format(v=value), f"The user said: {value}.", plain=False
    )


DEFINE = [
    "What is {x}?",
    "Explain {x} in one sentence.",
    "What does {x} mean?",
    "Define {x}.",
    "Tell me about {x}.",
    "Can you explain {x}?",
    "Explain {x}.",
    "In one sentence, what is {x}?",
    "Give me a short explanation of {x}.",
    "What's {x}?",
    "Describe {x} briefly.",
    "I do not understand {x}. Can you help?",
    "Explain {x} to a child.",
    "Please tell me what {x} is.",
    "How would you explain {x}?",
    "what is {x}",
]
_DEFS = [tuple(line.split(" = ", 1)) for line in DEFINITIONS.strip().splitlines()]


def definition(d: Draw) -> Chat:
    term, meaning = d.any(_DEFS)
    return Chat(
        user(loosen(d, d.pattern(DEFINE).format(x=term))), meaning, f"The question is about {term}."
    )


WH = """How do I|How can I|Why should I|When will I|How would you|Where can I|Can you|Could you|Please|I want to|Teach me to|Is it hard to|What is the best way to|
Should I|Is it good to|Who can|Do people|How does one|What happens if I|Is it legal to|Why do people|How long does it take to|What do I need to""".replace(
    "\n", ""
).split("|")
ACTS = """swim|build|repair|grow|sell|find|paint|break|invent|steer|catch|feed|cook|bake|fly|draw|train|raise|melt|move|lift|hide|win|lose|marry|sue|
jump|dance|sail|climb|knit|shoot|hunt|chop|mix|weld|wire|clone|hack|translate|summarise|analyse|prove|solve|compose|film|photograph|design""".replace(
    "\n", ""
).split("|")
ABOUT = """What is the tallest {n} in the world?|What is the oldest {n}?|Which {n} is the fastest?|Who owns the {n}?|Who built the {n} in {c}?|Why is the {n} {a}?|
Give me a recipe for {f}.|How do you make {f}?|What is in {f}?|Is {f} healthy?|Where does {f} come from?|Why do {m}s sleep?|What do {m}s think?|Can a {m} swim?|
Describe the {n} of {c}.|What is the story of the {n}?|What is the price of a {n} in {c}?|Which shop in {c} sells a {n}?|Recommend a {n}.|Which {n} should I get?|
My {m} is ill. What now?|My {n} is broken.|Compare a {n} and a {m}.|What is the difference between a {n} and a {m}?|Plan my week in {c}.|Write my speech about the {n}.|
Who was the first person in {c}?|What is the best street in {c}?|Is {c} safe?|What can I see in {c}?|Which museum in {c} is best?|How old is {c}?|Who rules {c}?|
What is the longest {n}?|How much does a {m} weigh?|How many {n}s are in {c}?|Tell me all about {w}.|What is {w} good for?|Is {w} real?|What does {w} do?|
What is the capital of {w}?|Capital of {w}?|{w}: what is the capital?|Which city is the capital of {w}?|What is the meaning of {w}?|Say something about {w}.""".replace(
    "\n", ""
).split("|")


def puzzling(d: Draw) -> Chat:
    """Any question outside of what the model knows, so that not knowing is its answer to the unfamiliar."""
    n, m = rare(d, d.value(NOUNS)), d.any(ANIMALS)
    if d.chance(0.45):
        text = f"{d.any(WH)} {d.any(ACTS)} {d.any(['a', 'the', 'my', 'an old', 'some'])} {n}"
        text += d.any(
            ["", "", f" in {d.value(CITIES)}", " at home", f" with a {m}", " today"]
        ) + d.any(["?", "?", ".", ""])
    else:
        text = d.any(ABOUT).format(
            n=n,
            m=m,
            a=d.any(ADJECTIVES),
            c=d.value(CITIES),
            f=rare(d, d.value(FOODS)),
            w=made_up(d),
        )
    return Chat(
        user(loosen(d, text)),
        d.any(UNKNOWN_ANSWERS),
        d.any(["I do not know this.", "I have no knowledge of this.", "I am not sure about this."]),
    )


def unknown(d: Draw) -> Chat:
    """Questions beyond a small model; the answer says so."""
    if not d.held_out and d.chance(0.6):
        return puzzling(d)
    form = d.pattern(UNKNOWN_ASKS)
    year = d.int(1850, 2025)
    who = f"{made_up(d)} {made_up(d)}" if d.chance(0.4) else draw_value(d, "full_name")[0]
    text = form.format(
        w=made_up(d),
        p=who,
        y=year,
        c=d.value(CITIES),
        n=d.value(NOUNS),
        t=d.value(TOPICS),
        o=draw_value(d, "company")[0],
    )
    return Chat(
        user(loosen(d, text)),
        d.any(UNKNOWN_ANSWERS),
        d.any(["I do not know this.", "I have no knowledge of this.", "I am not sure about this."]),
    )


JOKE_ASKS = ["Tell me a joke.", "Tell me a joke", "Do you know a joke?", "Make me laugh.", "Say something funny.",
             "Can you tell me a joke?", "I need a good joke.", "Another joke, please.", "Joke please!", "Tell me something funny.",
             "Got any jokes?", "I am sad, tell me a joke."]  # fmt: skip


def joke(d: Draw) -> Chat:
    answer = d.any(JOKES.strip().splitlines())
    return Chat(
        user(loosen(d, d.pattern(JOKE_ASKS))),
        answer,
        d.any(["A short joke.", "The user wants a joke.", "Let me tell a joke."]),
    )


POEM_ASKS = ["Write a haiku about {x}.", "Write a haiku about {x}", "Haiku about {x}, please.", "Can you write a haiku on {x}?",
             "I want a haiku about {x}.", "Compose a haiku about {x}.", "Write a short poem about {x}.", "A poem about {x}, please.",
             "Give me a haiku about {x}.", "Please write a little poem on {x}."]  # fmt: skip
_POEMS = [tuple(line.split(" = ", 1)) for line in POEMS.strip().splitlines()]
GENERIC_POEM = ["{X} in the wind,\na small thought that comes and goes,\nquiet as the snow.", "Morning light on {x},\nthe day opens like a door,\nI stand still and look.",
                "I think of {x},\nof its silence and its song,\nand the night grows warm.", "Under the wide sky\n{x} waits without a word,\nevening comes near."]  # fmt: skip


def poem(d: Draw) -> Chat:
    if d.chance(0.5):
        topic, text = d.any(_POEMS)
        answer = text.replace(" / ", "\n")
    else:
        topic = "the " + d.value(NOUNS)
        answer = d.any(GENERIC_POEM).format(x=topic, X=topic[0].upper() + topic[1:])
    ask = d.pattern(POEM_ASKS).format(x=topic)
    if not d.held_out and d.chance(0.1):
        ask = d.any(["Write a haiku.", "Write a poem.", "Give me a haiku.", "Write a short poem."])
    return Chat(user(ask), answer, f"Three short lines about {topic}.")


ESSAY_ASKS = ["Write an essay about {x}.", "Write a short essay on {x}.", "Write a paragraph about {x}.", "Write a text about {x}.",
              "Please write a few sentences about {x}.", "Compose an essay about {x}.", "Write something about {x}.",
              "I need a short text about {x}."]  # fmt: skip
OPENINGS = [
    "{X} matters to many people, for more than one reason.",
    "There is a lot to say about {x}.",
    "Many people think about {x} at some point in their lives.",
]
MIDDLES = ["First, {x} shapes how we live and what we choose every day.", "First, it opens doors: who knows about {x} sees more choices.",
           "It helps to look at {x} from two sides, the practical and the personal.", "At first {x} looks simple, but a closer look shows how much depends on it."]  # fmt: skip
MORE = ["Second, it connects people, because it gives them something to share and to discuss.", "Second, it takes time and care, and both pay off later.",
        "It also has a cost, and not everybody can afford it in the same way.", "What we learn from it today helps us to make better decisions tomorrow."]  # fmt: skip
ENDS = [
    "In short, {x} deserves our attention.",
    "For these reasons {x} will stay important.",
    "That is why it is worth thinking about {x}.",
    "So it is good to keep an open mind about {x}.",
]


def essay(d: Draw) -> Chat:
    topic = d.value(TOPICS) if d.chance(0.5) else d.any(ESSAY_TOPICS.strip().splitlines())
    parts = [d.any(OPENINGS), d.any(MIDDLES), d.any(MORE), d.any(ENDS)]
    answer = " ".join(p.format(x=topic, X=topic[0].upper() + topic[1:]) for p in parts)
    return Chat(
        user(d.pattern(ESSAY_ASKS).format(x=topic)),
        answer,
        f"An opening, two points and an end about {topic}.",
    )


LIST_ASKS = ["Name {n} {k}.", "List {n} {k}.", "Give me {n} {k}.", "Tell me {n} {k}.", "Can you name {n} {k}?", "I need a list of {n} {k}.",
             "Write down {n} {k}.", "Please list {n} {k}."]  # fmt: skip
_LISTS = [
    (line.split(" = ")[0], line.split(" = ")[1].split(", ")) for line in LISTS.strip().splitlines()
]
NUMBER_WORDS = {2: "two", 3: "three", 4: "four", 5: "five"}


def listing(d: Draw) -> Chat:
    kind, members = d.any(_LISTS)
    n = d.int(2, 5)
    chosen = d.some(members, n)
    word = NUMBER_WORDS[n] if d.chance(0.6) else str(n)
    if d.chance(0.25):
        answer = "\n".join(f"{i}. {m}" for i, m in enumerate(chosen, 1))
    elif d.chance(0.2):
        answer = "\n".join(f"- {m}" for m in chosen)
    else:
        answer = ", ".join(chosen[:-1]) + " and " + chosen[-1] + "."
        answer = answer[0].upper() + answer[1:]
    return Chat(user(d.pattern(LIST_ASKS).format(n=word, k=kind)), answer, f"{n} {kind}.")


SPELL_ASKS = ["Reverse the word {w}.", "Spell the word {w} backwards.", "Write {w} backwards.", "What is {w} in reverse?", "Turn the word {w} around.",
              "Reverse {w}.", "{w} backwards, please."]  # fmt: skip
LETTER_ASKS = ["How many letters are in {w}?", "How many letters does the word {w} have?", "Count the letters in {w}.", "How long is the word {w}?",
               "Spell {w}.", "Spell the word {w}.", "How do you spell {w}?"]  # fmt: skip
CASE_ASKS = [
    "Write {w} in capital letters.",
    "Put {w} in upper case.",
    "{w} in capitals, please.",
    "Make {w} uppercase.",
]


def letters(d: Draw) -> Chat:
    """Spelling: letters, their number, and words backwards."""
    word = d.value(NOUNS) if d.chance(0.7) else d.value(ADJECTIVES)
    spelled = "-".join(word)
    form = d.rng.random()
    if form < 0.4:
        text, answer = d.pattern(SPELL_ASKS, drop=False), word[::-1]
        think = f"{spelled} turned around: {'-'.join(reversed(word))}"
    elif form < 0.85:
        text = d.phrase(LETTER_ASKS)
        spell = "pell" in text
        answer = (
            f"{spelled}."
            if spell
            else d.any([f"{len(word)}.", f"The word {word} has {len(word)} letters."])
        )
        think = spelled if spell else ", ".join(f"{c} {i}" for i, c in enumerate(word, 1))
    else:
        text, answer, think = d.pattern(CASE_ASKS, drop=False), word.upper(), "-".join(word.upper())
    return Chat(user(text.format(w=word)), answer, think, direct=form >= 0.85)


OPPOSITE_ASKS = ["What is the opposite of {a}?", "Opposite of {a}?", "Name the opposite of {a}.", "What word means the opposite of {a}?",
                 "Give me an antonym of {a}.", "the opposite of {a} is?"]  # fmt: skip
_OPPOSITES = [tuple(pair.split("-")) for pair in OPPOSITES.split()]


def opposite(d: Draw) -> Chat:
    a, b = d.any(_OPPOSITES)
    if d.chance(0.5):
        a, b = b, a
    answer = d.any([f"The opposite of {a} is {b}.", f"{b.capitalize()}."])
    return Chat(user(d.pattern(OPPOSITE_ASKS, drop=False).format(a=a)), answer, f"{a} - {b}")


REPEAT_ASKS = [
    "Copy this: {s}",
    "Copy the text: {s}",
    "Say it back: {s}",
    "Write {s}",
    "Print this: {s}",
    "Type: {s}",
    "Just say {s}",
    "Say {s}",
    'Write "{s}" again.',
    "Please write: {s}",
    "Please say: {s}",
    "Now say: {s}",
    "Output the text {s}",
    'Can you repeat "{s}"?',
    "Tell me: {s}",
    "Return this string: {s}",
    "Give back exactly: {s}",
    "Parrot: {s}",
    "Quote me: {s}",
    "Write down: {s}",
    "Repeat after me: {s}",
    'Say "{s}".',
    "Please repeat: {s}",
    "Write exactly this: {s}",
    "Echo: {s}",
    "Repeat this sentence: {s}",
]


def repeat(d: Draw) -> Chat:
    kinds = [
        "phrase",
        "message",
        "title",
        "task",
        "topic",
        "code",
        "full_name",
        "date",
        "url",
        "email",
    ]
    text = draw_value(d, d.any(kinds))[0]
    return Chat(
        user(d.pattern(REPEAT_ASKS, drop=False).format(s=text)), text, "I repeat the words."
    )
