"""Our own OpenAPI document against the server: what it promises holds for whatever is sent.

schemathesis draws requests from the document, right ones and wrong ones. No answer may be a 5xx
(but 501, which the document tells of), none may hang, and each must look as the document says.
With --long 2,000 requests are drawn for each route.
"""

import dataclasses
import json

import hypothesis
import jsonschema_rs
import pytest
import requests
from hypothesis import strategies as st

pytest.importorskip("schemathesis", reason="pip install schemathesis")

import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from quire.server.auth import auth_middleware
from quire.server.options import ServerOptions
from quire.server.routes import unsupported
from tests import tiers
from tests.clients.sse import named_events, openai_chunks, read
from tests.server.harness import CLASSIFIES, EMBEDS, EMBEDS_TOKENS, Server

pytestmark = pytest.mark.slow("sends every route of the OpenAPI document generated requests")

EXAMPLES = tiers.amount(2, 2000)
TIMEOUT_S = 60
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
HEALTH = (hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much)
SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not tiers.LONG,
    database=None,
    suppress_health_check=HEALTH,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
)


@pytest.fixture(scope="module")
def fuzzed(tokenizer):
    with Server(tokenizer).running() as running:
        yield running


@pytest.fixture(scope="module")
def document(fuzzed):
    return requests.get(f"{fuzzed.url}/openapi.json", timeout=60).json()


@pytest.fixture(scope="module")
def schema(fuzzed, document):
    made = schemathesis.openapi.from_dict(document)
    made.config.update(base_url=fuzzed.url)
    return made


def operations(schema):
    return [found.ok() for found in schema.get_all_operations()]


MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


def of_mode(operations, mode):
    """All of them with --long; else every second one: the others are those of the other mode."""
    return operations if tiers.LONG else operations[MODES.index(mode) :: 2]


def test_the_document_is_complete(document, fuzzed):
    """Each route is in it, with what it reads and what it answers."""
    routes = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in fuzzed.app.routes
        if getattr(route, "include_in_schema", False)
        for method in route.methods - {"HEAD", "OPTIONS"}
    }
    told = {(method, path) for path, found in document["paths"].items() for method in found}
    assert routes <= told | {("get", "/openapi.json"), ("get", "/docs"), ("get", "/redoc")}
    for path, found in document["paths"].items():
        for method, operation in found.items():
            assert operation.get("description") or operation.get("summary"), path
            assert "500" in operation["responses"], path
            reads = (
                method == "post"
                and path not in BODILESS
                and path not in unsupported.UNSUPPORTED_ROUTES
            )
            assert reads == ("requestBody" in operation), (method, path)


BODILESS = {
    *("/ping", "/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache"),
    "/reset_mm_cache",
    "/reset_encoder_cache",
    *("/start_profile", "/stop_profile", "/v1/responses/{response_id}/cancel"),
    *("/drain_engine", "/undrain_engine"),
}
"""POST routes that read no body."""


def check(case, response):
    """No 5xx but 501; and what came is what the document says."""
    if response.status_code != 501:
        assert response.status_code < 500, response.text
    case.validate_response(response, checks=CHECKS, excluded_checks=[not_a_server_error])
    kind = response.headers.get("content-type", "")
    if (kind if isinstance(kind, str) else kind[0]).startswith("text/event-stream"):
        check_events(case.operation, response.content)


def check_events(operation, raw):
    events = read([raw])
    item = operation.definition.raw["responses"]["200"]["content"]["text/event-stream"].get(
        "x-item"
    )
    if item is None:
        assert named_events(events)
        return
    components = operation.schema.raw_schema["components"]
    valid = jsonschema_rs.validator_for({**item, "components": components})
    error = jsonschema_rs.validator_for(
        {"$ref": "#/components/schemas/ErrorResponse", "components": components}
    )
    for chunk in openai_chunks(events):
        assert valid.is_valid(chunk) or error.is_valid(chunk), (
            next(valid.iter_errors(chunk)),
            chunk,
        )


def of_document(operation, mode):
    return operation.as_strategy(generation_mode=mode)


