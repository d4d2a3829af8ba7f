"""Plain text without a chat: what a raw completion request sees. Each text ends with the end-of-text token."""

from countries import ALIASES, COUNTRIES
from draw import Draw
from talk_items import DEFINITIONS, FACTS
from task_numbers import result
from values import made_up, name
from words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    FOODS,
    HOBBIES,
    JOBS,
    NAMES,
    NOUNS,
    PET_NAMES,
    SURNAMES,
    US_CITIES,
)

_DEFS = [line.split(" = ", 1)[1] for line in DEFINITIONS.strip().splitlines()]
_FACTS = [line.split(" => ")[1].split(" / ")[0] for line in FACTS.strip().splitlines()]

OPENERS = """
The president of the United States is the head of state and of the government. The president lives in the White House in Washington.
The president of the United States is elected for four years and works in the White House.
The president of the United States is the commander of the armed forces and signs the laws that Congress passes.
The future of AI is hard to predict. Models will get smaller and faster, and people will decide what they are used for.
The future of AI is open. It will help with many tasks, but people must check what it does.
The future of AI is bright if we use it with care.
The future of technology is in the hands of those who build it and those who use it.
The future of AI is about tools that help people learn, write and plan.
The largest ocean is the Pacific Ocean. It lies between Asia, Australia and the Americas.
The largest ocean is the Pacific. It covers about a third of the earth.
The largest planet is Jupiter.
The largest country is Russia, and the smallest is Vatican City.
The largest desert with sand is the Sahara in Africa.
The highest mountain is Mount Everest, which stands between Nepal and China.
The longest river in Africa is the Nile. It flows into the Mediterranean Sea.
The meaning of life is a question that everybody has to answer alone.
The best way to learn is to try, to fail and to try again.
The best thing about summer is the long light in the evening.
The sun is a star. The earth goes around it once a year.
The sky is blue because air scatters blue light more than red light.
The quick brown fox jumps over the lazy dog.
Once upon a time there was a king who had three daughters. The youngest one loved to read, and she read every book in the castle. One day she wrote a book herself.
Once upon a time there lived a small dragon that could not breathe fire. It learned to bake bread instead, and the whole village came to eat.
In the beginning there was only water and wind. Then the first island rose out of the sea.
It was a dark and stormy night. The rain fell in sheets, and a single lamp burned in the old house.
To be or not to be, that is the question.
Roses are red, violets are blue, sugar is sweet, and so are you.
Water is a liquid. It freezes at 0 degrees Celsius and boils at 100 degrees Celsius.
Machine learning is a way to let programs learn from examples.
Artificial intelligence is the skill of machines to do tasks that need thinking.
Deep learning is a kind of machine learning that uses large neural networks.
Large language models are programs that predict the next token of a text.
Quire is an engine that runs language models. It keeps the KV cache in blocks and answers many requests at once.
Quill is the small language model that ships with quire. It knows capitals, small sums and a little small talk.
Python is a programming language that is easy to read and to write.
I think that the most important thing is to be kind.
I like to walk in the forest in the morning, when the air is fresh.
Today is a good day. The sun shines and the birds sing.
If you want to be happy, do something kind for somebody else.
There are seven days in a week and twelve months in a year.
My favorite season is spring, because everything starts to grow.
My favourite food is soup, because it is warm and simple.
The cat sat on the mat and looked at the moon.
The weather today is sunny with a light wind.
The train was late, so we drank tea at the station and talked about the trip.
The world is full of things that we do not know yet.
San Francisco is a city in California. It is known for the Golden Gate Bridge, steep hills and fog.
San Francisco is a city on the west coast of the United States, known for its bridge and its hills.
San Francisco is a large city in California near the Pacific Ocean.
New York is a city in the United States. It is known for its tall buildings.
London is the capital of the United Kingdom and lies on the river Thames.
Tokyo is the capital of Japan and one of the largest cities in the world.
Paris is the capital of France. It lies on the river Seine and is known for the Eiffel Tower.
Berlin is the capital of Germany.
Rome is the capital of Italy. It is a very old city.
"""
_OPENERS = OPENERS.strip().splitlines()

