"""JSON extraction: a short text and a schema in, one JSON object out."""

from chat_format import Chat, dumps
from combos import JUNK
from draw import Draw
from json_records import JOINTS, MORE, PEOPLE_JOINTS, PERSON, RECORDS, SUBJECTS
from mentions import MENTIONS
from values import draw_value, json_type
from words import NOUNS

TASKS = [
    "Get {k} from this text, as JSON: {t}",
    "JSON with {k}, please: {t}",
    "What are {k} in this text? Answer as JSON.\n\n{t}",
    "{t}\n\nJSON ({k}):",
    "{t}\n\nExtract: {k}. Format: JSON.",
    "Pick {k} from the sentence and return JSON.\n{t}",
    "Collect {k} in a JSON object.\n\nText: {t}",
    "Make a JSON object with {k} from this: {t}",
    "Write a JSON object with the keys {k} for the text: {t}",
    "Fill in {k} from the text. Output JSON only.\n{t}",
    "Convert this text to JSON. Keys: {k}.\n{t}",
    "Only JSON, with {k}:\n{t}",
    "Output a JSON object (keys: {k}).\n\n{t}",
    "Here is a text: {t}\nPlease return {k} as JSON.",
    "Given the text, answer in JSON with {k}.\n\n{t}",
    "Information extraction. Fields: {k}. Text: {t}",
    "As JSON: {k}. From: {t}",
    "I want a JSON object that holds {k}. The text is: {t}",
    "Structured output please: {k}.\n{t}",
    "Summarise as JSON with {k}: {t}",
    "Extract {k} from the text as JSON.\n\n{t}",
    "Extract {k} as JSON.\nText: {t}",
    "{t}\n\nReturn a JSON object with the keys {k}.",
    "{t}\nGive me {k} as JSON.",
    "Read the text and answer with a JSON object that has the keys {k}.\n\nText: {t}",
    "Turn this into JSON with the fields {k}: {t}",
    "Text: {t}\nKeys: {k}\nJSON:",
    "Please pull {k} out of this text. Answer in JSON only.\n\n{t}",
    "Return JSON with {k}.\n\n{t}",
    "I need {k} in JSON format. {t}",
    "Parse the following and output JSON ({k}): {t}",
    "Find {k} in the text below and write them as a JSON object.\n{t}",
]
SCHEMA_TASKS = [
    "JSON schema: {s}\nText: {t}\nReturn the object.",
    "Use the schema to extract data.\n{s}\n\n{t}",
    "{s}\n\nFill this in from the text: {t}",
    "Text: {t}\nSchema: {s}",
    "Produce JSON for this schema: {s}\nfrom this text: {t}",
    "From the text, build an object that fits the schema.\nText: {t}\nSchema: {s}",
    "The output must match {s}. The text: {t}",
    "Extract.\n\nSchema:\n{s}\n\nText:\n{t}",
    "Please give me JSON in the form of {s} for: {t}",
    "Reply with JSON only, schema {s}\n\n{t}",
    "Parse the text into this schema: {s}. Text: {t}",
    "{t}\n{s}",
    "Extract the data from the text. Use this JSON schema:\n{s}\n\nText: {t}",
    "Text: {t}\n\nFill this schema and return only JSON:\n{s}",
    "Answer with JSON that matches the schema.\nSchema: {s}\n{t}",
    "Here is a JSON schema: {s}\nExtract a matching object from: {t}",
    "{t}\n\nExtract the information as JSON following the schema {s}",
    "Convert the text to JSON. Schema:\n{s}\nText:\n{t}",
    "Schema: {s}\n\nText: {t}\n\nJSON:",
    "Read the text and return an object for this schema.\n{s}\n{t}",
]
SYSTEM_TASKS = [
    "Reply in JSON. Schema: {s}",
    "Your output is JSON with this schema: {s}",
    "Given a text, return JSON like {s}",
    "Extract information as JSON: {s}",
    "You are a parser. Output format: {s}",
    "Answer every message with a JSON object of this schema: {s}",
    "Read the user's message and fill in {s}",
    "You extract data. Always answer with JSON that fits {s}",
    "Only JSON. {s}",
    "Extract data from the user's text. Reply with JSON that matches this schema: {s}",
    "You turn text into JSON. Schema: {s}",
    "Return only JSON that follows this schema:\n{s}",
    "Extract a JSON object. The schema is {s}",
    "You are an extraction engine. For every text, answer with JSON for the schema {s}",
]


def keys_text(d: Draw, keys: list[str]) -> str:
    if len(keys) == 1 or d.chance(0.3):
        return ", ".join(keys)
    return ", ".join(keys[:-1]) + " and " + keys[-1]


