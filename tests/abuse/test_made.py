"""Bodies made of the models' own fields: any type at any place, at the edges of what is allowed.

Each field of each body gets values of every type, at the boundaries, alone and two at a time, with
and without a stream. Never 5xx, never slow, never a word too much; a field that several dialects
have is taken or refused by all of them. Fixed seeds; --long makes thousands. What it
finds becomes a case of numbers.py or grammars.py, which stays.
"""

import json

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.abuse import dialects
from tests.abuse.harness import LONG, Case, Victim

EXAMPLES = 400 if LONG else 4
BODIES = 60
"""Made at a time: each example is a batch, so that the server has more than one to do."""

EDGES = (
    *(None, True, False, 0, 1, -1, 2, -0.0, 0.5, 1.0, 1e-9, 1e308, -1e308, 1e-320),
    *(2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**40),
    *("", " ", "a", "0", "1", "-1", "null", "true", "\0", "\n", "\u202e", "{{", "a" * 300),
    *("auto", "none", "required", "json_object", "text", "left", "high", "/etc/passwd", "${x}"),
    *([], [[]], [None], [0], [-1], [4095], [4096], ["a"], [""], [{}], [True], [[0]], ["a", 1]),
    *({}, {"a": None}, {"type": "text"}, {"type": "function"}, {"type": 5}, {"": ""}, {"0": 0}),
    *({"type": "json_schema"}, {"json": {}}, {"regex": "a"}, {"include_usage": True}, {"a": {}}),
)
VALUES = st.sampled_from(EDGES) | st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=True)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)

SLOW = {"n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"}
"""A legal value of these may ask for minutes of work; numbers.py has their edges."""
LEGAL = {"messages", "prompt", "input", "tokens", "model"}
"""Fields without which nothing else is looked at; they get wrong values now and then."""

FIELDS = sorted(
    {(route, name) for route, model in dialects.MODELS.items() for name in model.model_fields}
)


@st.composite
def bodies(draw):
    """A case: one or two fields of one body, and whether it is streamed."""
    route, name = draw(st.sampled_from(FIELDS))
    others = [other for where, other in FIELDS if where == route]
    fields = {name: draw(VALUES)}
    if draw(st.booleans()):
        fields[draw(st.sampled_from(others))] = draw(VALUES)
    for one in SLOW & set(fields):
        value = fields[one]
        if isinstance(value, int) and not isinstance(value, bool) and 8 < value < 2**63:
            fields[one] = 2
    made = {**dialects._base(route), **fields}
    if route in dialects.STREAMING and draw(st.booleans()):
        made["stream"] = True
    for one in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if made.get(one, 0) is None:  # to the end of the context
            made[one] = 2
    raw = json.dumps(made, ensure_ascii=draw(st.booleans())).encode("utf-8", "replace")
    return Case(
        id=f"{route} {json.dumps(fields)[:300]}",
        origin="5.9",
        raw=raw,
        expect="either",
        routes=(route,),
        streams=False,
    )


def test_bodies_of_any_fields_are_answered_or_refused(victim: Victim):
    @seed(20261121)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate] if not LONG else [Phase.generate, Phase.shrink],
    )
    @given(st.lists(bodies(), min_size=BODIES, max_size=BODIES))
    def run(cases):
        victim.check(_apart(cases), at_once=8)

    with victim.unharmed():
        run()


def _apart(cases):
    """Each by itself: dialects are compared below, with one value for all of them."""
    return list({case.id: case for case in cases}.values())


SHARED = sorted(
    name
    for name in {name for _, name in FIELDS} - SLOW - LEGAL
    if sum(name in dialects.MODELS[route].model_fields for route in dialects.GENERATING) > 1
)
APART = {
    # A batch has no streams, and /generate no place for what is no text
    *("stream", "stream_options", "logprobs", "prompt_logprobs", "logprob_token_ids"),
    *("return_token_ids", "return_prompt_text", "x_timing"),
    # Words that mean another thing in another dialect
    *("tools", "tool_choice", "metadata", "system", "thinking", "text", "speed", "echo"),
    *("parallel_tool_calls", "include_reasoning"),
    "stop",  # one string is a list of one to OpenAI, and no list to Anthropic
}
"""Fields that dialects rightly differ about."""


@st.composite
def shared(draw):
    """A case that every dialect gets that has the field."""
    name = draw(st.sampled_from([one for one in SHARED if one not in APART]))
    value = draw(VALUES)
    shown = json.dumps(value)
    return Case(
        id=f"{name}={shown[:200]}",
        origin="5.9",
        fields={name: value},
        expect="either",
    )


def test_dialects_take_and_refuse_the_same_values(victim: Victim):
    @seed(20261122)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.lists(shared(), min_size=25, max_size=25))
    def run(cases):
        victim.check(_apart(cases), at_once=8)

    with victim.unharmed():
        run()
