"""Functions whose calls are tried in every format, and arguments for them."""

from quire.text.tools.base import tools_by_name


def function(name, properties, required=(), **more):
    schema = {"type": "object", "properties": properties, "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
ITEM = {
    "type": "object",
    "properties": {"id": WHOLE, "tags": {"type": "array", "items": TEXT}},
    "required": ["id"],
    "additionalProperties": False,
}
TOOLS = [
    function("get_weather", {"city": TEXT, "days": WHOLE}, ["city"]),
    function("now", {}),
    function(
        "order",
        {
            "size": {"type": "string", "enum": ["small", "large", "1"]},
            "count": {"type": "integer", "minimum": 1, "maximum": 9},
            "price": {"type": "number"},
            "paid": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
        },
        ["size", "paid"],
    ),
    function(
        "store",
        {
            "item": ITEM,
            "items": {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 3},
            "level": {"enum": [1, 2, "high", None]},
            "when": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}$"},
            "short": {"type": "string", "minLength": 1, "maxLength": 5},
        },
        ["item"],
        **{"$defs": {"one": ITEM}},
    ),
]
DECLARED = tools_by_name(TOOLS)

_TEXTS = [
    "",
    "Rome",
    "a b",
    "Zürich 汉",
    'it\'s "so"',
    "x < y > z",
    '{"a": 1}',
    "a\nb",
    "<b>",
    "1",
    "null",
]


def arguments(rng, name):
    """Arguments that the function allows, in the order of its parameters."""

    def text():
        return rng.choice(_TEXTS)

    def item():
        tags = {"tags": [text() for _ in range(rng.randrange(3))]} if rng.random() < 0.5 else {}
        return {"id": rng.randrange(-5, 99), **tags}

    ways = {
        "get_weather": {"city": text, "days": lambda: rng.randrange(-9, 99)},
        "now": {},
        "order": {
            "size": lambda: rng.choice(["small", "large", "1"]),
            "count": lambda: rng.randrange(1, 10),
            "price": lambda: rng.choice([0, 1.5, -2, 10.25]),
            "paid": lambda: rng.random() < 0.5,
            "note": lambda: rng.choice([None, "x", "a b"]),
        },
        "store": {
            "item": item,
            "items": lambda: [item() for _ in range(rng.randrange(4))],
            "level": lambda: rng.choice([1, 2, "high", None]),
            "when": lambda: rng.choice([5, "later", "", "at noon"]),
            "code": lambda: rng.choice(["AB12", "ZZ99"]),
            "short": lambda: rng.choice(["a", "a b c", "汉"]),
        },
    }[name]
    required = DECLARED[name].parameters["required"]
    return {key: make() for key, make in ways.items() if key in required or rng.random() < 0.6}
