"""The plan of an answer: computed once per request, and open to a response format that is new."""

import httpx
import pytest

from quire.sampling.steps.reasoning_budget import ReasoningBudget
from quire.server.formats import structured_output
from quire.server.formats.structured_output import ResponseFormat
from quire.server.generation import build_requests
from quire.text.output.answer_parser import (
    ParserOptions,
    PromptTail,
    build_answer_parser_factory,
)
from quire.text.tools._call_openers import call_openers
from quire.tool_grammar.prompt_constraints import build_thinking_budget
from tests.server.harness import Server

HELLO = [{"role": "user", "content": "Hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
OBJECT = {"type": "json_object"}


@pytest.fixture
def own(tokenizer):
    with Server(tokenizer).running() as running:
        running.model.bound.texts = ["yes"]
        yield running


def post(own, **body):
    return httpx.post(f"{own.url}/v1/chat/completions", json={"messages": HELLO, **body})


@pytest.mark.parametrize(
    "body",
    [{}, {"response_format": OBJECT, "n": 2}, {"tools": [ADD], "tool_choice": "required"}],
)
def test_a_request_has_one_plan_from_which_all_of_it_is_built(own, monkeypatch, body):
    plans, original = [], build_requests.plan_answers
    monkeypatch.setattr(
        build_requests, "plan_answers", lambda *given: plans.append(original(*given)) or plans[-1]
    )
    constraints = []
    own.model.bound.check_constraint = constraints.append
    assert post(own, **body).status_code == 200
    (plan,) = plans
    assert [plan.content.constraint] == (constraints or [None]) or plan.tool_calls.answer
    assert plan.parses_output == ("tools" in body)
    with pytest.raises(AttributeError):
        plan.thinking_budget = 1


def test_a_new_response_format_is_one_entry_of_a_table(own, monkeypatch):
    def read(where, given):
        return f"{where}.words", {"choice": given.get("words")}

    monkeypatch.setitem(
        structured_output.RESPONSE_FORMATS, "one_of", ResponseFormat(read, ("words",))
    )
    constraints = []
    own.model.bound.check_constraint = constraints.append
    given = {"type": "one_of", "words": ["yes", "no"], "spelling": 1}
    got = post(own, response_format=given)
    assert got.json()["choices"][0]["message"]["content"] == "yes"
    assert '"yes"' in constraints[0].form
    assert '"no"' in constraints[0].form
    assert "response_format.spelling" in got.headers["x-quire-ignored"]
    refused = post(own, response_format=given | {"words": []})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format.words"
    unknown = post(own, response_format={"type": "two_of"}).json()["error"]["message"]
    assert "one_of" in unknown


def test_a_thinking_budget_ends_where_a_call_begins(tokenizer):
    parsers = build_answer_parser_factory(ParserOptions("qwen3", "hermes"), tokenizer, None)
    openers = call_openers(parsers.tools.format, ["add"])
    asked = build_thinking_budget(4, parsers, PromptTail("<think>\n"), openers)
    call = tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {}}')
    budget = ReasoningBudget.from_params(asked)
    for token in [*tokenizer.encode("Hm."), *call, *call]:
        assert budget.forced_token is None
        budget.accept(token)
    assert budget.finished
