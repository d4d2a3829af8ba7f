"""JSON extraction: a short text and a schema in, one JSON object out."""

from typing import NamedTuple

from chat_format import Chat, dumps
from draw import Draw
from values import draw_value, json_type


class Record(NamedTuple):
    """A kind of text: fields `name/other name:kind`, sentences that each use all the fields they name."""

    fields: list[str]
    texts: list[str]


def record(fields: str, texts: str) -> Record:
    return Record(fields.split(), texts.strip().splitlines())


RECORDS = [
    record("name/full_name/person:full_name age:age city/location/hometown:city job/occupation/profession:job",
           """{name} is {age} years old and lives in {city}. {name} works as a {job}.
My neighbour {name}, a {age} year old {job}, moved here from {city}.
{name} ({age}), {job}, {city}
Meet {name}! At {age}, this {job} calls {city} home.
In {city} we talked to {name}, who is {age} and earns a living as a {job}.
The {job} {name} was born in {city} and is now {age}.
{name}, aged {age}, has been a {job} in {city} for years.
Yesterday a {job} named {name} from {city} turned {age}."""),
    record("name/person:name age:age",
           """{name} is {age} years old.
{name} is {age}.
My friend {name} just turned {age}.
Her name is {name} and she is {age}.
There is a boy called {name}, {age} years of age.
I am {name} and I am {age} years old.
Happy birthday {name}, {age} today!"""),
    record("name/customer/buyer:full_name product/item:item quantity/amount:small price/cost:price",
           """{name} ordered {quantity} pieces of the {product} for {price} dollars.
Order: {quantity} x {product}, {price} dollars, customer {name}.
The customer {name} bought {quantity} of our {product} and paid {price} dollars.
We sold {quantity} units of the {product} to {name} at a price of {price}.
{name} paid {price} dollars for the {product}, quantity {quantity}.
Receipt for {name}: {product}, {quantity} pieces, total {price}."""),
    record("invoice_number/invoice/id:code customer/company/client:company total/amount:price date/due_date:date",
           """Invoice {invoice_number} for {customer}, total {total} dollars, dated {date}.
{customer} owes us {total} dollars on invoice {invoice_number} from {date}.
On {date} we sent invoice {invoice_number} to {customer}. The amount is {total}.
Please pay invoice {invoice_number}: {total} dollars. Date: {date}. Client: {customer}.
The bill {invoice_number} of {date} to {customer} comes to {total}."""),
    record("event/title:title date/day:date time/start:clock city/place/location:city",
           """The event "{event}" takes place in {city} on {date} at {time}.
Join us for "{event}" at {time} on {date} in {city}.
"{event}", {city}, {date}, {time}
On {date} the doors in {city} open at {time} for "{event}".
We meet in {city} for "{event}". It starts at {time} on {date}.
Save the date: {date}, {time}, "{event}" in {city}."""),
    record("origin/from:city destination/to:city date/departure:date passengers/people:small",
           """A flight from {origin} to {destination} on {date} for {passengers} passengers.
{passengers} people travel from {origin} to {destination} on {date}.
We leave {origin} on {date} and arrive in {destination}; there are {passengers} of us.
On {date}, {passengers} travellers fly to {destination}. They start in {origin}.
Trip: {origin} to {destination}, {date}, {passengers} persons."""),
    record("title/book:title author/writer:full_name year/published:year pages/num_pages:number",
           """The book "{title}" by {author} came out in {year} and has {pages} pages.
{author} wrote "{title}" in {year}. It has {pages} pages.
"{title}" ({year}), {author}, {pages} pages
In {year}, {author} published "{title}", a book of {pages} pages.
I am reading "{title}", {pages} pages long, written by {author} in {year}."""),
    record("product/item/name:item color/colour:colour price/cost:price stock/quantity:number",
           """The {color} {product} costs {price} dollars. We have {stock} in stock.
We have {stock} of the {product} in {color}, each for {price} dollars.
For sale: {product}, {color}, {price} dollars, {stock} left.
There are {stock} {color} ones of the {product} left at {price} each.
{product}, color {color}, price {price}, stock {stock}"""),
    record("name/contact:full_name email:email phone/phone_number:phone company/employer:company",
           """You can reach {name} of {company} at {email} or {phone}.
{name}, {company}, {email}, {phone}
Contact {name} by phone at {phone} or by email at {email}. Company: {company}.
My name is {name}, I work for {company}. Mail me at {email} or call {phone}.
For {company} please write to {name} ({email}, tel. {phone})."""),
    record("name/pet/pet_name:name animal/species/kind:enum(cat,dog,rabbit,parrot,hamster,horse,turtle) age:small owner:full_name",
           """{name} is a {age} year old {animal} that belongs to {owner}.
{owner} has a {animal} called {name}. It is {age} years old.
The {animal} {name}, {age}, lives with {owner}.
Lost: a {animal} named {name}, {age} years old. Owner: {owner}.
Our patient is {name}, a {animal} of {age} years. The owner is {owner}."""),
    record("patient/name:full_name doctor/physician:full_name date/day:date time/hour:clock",
           """{patient} has an appointment with Dr. {doctor} on {date} at {time}.
Appointment: {patient}, {date}, {time}, with Dr. {doctor}.
Dr. {doctor} will see {patient} at {time} on {date}.
On {date} at {time}, {patient} visits Dr. {doctor}."""),
    record("city/place:city temperature/degrees:degrees condition/sky:enum(sunny,rainy,cloudy,windy,foggy,snowy) humidity:percent",
           """It is {temperature} degrees and {condition} in {city}, humidity {humidity} percent.
Weather in {city}: {condition}, {temperature} degrees, {humidity} percent humidity.
{city} is {condition} today with {temperature} degrees and a humidity of {humidity} percent.
Today {city} has {humidity} percent humidity at {temperature} degrees and is {condition}."""),
    record("company/employer:company position/role/job:job salary/pay:big city/location:city",
           """{company} is looking for a {position} in {city}. The salary is {salary} a month.
Job offer: {position} at {company} in {city}, {salary} per month.
In {city}, {company} pays a {position} {salary} a month.
We at {company} hire a {position}. Place: {city}. Pay: {salary}."""),
    record("country:country language:language currency:currency city/visited_city:city",
           """We went to {country}, where people spoke {language} and took {currency}, and we stayed in {city}.
Travel notes. Country: {country}. City: {city}. Language: {language}. Currency: {currency}.
In {city} I practised my {language}. It was my first time in {country}, and I paid in {currency}."""),
    record("room:room color/colour:colour length:small width:small",
           """The {room} is {length} metres long and {width} metres wide. Its walls are {color}.
Our {color} {room} measures {length} by {width} metres.
{room}: length {length}, width {width}, color {color}"""),
]  # fmt: skip