HELLO = [{"role": "user", "content": "Hello"}]
GOOD = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "Hello"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/no/such/folder"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/detokenize": {"tokens": [1, 2]},
    "/generate": {"prompt": "Hello", "max_tokens": 9},
    "/invocations": {"prompt": "Hello"},
    "/v1/chat/completions/batch": {"messages": [HELLO, HELLO]},
    "/abort_requests": {"request_ids": ["a"]},
    "/v1/embeddings": {"input": "Hello"},
    "/embeddings": {"input": "Hello"},
    "/pooling": {"input": "Hello"},
    "/classify": {"input": "Hello"},
    "/v2/embed": {"texts": ["Hello"]},
    "/score": {"queries": "Hello", "documents": ["you"]},
    "/v1/score": {"queries": "Hello", "documents": ["you"]},
    "/rerank": {"query": "Hello", "documents": ["you", "it"]},
    "/v1/rerank": {"query": "Hello", "documents": ["you", "it"]},
    "/v2/rerank": {"query": "Hello", "documents": ["you", "it"]},
    "/embed": {"inputs": "Hello"},
    "/embed_all": {"inputs": "Hello"},
    "/embed_sparse": {"inputs": "Hello"},
    "/predict": {"inputs": "Hello"},
    "/generative_scoring": {"query": "Hello", "items": ["a", "b"], "label_token_ids": [1, 2]},
    "/similarity": {"inputs": {"source_sentence": "Hello", "sentences": ["you"]}},
}
"""Bodies that are answered with 200, to change a little."""

POOLING_ROUTES = {
    path for path, body in GOOD.items() if not body.keys() & {"prompt", "messages", "tokens"}
} - {"/v1/responses", "/abort_requests", "/generative_scoring"}

WORDS = ["a", "", "text", "auto", "none", "user", "left", "json_object", "汉字🙂", "\0", "\ud800"]
NUMBERS = [0, 1, -1, 2, 5, 20, 511, 512, 513, 2**31, 2**63, 2**64, -(2**63), 10**30]
REALS = [0.0, -0.0, 0.5, 1.0, 1.0000001, 2.0, -2.0, 1e-45, 1e308, float("inf"), float("nan")]
TEXTS = st.sampled_from(WORDS) | st.text(max_size=8)
COUNTS = st.integers(0, 5) | st.sampled_from(NUMBERS)
ANYTHING = st.recursive(
    st.none() | st.booleans() | COUNTS | st.sampled_from(REALS) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def some(**fields):
    """Objects with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


KINDS = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "x"])
SCHEMAS = st.recursive(
    st.booleans() | st.sampled_from([{}, {"$ref": "#"}, {"$ref": "#/$defs/a"}]) | ANYTHING,
    lambda inner: some(
        type=KINDS | st.lists(KINDS, max_size=2),
        properties=st.dictionaries(TEXTS, inner, max_size=3),
        required=st.lists(TEXTS, max_size=2),
        additionalProperties=inner,
        patternProperties=st.dictionaries(TEXTS, inner, max_size=2),
        items=inner,
        anyOf=st.lists(inner, max_size=3),
        allOf=st.lists(inner, max_size=3),
        enum=st.lists(ANYTHING, max_size=3),
        const=ANYTHING,
        pattern=TEXTS,
        minimum=COUNTS,
        maxItems=COUNTS,
        minLength=COUNTS,
        format=TEXTS,
    ),
    max_leaves=6,
)
TREES = st.recursive(
    some(type=st.just("const_string"), value=TEXTS) | ANYTHING,
    lambda inner: some(
        type=st.sampled_from(
            ["sequence", "or", "tag", "star", "repeat", "json_schema", "any_text"]
        ),
        elements=st.lists(inner, max_size=3),
        content=inner,
        begin=TEXTS,
        end=TEXTS | st.lists(TEXTS, max_size=2),
        json_schema=SCHEMAS,
        min=COUNTS,
        max=COUNTS,
    ),
    max_leaves=4,
)
FORMATS = some(
    type=st.sampled_from(["text", "json_object", "json_schema", "structural_tag", "grammar", "x"]),
    json_schema=some(name=TEXTS, schema=SCHEMAS, strict=st.booleans()),
    schema=SCHEMAS,
    format=TREES,
    grammar=TEXTS,
)
FORMS = {
    "response_format": FORMATS,
    "structured_outputs": some(
        json=SCHEMAS | TEXTS,
        regex=TEXTS,
        choice=st.lists(TEXTS, max_size=3),
        grammar=TEXTS,
        structural_tag=TREES | TEXTS,
        disable_any_whitespace=st.booleans(),
        whitespace_pattern=TEXTS,
        backend=st.sampled_from(["auto", "xgrammar", "guidance", "x", "xgrammar:no-fallback"]),
    ),
    "guided_json": SCHEMAS,
    "structural_tag": TREES,
    "text": some(format=FORMATS),
    "output_config": some(format=FORMATS),
    "output_format": FORMATS,
}
"""Objects of which the document says little, nearer to what is allowed."""


def values(schema, document):
    """Values of a JSON schema, small ones first, and now and then what it does not allow."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return values(document["components"]["schemas"][name], document)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of(*(values(one, document) for one in schema["anyOf"]))
    kind = schema.get("type")
    if kind == "array":
        return st.lists(values(schema.get("items", {}), document), max_size=3)
    if kind == "object" and "properties" in schema:
        fields = {name: values(one, document) for name, one in schema["properties"].items()}
        return st.fixed_dictionaries({}, optional=fields)
    if kind == "object":
        return st.dictionaries(TEXTS, ANYTHING, max_size=3)
    simple = {
        "integer": COUNTS,
        "number": st.floats(0, 1) | st.sampled_from(REALS),
        "string": TEXTS,
        "boolean": st.booleans(),
        "null": st.none(),
    }
    return simple.get(kind, ANYTHING)


@st.composite
def near_good(draw, operation, document):
    """A good body with some fields of the document set, and now and then one that is wrong."""
    case = operation.Case(body=dict(GOOD[operation.path]), media_type="application/json")
    body = operation.definition.raw["requestBody"]["content"]["application/json"]["schema"]
    forms = [
        document["components"]["schemas"][one["$ref"].rpartition("/")[2]]
        for one in body.get("anyOf", [body])
    ]
    fields = {name: one for form in forms for name, one in form["properties"].items()}
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)):
        if name in FORMS and draw(st.booleans()):
            case.body[name] = draw(FORMS[name])
            continue
        wrong = draw(st.integers(0, 9)) == 9
        case.body[name] = draw(ANYTHING if wrong else values(fields[name], document))
    if "stream" in fields and draw(st.booleans()):
        case.body["stream"] = True
    return case


