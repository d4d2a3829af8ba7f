"""What is asked of every client and dialect. All at temperature 0 or with a seed, so that asking
twice gets the same answer."""

import json

TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
QUESTIONS = {
    "a capital": "What is the capital of France?",
    "a sum": "What is 31 + 44?",
    "another alphabet": "法国的首都是哪里？",
    "a joke": "Tell me a joke.",
    "an emoji to say back": 'Repeat after me: "héllo 🙂 wörld"',
}
WEATHER = "What is the weather in Paris?"
CITY = "Paris"


def ask(text):
    return [{"role": "user", "content": text}]


def check_tool_text(text):
    """The model wrote a call; until parsers come it is part of the text."""
    call = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
    assert call == {"name": "get_weather", "arguments": {"city": CITY}}