TASKS = [
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
        content = d.phrase(TASKS).format(k=keys_text(d, list(kinds)), t=text)
        return [{"role": "user", "content": content}]
    schema = schema_text(d, kinds)
    if form < 0.75:
        return [{"role": "user", "content": d.phrase(SCHEMA_TASKS).format(s=schema, t=text)}]
    system = d.phrase(SYSTEM_TASKS).format(s=schema)
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def extraction(d: Draw) -> Chat:
    kind = d.any(RECORDS)
    words: dict[str, str] = {}
    fields: list[tuple[str, str, object]] = []
    for field in kind.fields:
        names, _, sort = field.partition(":")
        first = names.split("/")[0]
        words[first], value = draw_value(d, sort)
        while isinstance(value, str) and list(words.values()).count(value) > 1:
            words[first], value = draw_value(d, sort)
        fields.append((first if d.chance(0.6) else d.any(names.split("/")), sort, value))
    text = d.phrase(kind.texts).format(**words)
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
        words = [draw_value(d, d.any(["name", "noun", "colour", "city", "food"]))[0] for _ in range(d.int(2, 5))]
        text = ", ".join(words[:-1]) + " and " + words[-1]
        return Chat([{"role": "user", "content": d.phrase(LISTS).format(t=text)}], dumps(words), f"{len(words)} words.")
    pairs = d.some([("name", "name"), ("age", "age"), ("city", "city"), ("color", "colour"), ("count", "number"),
                    ("title", "title"), ("year", "year"), ("email", "email")], d.int(1, 3))  # fmt: skip
    found = {key: draw_value(d, kind)[1] for key, kind in pairs}
    text = " and ".join(f"{k} {v}" for k, v in found.items())
    return Chat([{"role": "user", "content": d.phrase(OBJECTS).format(t=text)}], dumps(found), f"Keys: {', '.join(found)}.")
