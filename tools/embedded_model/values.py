"""Kinds of argument values: how each reads in a sentence and what it is in JSON."""

from collections.abc import Callable

from countries import COUNTRIES
from draw import Draw
from words import (
    ADJECTIVES,
    CITIES,
    COLOURS,
    COMPANIES,
    DAYS,
    FOODS,
    HOBBIES,
    ITEMS,
    JOBS,
    MONTHS,
    NAMES,
    NOUNS,
    PET_NAMES,
    SURNAMES,
    SYLLABLES,
    TASKS,
    TOPICS,
    US_CITIES,
)

Value = tuple[str, object]  # (as written in the sentence, as JSON)

LANGUAGES = """English French German Spanish Italian Portuguese Dutch Polish Russian Turkish Arabic Hindi Chinese
Japanese Korean Swedish Greek Czech Finnish Danish""".split()
CURRENCIES = "USD EUR GBP JPY CHF CNY INR CAD AUD SEK NOK PLN BRL MXN KRW TRY ZAR NZD".split()
STOCKS = "AAPL MSFT GOOG AMZN TSLA NVDA META IBM ORCL INTC AMD SAP SONY NFLX ADBE CSCO PEP NKE DIS KO".split()
TIMEZONES = """Europe/Paris Europe/London Asia/Tokyo America/New_York America/Chicago Asia/Kolkata Australia/Sydney
Africa/Cairo Europe/Berlin Asia/Shanghai America/Los_Angeles Asia/Dubai UTC""".split()
ROOMS = [
    "dining room",
    "library",
    "basement",
    "balcony",
    "corridor",
    "studio",
    "nursery",
    "pantry",
    "guest room",
    "lobby",
    "workshop",
    "kitchen",
    "bedroom",
    "living room",
    "bathroom",
    "office",
    "garage",
    "hallway",
    "attic",
    "cellar",
    "garden",
]
GENRES = "country opera punk disco swing house funk salsa tango choir piano guitar jazz rock pop classical folk blues hip-hop reggae techno soul metal ambient".split()
CUISINES = "Italian Mexican Japanese Indian Thai Greek French Chinese Turkish Lebanese Korean Vietnamese".split()
MESSAGES = """I will be late|see you at noon|the meeting is moved to Friday|happy birthday|please call me back
dinner is ready|I am on my way|thanks for your help|the package has arrived|do not forget the keys
good luck today|the train is delayed|let us meet at the station|I sent the files|all tests are green
can you bring bread|we won the game|the door is locked|lunch at one|see you tomorrow""".replace(
    "\n", "|"
).split("|")
PHRASES = """good morning|thank you very much|where is the station|how are you|I would like a coffee|see you soon
the bill please|I am lost|what time is it|nice to meet you|good night|have a nice day|I do not understand
how much does it cost|open the window|the food is delicious|my name is Tom|the sky is blue|happy new year
we are late|it is raining|close the door""".replace("\n", "|").split("|")


LETTERS = "abcdefghijklmnopqrstuvwxyzaeiouaeioutnrslaeiou"
ALL_WORDS = [w for words in (ITEMS, FOODS, COLOURS, JOBS, NOUNS, ADJECTIVES, TASKS, TOPICS, MESSAGES, PHRASES)
             for phrase in words for w in phrase.split() if w.islower()]  # fmt: skip


