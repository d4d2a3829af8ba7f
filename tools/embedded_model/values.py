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
    ITEMS,
    JOBS,
    MONTHS,
    NAMES,
    NOUNS,
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
ROOMS = ["kitchen", "bedroom", "living room", "bathroom", "office", "garage", "hallway", "attic", "cellar", "garden"]
GENRES = "jazz rock pop classical folk blues hip-hop reggae techno soul metal ambient".split()
CUISINES = "Italian Mexican Japanese Indian Thai Greek French Chinese Turkish Lebanese Korean Vietnamese".split()
MESSAGES = """I will be late|see you at noon|the meeting is moved to Friday|happy birthday|please call me back
dinner is ready|I am on my way|thanks for your help|the package has arrived|do not forget the keys
good luck today|the train is delayed|let us meet at the station|I sent the files|all tests are green
can you bring bread|we won the game|the door is locked|lunch at one|see you tomorrow""".replace("\n", "|").split("|")
PHRASES = """good morning|thank you very much|where is the station|how are you|I would like a coffee|see you soon
the bill please|I am lost|what time is it|nice to meet you|good night|have a nice day|I do not understand
how much does it cost|open the window|the food is delicious|my name is Tom|the sky is blue|happy new year
we are late|it is raining|close the door""".replace("\n", "|").split("|")


def made_up(d: Draw) -> str:
    """A name that no list holds, so that copying is learned and not recall."""
    return "".join(d.any(SYLLABLES) for _ in range(d.int(2, 3))).capitalize()


def name(d: Draw) -> str:
    return made_up(d) if d.chance(0.15) else d.value(NAMES)


def full_name(d: Draw) -> str:
    return f"{name(d)} {made_up(d) if d.chance(0.1) else d.value(SURNAMES)}"


def email(d: Draw) -> str:
    who = d.value(NAMES).lower()
    if d.chance(0.5):
        who += d.any([".", "_", ""]) + d.value(SURNAMES).lower()
    if d.chance(0.3):
        who += str(d.int(1, 99))
    host = d.any(["example.com", "mail.com", "post.org", "work.net", "inbox.io", "school.edu", "quill.dev"])
    return f"{who}@{host}"


def date(d: Draw) -> str:
    return f"{d.int(2019, 2031)}-{d.int(1, 12):02d}-{d.int(1, 28):02d}"


def clock(d: Draw) -> str:
    return f"{d.int(0, 23):02d}:{d.any(['00', '15', '30', '45', '05', '10', '20', '40', '50'])}"


def code(d: Draw) -> str:
    letters = "".join(d.any("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(d.int(1, 3)))
    return f"{letters}{d.any(['-', ''])}{d.int(10, 9999)}"


def text_of(words: list[str]) -> Callable[[Draw], str]:
    return lambda d: d.value(words)


def title(d: Draw) -> str:
    return f"{d.any(ADJECTIVES)} {d.value(NOUNS)}"


def url(d: Draw) -> str:
    return f"https://{d.value(NOUNS)}.{d.any(['com', 'org', 'net', 'io'])}/{d.value(NOUNS)}"


def phone(d: Draw) -> str:
    return f"+{d.int(1, 99)} {d.int(100, 999)} {d.int(100000, 9999999)}"


def us_city(d: Draw) -> Value:
    """A city as people say it and as a schema that asks for city and state wants it."""
    city = d.any(list(US_CITIES))
    return city, f"{city}, {US_CITIES[city]}"


def place(d: Draw) -> str:
    return made_up(d) if d.chance(0.1) else d.value(CITIES)


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
    "day": text_of(DAYS),
    "month": text_of(MONTHS),
    "item": text_of(ITEMS),
    "food": text_of(FOODS),
    "colour": text_of(COLOURS),
    "task": text_of(TASKS),
    "topic": text_of(TOPICS),
    "job": text_of(JOBS),
    "company": text_of(COMPANIES),
    "language": text_of(LANGUAGES),
    "currency": text_of(CURRENCIES),
    "stock": text_of(STOCKS),
    "timezone": text_of(TIMEZONES),
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