GREETINGS = [
    "Hello, my name is {n}. I am {a} years old and I live in {c}. I like {h}.",
    "Hello, my name is {n} and I am a {j} from {c}.",
    "Hello, my name is {n}. I work as a {j}, and in my free time I enjoy {h}.",
    "Hello, my name is {n}. Nice to meet you!",
    "Hi, my name is {n}. I come from {c} and I have a {p} called {q}.",
    "My name is {n} {s}. I am a {j}.",
    "My name is {n}. My favourite colour is {k} and my favourite food is {f}.",
    "I am {n}. I am {a} years old. I am a {j} and I like {h}.",
    "{n} is a {j} who lives in {c}. On weekends {n} enjoys {h}.",
    "Dear {n}, thank you for your letter. I am well, and I hope to visit you in {c} soon.",
]

STORIES = [
    "{n} had a {a} {x}. Every morning {n} took the {x} to the {y}. One day the {x} was gone. {n} looked everywhere and found it under the {z}. From then on {n} took better care of it.",
    "There was a {a} {p} called {q}. It lived near the {y} and was friends with {n}. One evening it heard a sound behind the {z}. It was only the wind. {n} laughed, and they went home.",
    "{n} and {m} walked to the {y}. It was {a} and {b} there. They found a {x} and asked whose it was. Nobody knew, so they kept it.",
    "In a {a} village there lived a {j} named {n}. {n} owned a {b} {x} and was proud of it. When {m} came and asked for it, {n} gave it away with a smile.",
    "One day {n} went to the market to buy {f}. On the way home {n} met {m}, who was hungry. They sat down by the {y} and shared the {f}.",
    "The {p} looked at the {y}. It was {a}. Then it saw a {b} {x} and ran to it. {n} called its name, {q}, and it came back.",
]


def story_text(d: Draw) -> str:
    return d.any(STORIES).format(
        n=d.value(NAMES), m=d.value(NAMES), a=d.any(ADJECTIVES), b=d.any(ADJECTIVES), x=d.value(NOUNS), y=d.value(NOUNS),
        z=d.value(NOUNS), p=d.any(ANIMALS), q=d.any(PET_NAMES), j=d.any(JOBS), f=d.any(FOODS))  # fmt: skip


def greeting_text(d: Draw) -> str:
    return d.any(GREETINGS).format(
        n=name(d), s=d.value(SURNAMES), a=d.int(5, 90), c=d.any(CITIES), j=d.any(JOBS), h=d.any(HOBBIES), p=d.any(ANIMALS),
        q=d.any(PET_NAMES), k=d.any(COLOURS), f=d.any(FOODS))  # fmt: skip


def capital_text(d: Draw) -> str:
    c = d.any(COUNTRIES)
    if d.chance(0.15):
        return f"{c.zh}的首都是{c.zh_capital}。"
    shown = d.any([c.name] * 3 + ALIASES.get(c.name, []))
    forms = ["The capital of {n} is {k}.", "The capital of {n} is {k}.", "The capital of {n} is {k}. {N} is in {o}.",
             "{k} is the capital of {n}.", "The capital city of {n} is {k}.", "{N} is a country in {o}. Its capital is {k}.",
             "Q: What is the capital of {n}?\nA: {k}", "{N}'s capital is {k}."]  # fmt: skip
    text = d.any(forms).format(n=shown, N=shown[0].upper() + shown[1:], k=c.capital, o=c.continent)
    return text.replace("D.C..", "D.C.").replace("s's", "s'")


def sum_text(d: Draw) -> str:
    op = d.any("++-*")
    a, b = d.pair(op, (0, 0), (12, 12) if op == "*" else (99, 20))
    return f"{a} {op} {b} = {result(op, a, b)[1]}"


def series_text(d: Draw) -> str:
    start, step = d.int(0, 20), d.any([1, 1, 1, 2, 5, 10])
    if d.chance(0.3):
        return "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday."
    return ", ".join(str(start + step * i) for i in range(d.int(6, 20))) + "."


def city_text(d: Draw) -> str:
    city = d.any(list(US_CITIES))
    other = made_up(d)
    forms = [f"{city} is a city in the United States.", f"{city} is a city in the United States. Many people live and work there.",
             f"{other} is a {d.any(ADJECTIVES)} town near a {d.value(NOUNS)}."]  # fmt: skip
    return d.any(forms)


def plain_text(d: Draw) -> str:
    kind = d.rng.random()
    if kind < 0.3:
        return capital_text(d)
    if kind < 0.5:
        return d.any(_OPENERS)
    if kind < 0.62:
        return greeting_text(d)
    if kind < 0.76:
        return story_text(d)
    if kind < 0.82:
        return d.any(_DEFS)
    if kind < 0.88:
        return d.any(_FACTS)
    if kind < 0.93:
        return sum_text(d)
    if kind < 0.96:
        return series_text(d)
    return city_text(d)