@pytest.mark.parametrize("mode", MODES)
def test_every_answer_is_one_that_the_document_promises(schema, fuzzed, mode):
    failures = [
        run(
            one,
            of_document(one, mode),
            2 if one.path in unsupported.UNSUPPORTED_ROUTES else EXAMPLES,
        )
        for one in of_mode(operations(schema), mode)
    ]
    fuzzed.wait_idle()
    assert not any(failures), "\n\n".join(filter(None, failures))


@pytest.mark.parametrize("field", sorted(FORMS))
def test_whatever_is_asked_of_a_form_is_answered_or_refused(schema, fuzzed, field):
    """Compiling is not in it: quire.grammar's own tests draw such."""
    path = {
        "text": "/v1/responses",
        "output_config": "/v1/messages",
        "output_format": "/v1/messages",
    }
    at = path.get(field, "/v1/chat/completions")
    (operation,) = (one for one in operations(schema) if one.path == at)
    bodies = FORMS[field].map(lambda form: {**GOOD[at], field: form})
    cases = bodies.map(lambda body: operation.Case(body=body, media_type="application/json"))
    failure = run(operation, cases, 2 * EXAMPLES, send)
    fuzzed.wait_idle()
    assert not failure, failure


def test_good_requests_with_a_field_or_two_changed(schema, document, fuzzed):
    found = [(one, one.definition.raw.get("requestBody")) for one in operations(schema)]
    read_bodies = [one for one, body in found if body and "application/json" in body["content"]]
    served = [one for one in read_bodies if one.path in GOOD]
    assert {one.path for one in read_bodies} == {one.path for one in served}
    failures = [run(one, near_good(one, document), EXAMPLES * 4, send) for one in served]
    fuzzed.wait_idle()
    assert not any(failures), "\n\n".join(filter(None, failures))