def schema_text(d: Draw, kinds: dict[str, str]) -> str:
    """A JSON Schema, or the short form that people type."""
    if d.chance(0.3):
        return dumps({k: json_type(kind) for k, kind in kinds.items()})
    props: dict[str, object] = {}
    for key, kind in kinds.items():
        props[key] = {"type": json_type(kind)}
        if kind.startswith("enum(") and d.chance(0.5):
            props[key] = {"type": "string", "enum": kind[5:-1].split(",")}
    schema: dict[str, object] = {"type": "object", "properties": props}
    if d.chance(0.7):
        schema["required"] = list(kinds)
    return dumps(schema)


def prompt(d: Draw, kinds: dict[str, str], text: str) -> list[dict[str, str]]:
    form = d.rng.random()
    if form < 0.4:
        content = d.pattern(TASKS).format(k=keys_text(d, list(kinds)), t=text)
        return [{"role": "user", "content": content}]
    schema = schema_text(d, kinds)
    if form < 0.75:
        return [{"role": "user", "content": d.pattern(SCHEMA_TASKS).format(s=schema, t=text)}]
    system = d.pattern(SYSTEM_TASKS).format(s=schema)
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


Found = tuple[str, str, object]  # key, kind, value


def start_large(text: str, fields: list[Found]) -> str:
    """Begin with a capital letter unless a value stands first: values are copied as they are."""
    if any(text.startswith(str(f[2])) for f in fields):
        return text
    return text[0].upper() + text[1:]


def sentence_text(d: Draw) -> tuple[str, list[Found]]:
    """A whole text of one record."""
    more = not d.held_out and d.chance(0.35)
    kind = d.any(MORE if more else RECORDS)
    words: dict[str, str] = {}
    fields: list[Found] = []
    for field in kind.fields:
        names, _, sort = field.partition(":")
        first = names.split("/")[0]
        words[first], value = draw_value(d, sort)
        while isinstance(value, str) and list(words.values()).count(value) > 1:
            words[first], value = draw_value(d, sort)
        fields.append((first if d.chance(0.6) else d.any(names.split("/")), sort, value))
    text = d.any(kind.texts) if more else d.phrase(kind.texts)
    return text.format(**words), fields


def composed_text(d: Draw) -> tuple[str, list[Found]]:
    """A subject and some clauses about it, in any order."""
    keys, kind, heads, options = d.any(SUBJECTS)
    word, value = draw_value(d, kind)
    fields: list[Found] = [(d.any(keys), kind, value)]
    text = d.any(heads).format(v=word)
    for i, option in enumerate(d.some(options, d.int(1, 4))):
        key = d.any(option.keys)
        if key in [f[0] for f in fields]:
            continue
        word, value = draw_value(d, option.kind)
        fields.append((key, option.kind, value))
        joint = " " if i == 0 else d.any(PEOPLE_JOINTS if options is PERSON else JOINTS)
        text += joint + d.any(option.says).format(v=word)
    d.rng.shuffle(fields)
    return text + ".", fields


def mentioned_text(d: Draw) -> tuple[str, list[Found]]:
    """Fragments that each mention one value, joined in any order; some mention a value nobody asks for."""
    fields: list[Found] = []
    parts = []
    for kind in d.some(list(MENTIONS), d.int(2, 5)):
        keys, forms = MENTIONS[kind]
        key = d.any(keys)
        if key in [f[0] for f in fields]:
            continue
        word, value = draw_value(d, kind)
        if value in [f[2] for f in fields]:
            continue
        fields.append((key, kind, value))
        parts.append(d.any(forms).replace("{v}", word))
    text = parts[0]
    for part in parts[1:]:
        joint = d.any([". ", ". ", ", ", ", ", " and ", " ", "; ", ": ", " (", " - "])
        part = start_large(part, fields) if joint == ". " else part
        text += joint + part + (")" if joint == " (" else "")
    text = start_large(text, fields) if d.chance(0.85) else text
    if d.chance(0.5):
        d.rng.shuffle(fields)
    return text if text[-1] in ".!" else text + ".", fields


LINES = [
    "{k}: {v}",
    "{k} = {v}",
    "{k} {v}",
    "{k} - {v}",
    "The {k} is {v}",
    "the {k}: {v}",
    "{v} ({k})",
]


def listed_text(d: Draw) -> tuple[str, list[Found]]:
    """Notes: one short piece a field."""
    options = d.any([s[3] for s in SUBJECTS])
    form, fields, parts = d.any(LINES), [], []
    for option in d.some(options, d.int(2, 5)):
        key = d.any(option.keys)
        if key in [f[0] for f in fields]:
            continue
        word, value = draw_value(d, option.kind)
        fields.append((key, option.kind, value))
        parts.append(form.format(k=key.replace("_", " "), v=word))
    text = d.any([", ", "; ", "\n", " | ", ". "]).join(parts)
    if d.chance(0.5):
        d.rng.shuffle(fields)
    return start_large(text, fields) if d.chance(0.5) else text, fields