def mangle(d: Draw, word: str) -> str:
    """A word nobody has seen, made from one that many have: copying must not lean on memory."""
    at = d.int(0, len(word) - 1)
    form = d.int(0, 3)
    if form == 0:
        new = word[:at] + d.any(LETTERS) + word[at + 1 :]
    elif form == 1:
        new = word[:at] + d.any(LETTERS) + word[at:]
    elif form == 2 and len(word) > 3:
        new = word[:at] + word[at + 1 :]
    else:
        other = d.any(ALL_WORDS)
        new = word[: max(1, at)] + other[len(other) // 2 :]
    return new.capitalize() if word[0].isupper() else new.lower()


def made_up(d: Draw) -> str:
    """A name that no list holds."""
    if d.chance(0.4):
        return "".join(d.any(LETTERS) for _ in range(d.int(3, 8))).capitalize()
    return "".join(d.any(SYLLABLES) for _ in range(d.int(2, 3))).capitalize()


def rare(d: Draw, text: str) -> str:
    """On the training side, often something else in place of a value from a list."""
    if d.held_out:
        return text
    form = d.rng.random()
    if form < 0.65:
        return text
    if form < 0.85:
        words = text.split(" ")
        at = d.int(0, len(words) - 1)
        if words[at].isalpha():
            words[at] = mangle(d, words[at])
        return " ".join(words)
    count = min(6, max(1, len(text.split(" ")) + d.int(-1, 2)))
    words = [d.any(ALL_WORDS) if d.chance(0.6) else made_up(d).lower() for _ in range(count)]
    return " ".join(w.capitalize() for w in words) if text[0].isupper() else " ".join(words)


def name(d: Draw) -> str:
    if d.held_out:
        return made_up(d) if d.chance(0.1) else d.value(NAMES)
    form = d.rng.random()
    return made_up(d) if form < 0.3 else mangle(d, d.value(NAMES)) if form < 0.6 else d.value(NAMES)


def surname(d: Draw) -> str:
    if d.held_out:
        return d.value(SURNAMES)
    form = d.rng.random()
    return (
        made_up(d)
        if form < 0.25
        else mangle(d, d.value(SURNAMES))
        if form < 0.6
        else d.value(SURNAMES)
    )


def full_name(d: Draw) -> str:
    return f"{name(d)} {surname(d)}"


def email(d: Draw) -> str:
    who = name(d).lower()
    if d.chance(0.5):
        who += d.any([".", "_", ""]) + surname(d).lower()
    if d.chance(0.3):
        who += str(d.int(1, 99))
    host = d.any(
        ["example.com", "mail.com", "post.org", "work.net", "inbox.io", "school.edu", "quill.dev"]
    )
    return f"{who}@{host}"


def date(d: Draw) -> str:
    return f"{d.int(2019, 2031)}-{d.int(1, 12):02d}-{d.int(1, 28):02d}"


def clock(d: Draw) -> str:
    return f"{d.int(0, 23):02d}:{d.any(['00', '15', '30', '45', '05', '10', '20', '40', '50'])}"


def code(d: Draw) -> str:
    letters = "".join(d.any("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(d.int(1, 3)))
    return f"{letters}{d.any(['-', ''])}{d.int(10, 9999)}"


def text_of(words: list[str]) -> Callable[[Draw], str]:
    return lambda d: rare(d, d.value(words))


def one_of(words: list[str]) -> Callable[[Draw], str]:
    """A value that is always one of a list."""
    return lambda d: d.value(words)


def title(d: Draw) -> str:
    text = rare(d, f"{d.any(ADJECTIVES)} {d.value(NOUNS)}")
    return text.title() if d.chance(0.2) else text


def url(d: Draw) -> str:
    first, second = rare(d, d.value(NOUNS)).split(" ")[0], rare(d, d.value(NOUNS)).split(" ")[0]
    return f"https://{first}.{d.any(['com', 'org', 'net', 'io'])}/{second}"


def ticker(d: Draw) -> str:
    if d.held_out or d.chance(0.6):
        return d.value(STOCKS)
    return "".join(d.any("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(d.int(2, 5)))


def phone(d: Draw) -> str:
    return f"+{d.int(1, 99)} {d.int(100, 999)} {d.int(100000, 9999999)}"


def us_city(d: Draw) -> Value:
    """A city as people say it and as a schema that asks for city and state wants it."""
    city = d.any(list(US_CITIES))
    return city, f"{city}, {US_CITIES[city]}"


def place(d: Draw) -> str:
    if d.held_out:
        return made_up(d) if d.chance(0.05) else d.value(CITIES)
    if d.chance(0.15):
        return made_up(d)
    if d.chance(0.3):
        return " ".join(
            w if w.islower() or d.chance(0.3) else mangle(d, w) for w in d.value(CITIES).split(" ")
        )
    return d.value(CITIES)


STRINGS: dict[str, Callable[[Draw], str]] = {
    "city": place,
    "name": name,
    "full_name": full_name,
    "email": email,
    "date": date,
    "clock": clock,
    "code": code,
    "title": title,
    "url": url,
    "phone": phone,
    "day": one_of(DAYS),
    "month": one_of(MONTHS),
    "item": text_of(ITEMS),
    "food": text_of(FOODS),
    "colour": text_of(COLOURS),
    "task": text_of(TASKS),
    "topic": text_of(TOPICS),
    "job": text_of(JOBS),
    "company": text_of(COMPANIES),
    "hobby": text_of(HOBBIES),
    "pet": text_of(PET_NAMES),
    "language": text_of(LANGUAGES),
    "currency": one_of(CURRENCIES),
    "stock": ticker,
    "timezone": one_of(TIMEZONES),
    "room": text_of(ROOMS),
    "genre": text_of(GENRES),
    "cuisine": text_of(CUISINES),
    "message": text_of(MESSAGES),
    "phrase": text_of(PHRASES),
    "noun": text_of(NOUNS),
    "country": lambda d: d.any(COUNTRIES).bare,
}
NUMBERS: dict[str, tuple[int, int]] = {
    "small": (1, 12),
    "percent": (0, 100),
    "number": (1, 999),
    "big": (10, 9999),
    "age": (4, 96),
    "year": (1950, 2030),
    "minutes": (1, 90),
    "degrees": (10, 30),
}


def draw_value(d: Draw, kind: str) -> Value:
    """A value of a kind; `enum(a,b)` picks one of the words in brackets."""
    if kind.startswith("enum("):
        word = d.any(kind[5:-1].split(","))
        return word, word
    if kind == "us_city":
        return us_city(d)
    if kind == "price":
        amount = d.int(1, 300) + d.any([0.5, 0.99, 0.25, 0.75, 0.1])
        return str(amount), amount
    if kind in NUMBERS:
        n = d.int(*NUMBERS[kind])
        return str(n), n
    word = STRINGS[kind](d)
    return word, word


def json_type(kind: str) -> str:
    if kind == "price":
        return "number"
    return "integer" if kind in NUMBERS else "string"