POOLING_MODELS = {
    "embed": dataclasses.replace(EMBEDS, matryoshka=True),
    "splade": dataclasses.replace(EMBEDS, methods=("splade",)),
    "token_embed": EMBEDS_TOKENS,
    "classify": CLASSIFIES,
    "relevance": dataclasses.replace(CLASSIFIES, size=1, labels=("relevant",)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", POOLING_MODELS)
def test_answers_of_models_that_pool(tokenizer, document, model):
    """Good ones too, of the routes that serve the model."""
    answered = set()
    with Server(tokenizer, pooling=POOLING_MODELS[model], generates=False).running() as server:

        def call(case):
            response = send(case)
            if response.status_code == 200:
                answered.add(case.operation.path)
            return response

        made = schemathesis.openapi.from_dict(document)
        made.config.update(base_url=server.url)
        failures = [
            run(one, near_good(one, document), EXAMPLES, call)
            for one in operations(made)
            if one.path in POOLING_ROUTES
        ]
        server.wait_idle()
    assert not any(failures), "\n\n".join(filter(None, failures))
    assert len(answered) > 1


OPEN = {
    *("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/server_info"),
    *("/drain_engine", "/undrain_engine"),
    *(
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/abort_requests",
        "/v1/responses/{response_id}",
    ),
    *("/v1/responses/{response_id}/cancel", "/v1/responses", "/tokenizer_info", "/load"),
}
"""Routes that answer otherwise where they are open, or where there is a store."""


@pytest.mark.parametrize("mode", MODES)
def test_routes_that_are_open_by_a_switch(tokenizer, document, mode):
    options = ServerOptions(
        enable_dev_routes=True,
        enable_responses_store=True,
        enable_tokenizer_info_endpoint=True,
    )
    with Server(tokenizer, options=options).running() as server:

        def call(case):
            response = case.call(timeout=TIMEOUT_S)
            for path in ("/resume", "/wake_up"):
                assert requests.post(server.url + path, timeout=TIMEOUT_S).status_code == 200
            return response

        opened = schemathesis.openapi.from_dict(document)
        opened.config.update(base_url=server.url)
        failures = [
            run(one, of_document(one, mode), how=call)
            for one in of_mode([found for found in operations(opened) if found.path in OPEN], mode)
        ]
        server.wait_idle()
    assert not any(failures), "\n\n".join(filter(None, failures))


def test_without_a_key_every_route_says_what_the_document_promises(tokenizer, document):
    options = ServerOptions(api_key=("k",))
    with Server(tokenizer, options=options).running() as server:
        closed = schemathesis.openapi.from_dict(document)
        closed.config.update(base_url=server.url)
        for operation in operations(closed):
            path = operation.path.replace("{name}", "a").replace("{response_id}", "a")
            response = requests.request(operation.method, server.url + path, timeout=TIMEOUT_S)
            if response.status_code != 401:
                assert path in auth_middleware.PUBLIC_PATHS, path
                continue
            operation.Case().validate_response(response, checks=CHECKS)


def run(operation, strategy, examples=EXAMPLES, how=None):
    """The first failure of one operation, made small; None if there is none."""

    @hypothesis.settings(SETTINGS, max_examples=examples)
    @hypothesis.given(case=strategy)
    def once(case):
        response = case.call(timeout=TIMEOUT_S) if how is None else how(case)
        try:
            check(case, response)
        except (Exception, FailureGroup) as error:
            error.add_note(f"{case.body!r:.2000} -> {response.status_code}")
            raise

    try:
        once()
    except hypothesis.errors.Unsatisfiable:
        return None  # nothing to get wrong: the route takes no input
    except (Exception, FailureGroup) as error:  # noqa: BLE001 - whatever it is, it is a failure
        notes = "\n".join(getattr(error, "__notes__", []))
        return f"{operation.label}: {type(error).__name__}: {error!s:.1500}\n{notes}"
    return None


def send(case):
    """As the bytes that a careless client sends: NaN and lone surrogates arrive as they are."""
    raw = json.dumps(case.body).encode()
    url, headers = case.operation.base_url + case.path, {"Content-Type": "application/json"}
    return requests.post(url, data=raw, headers=headers, timeout=TIMEOUT_S)