def litter(d: Draw, text: str) -> str:
    """Put words that are no value before or behind a text."""
    junk = d.any(JUNK) if d.chance(0.8) else d.value(NOUNS).capitalize()
    mark = d.any([" ", " ", ": ", "! ", ", ", " - ", ". ", "... "])
    if d.chance(0.2):
        return f"{text} {junk}{d.any(['!', '.', '?', ''])}"
    if d.chance(0.15):
        return f'"{junk}{mark}{text}"'
    return junk + mark + text


WHERE = ["{x} is where we stayed", "{x} is where it happened", "in {x} we liked it", "it was {x} that we saw", "we love {x}", "\"{x} is great\"", "\"I like {x}\"",
         "{x}, of all places", "{x} comes to mind", "it is about {x}", "{x} it is", "think of {x}", "{x} again", "next to {x}", "oh {x}!"]  # fmt: skip
LINKS = ["{a} and {b}", "{a} with {b}", "{a}, {b}", "{a} says {b}", "{b} says {a}", "{a}: {b}", "{a} ({b})", "{a}, a {b}", "{a} of {b}", "{a} for {b}", "{a} to {b}",
         "{a} in {b}", "{a} who is {b}", "{a} - {b}", "{a} by {b}", "{a} from {b}", "{a} at {b}", "{a} is {b}", "the {a} is {b}", "{a}, who has {b},"]  # fmt: skip
TELLING = [
    "full_name",
    "city",
    "country",
    "company",
    "job",
    "date",
    "age",
    "price",
    "email",
    "code",
    "title",
    "item",
    "language",
    "colour",
    "small",
    "clock",
    "room",
]
KEYS = {k: v[0] for k, v in MENTIONS.items()}


def odd_text(d: Draw) -> tuple[str, list[Found]]:
    """Two or three values of clearly different kinds in a sentence of any shape; the kind alone tells them apart."""
    fields: list[Found] = []
    words = []
    for kind in d.some(TELLING, d.int(2, 4)):
        word, value = draw_value(d, kind)
        key = d.any(KEYS[kind])
        if key in [f[0] for f in fields] or value in [f[2] for f in fields]:
            continue
        fields.append((key, kind, value))
        if kind in MENTIONS and d.chance(0.5):
            word = d.any(MENTIONS[kind][1]).replace("{v}", word)
        elif d.chance(0.3):
            word = d.any(WHERE).replace("{x}", word)
        words.append(word)
    text = words[0]
    for word in words[1:]:
        text = d.any(LINKS).replace("{a}", text).replace("{b}", word)
    if d.chance(0.5):
        d.rng.shuffle(fields)
    return start_large(text, fields) + d.any([".", ".", "!", "", "?"]), fields


MAKERS = [
    odd_text,
    sentence_text,
    sentence_text,
    sentence_text,
    composed_text,
    mentioned_text,
    mentioned_text,
    listed_text,
]


def extraction(d: Draw) -> Chat:
    make = sentence_text if d.held_out else d.any(MAKERS)
    text, fields = make(d)
    if not d.held_out and d.chance(0.4):
        text = litter(d, text)
    if d.chance(0.45):
        fields = d.some(fields, d.int(1, len(fields)))
    kinds = {key: sort for key, sort, _ in fields}
    found = {key: value for key, _, value in fields}
    think = "; ".join(f"{k}: {v}" for k, v in found.items())
    return Chat(prompt(d, kinds, text), dumps(found), think, plain=False)


LISTS = [
    "Make a JSON list of these: {t}.",
    "Turn this into a JSON array: {t}",
    "Write {t} as a JSON list.",
    "JSON array of {t}, please.",
    "Put these words into a JSON array: {t}.",
]
OBJECTS = [
    "Write a JSON object with {t}.",
    "Give me JSON: {t}.",
    "Make a JSON object where {t}.",
    "Return a JSON object with {t}.",
    "JSON object please: {t}.",
]


def writing(d: Draw) -> Chat:
    """JSON from what the sentence says, without a schema."""
    if d.chance(0.5):
        words = [
            draw_value(d, d.any(["name", "noun", "colour", "city", "food"]))[0]
            for _ in range(d.int(2, 5))
        ]
        text = ", ".join(words[:-1]) + " and " + words[-1]
        return Chat(
            [{"role": "user", "content": d.pattern(LISTS).format(t=text)}],
            dumps(words),
            f"{len(words)} words.",
        )
    pairs = d.some([("name", "name"), ("age", "age"), ("city", "city"), ("color", "colour"), ("count", "number"),
                    ("title", "title"), ("year", "year"), ("email", "email")], d.int(1, 3))  # fmt: skip
    found = {key: draw_value(d, kind)[1] for key, kind in pairs}
    text = " and ".join(f"{k} {v}" for k, v in found.items())
    return Chat(
        [{"role": "user", "content": d.pattern(OBJECTS).format(t=text)}],
        dumps(found),
        f"Keys: {', '.join(found)}.",
    )
