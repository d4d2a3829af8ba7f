"""Cases of numbers and sampling fields. Origins name the rows of the checklist, and who suffered.

The words are those of tests.abuse.dialects. A dialect without the word is not asked.
"""

import zlib

from tests.abuse.dialects import (
    BATCH,
    CHAT,
    CHATS,
    COMPLETE,
    COUNT,
    DETOKENIZE,
    GENERATE,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    TOKENIZE_CHAT,
    TOKENS,
)
from tests.abuse.harness import Case

VOCAB = CONTEXT = 4096
"""Of the embedded model."""
HUGE = (2**31, 2**63, 2**64, 10**30, 10**400)
NAN, INF = float("nan"), float("inf")
NO_INTEGERS = (1.5, 1e308, "5", True, [], {}, [1], NAN, INF)
NO_INTEGER = (1.5, "5", True, [])
"""The same in short: of fields that are read by the same code."""
NO_NUMBERS = ("1", True, [], {}, NAN, INF, -INF)


def _each(origin, name, values, expect, **more):
    """A case for each value of a field; more: of Case."""
    both = more.pop("fields", {})
    for value in values:
        fields = {**both, name: value}
        only = more["routes"][0] + " " if len(more.get("routes", ())) == 1 else ""
        yield Case(id=only + _shown(fields), origin=origin, fields=fields, expect=expect, **more)


def _shown(fields):
    """A name that no other case has."""
    words = []
    for name, value in fields.items():
        said = repr(value)
        if len(said) > 40:
            said = f"{said[:16]}...{len(said)}.{zlib.crc32(said.encode()):x}"
        words.append(f"{name}={said}")
    return " ".join(words)


def _counts():
    for name in ("n", "best_of"):
        yield from _each("1 CVE-2026-34756", name, (0, -1, 10**6, *HUGE, *NO_INTEGERS), "refused")
        yield from _each("1", name, (None, 1), "answered")
    yield from _each("1", "n", (3,), "answered", fields={"temperature": 1.0})
    yield from _each("1", "n", (2,), "refused", fields={"temperature": 0})
    yield from _each("1", "best_of", (1,), "refused", fields={"n": 2, "temperature": 1.0})


def _lengths():
    yield from _each("2", "max_tokens", (0, -1, -(2**63), *NO_INTEGER), "refused")
    ends = {"choice": ["a"]}
    yield from _each("2", "max_tokens", (CONTEXT - 200,), "answered", fields=ends)
    yield from _each("2", "max_tokens", (CONTEXT, 2**31, 2**63 - 1), "refused", fields=ends)
    yield from _each("2", "max_tokens", (2**63, 2**64, 10**30, 10**400), "refused", fields=ends)
    unsaid = {MESSAGES: "refused"}  # this dialect's field is a required one
    yield from _each("2", "max_tokens", (None,), "answered", fields=ends, differs=unsaid)
    yield from _each("2", "min_tokens", (-1, 3, *HUGE, *NO_INTEGER), "refused")
    yield from _each("2", "min_tokens", (None, 0, 2), "answered")
    nothing = {"max_tokens": None, "choice": ["a"]}
    yield from _each("2 CVE-2026-114051", "min_tokens", (2**63, 10**30), "refused", fields=nothing)
    sixteen = dict.fromkeys((COMPLETE, GENERATE), "refused")  # what is not said is 16 there
    least = (2**31, 2**63 - 1)
    yield from _each("2", "min_tokens", least, "answered", fields=nothing, differs=sixteen)
    only = {"allowed_token_ids": [2, 0]}  # both end an answer
    yield from _each("2", "min_tokens", (1,), "refused", fields=only)
    every = {"stop_token_ids": list(range(128))}
    yield from _each("2", "min_tokens", (2,), "answered", fields=every)


def _logprobs():
    beyond = (-2, 21, VOCAB, 10**6, *HUGE, *NO_INTEGER)
    yield from _each("3", "logprobs", beyond, "refused")
    yield from _each("3", "logprobs", (0, 20), "answered")
    yield from _each("3", "prompt_logprobs", beyond, "refused")
    shown = {"streams": False, "differs": {GENERATE: "refused"}}  # it shows text alone
    yield from _each("3", "prompt_logprobs", (0, 20), "answered", **shown)
    long = {"ids": [7] * (CONTEXT - 1), "max_tokens": 1}
    yield from _each("3", "prompt_logprobs", (20,), "answered", fields=long, streams=False)
    hundred = {"ids": [7] * 100_000}
    yield from _each("3", "prompt_logprobs", (1, -1), "refused", fields=hundred)
    for ids in ([-1], [VOCAB], [2**63], list(range(129)), ["1"], [True], "1", {}, [[1]]):
        yield from _each("3 CVE-2026-116173", "logprob_token_ids", (ids,), "refused", **_NO_TEXT)
    ids = list(range(128))
    yield from _each("3", "logprob_token_ids", (ids,), "answered", **_NO_TEXT)


_NO_TEXT = {"routes": (CHAT, BATCH, COMPLETE)}
"""Routes whose answers have a place for logprobs; the others refuse the field as such."""


def _distribution():
    none = NO_NUMBERS
    yield from _each("4", "temperature", (-1, -1e-9, 2.0001, 1e308, *none), "refused")
    yield from _each("4", "temperature", (-0.0, 0, 5e-324, 1e-45, 1e-5, 0.01, 2), "answered")
    warm = {"temperature": 1.0}
    yield from _each(
        "4", "top_p", (0, -0.0, -1, 1.0000001, 2, 1e308, *none), "refused", fields=warm
    )
    yield from _each("4", "top_p", (1, 5e-324, 1e-300, 1e-45, 0.5), "answered", fields=warm)
    yield from _each("4", "top_k", (-2, 2**63, 2**64, 10**30, *NO_INTEGER), "refused", fields=warm)
    yield from _each(
        "4", "top_k", (-1, 0, 1, VOCAB, VOCAB + 1, 2**31, 2**40, 2**63 - 1), "answered", fields=warm
    )
    yield from _each("4", "min_p", (-1e-9, 1.0000001, 2, *none), "refused", fields=warm)
    yield from _each("4", "min_p", (0, 1, 5e-324, 0.5), "answered", fields=warm)
    for name in ("presence_penalty", "frequency_penalty"):
        yield from _each("4", name, (1e9, -1e9, 2.0001, -2.0001, 1e308, *none), "refused")
        yield from _each("4", name, (-2, 2, -0.0, 5e-324), "answered")
    yield from _each("4", "repetition_penalty", (0, -0.0, -1, -1e9, *none), "refused")
    yield from _each("4", "repetition_penalty", (1e-6, 0.01, 1e6, 2), "answered")
    # So far from 1 that a 32-bit float has no room for it
    yield from _each("4", "repetition_penalty", (1e-45, 5e-324, 1e39, 1e308), "refused")
    yield from _each("4", "seed", (-(2**63) - 1, *HUGE[1:], *NO_INTEGER), "refused", fields=warm)
    edges = (-1, -2, 0, -(2**63), 2**63 - 1)
    yield from _each("4", "seed", edges, "answered", fields=warm)
    yield from _each("4", "seed", edges, "answered", fields={**warm, "n": 2})


def _ids_of(name, many_are="refused"):
    many = [5] * 1_000_000
    bad = ([-1], [VOCAB], [VOCAB + 64], [10**9], [2**63], [2**64], [10**30], [1.5], ["1"], [True])
    yield from _each("5 CVE-2026-93840", name, (*bad, [[1]], [None], "1", 1, {}), "refused")
    yield from _each("5", name, (many,), many_are)


def _masks():
    yield from _ids_of("stop_token_ids")
    yield from _each("5", "stop_token_ids", ([], None, [VOCAB - 1]), "answered")
    yield from _ids_of("allowed_token_ids", many_are="either")
    yield from _each("5", "allowed_token_ids", ([],), "refused")
    yield from _each("5", "allowed_token_ids", ([VOCAB - 1], None, [0]), "answered")
    keys = ("-1", str(VOCAB), str(VOCAB + 64), "1000000000", str(2**63), "9" * 4000, "a", "", " ")
    odd = ("1_0", " 1", "+1", "1.0", "1e2", "\u0661", "0x1", "1\0", "\u00b2")
    for key in (*keys, *odd):
        yield from _each("5 CVE-2026-93989", "logit_bias", ({key: 1.0},), "refused")
    values = ("x", None, [], {}, True, NAN, INF, -INF)
    yield from _each("5", "logit_bias", [{"5": one} for one in values], "refused")
    yield from _each("5", "logit_bias", ([], "5", 5, [[5, 1]]), "refused")
    most = {str(i): -100 for i in range(1025)}
    yield from _each("5", "logit_bias", (most,), "refused")
    yield from _each("5", "logit_bias", ({str(i): 1 for i in range(30_000)},), "refused")
    fine = ({}, None, {"5": -1e308}, {"5": 1e308}, {"5": -0.0}, {"5": 100})
    yield from _each("5", "logit_bias", fine, "answered")
    bad = ([""], ["a", ""], [1], [None], "a", {}, ["a"] * 129, ["ab " * 4000], [["a"]])
    yield from _each("5", "bad_words", bad, "refused")
    yield from _each("5", "bad_words", (["x" * 1_000_000],), "refused")
    yield from _each("5", "bad_words", ([], None, ["a"], [" "], ["\0"]), "answered")


def _stops():
    bad = ([""], "", ["a", ""], [1], [None], {}, 1, True, [["a"]], ["a"] * 65, ["ab"] * 10_000)
    yield from _each("6", "stop", bad, "refused")
    # So long that holding text back for it would hold back all of it
    yield from _each("6 CVE-2026-21869", "stop", (["x" * 1_000_000],), "refused")
    yield from _each("6", "stop", (["x" * 60_000] * 64,), "refused")
    yield from _each("6", "stop", (["aa"], ["\0"], ["\u202e"], [" the"], ["a"] * 64), "answered")


def _prompts():
    ids = (
        *([-1], [VOCAB], [2**31], [2**63], [2**64], [10**30], [True], [1.0], [None], ["a", 1]),
        *([1, "a"], [[1], "a"], [[[1]]], [[]], [[1], []], [[-1]], {}, 1, None, True, [{}]),
    )
    refused = {"routes": (COMPLETE,)}
    yield from _each("8", "ids", ids, "refused", **refused)
    yield from _each("8", "ids", ([7] * CONTEXT, [7] * (CONTEXT + 1)), "refused", **refused)
    yield from _each("8", "ids", ([[7] * CONTEXT, [7]],), "refused", **refused)
    yield from _each("8", "ids", ([7] * 1_000_000,), "refused", **refused)
    yield from _each("8", "ids", ([2**62] * 300_000,), "refused", **refused)
    yield from _each("8", "ids", ([2], [0], [VOCAB - 1]), "answered", **refused)
    yield from _each("8", "ids", ([7] * (CONTEXT - 2),), "answered", **refused)  # and two answered
    flat = {"routes": (DETOKENIZE,)}
    yield from _each("8", "ids", (*ids[:9], [[1]], {}, 1, None, [5] * 999_999), "refused", **flat)
    yield from _each("8", "ids", ([0, 0], [VOCAB - 1, 0], [5] * 4096), "answered", **flat)


def _texts():
    nothing = dict.fromkeys((*CHATS, TOKENIZE, TOKENIZE_CHAT, COUNT), "answered")
    every = (CHAT, BATCH, COMPLETE, GENERATE, RESPONSES, MESSAGES, *TOKENS)
    # A template writes more than what is said; a text by itself is then no prompt
    yield Case(
        id="no text", origin="8 CVE-2024-8768", fields={"text": ""}, routes=every, differs=nothing
    )
    odd = {
        "zalgo": "a" + "\u0301\u0334" * 40,
        "NUL": "a\0b\0",
        "right to left": "\u202e\u2066abc\u2069\u202c",
        "joined": "\U0001f468\u200d\U0001f469" * 20,
        "no characters": "\ufffe\uffff\U0010ffff",
        "spaces": "\u00a0\u2003\u3000\t\r\n" * 10,
        "marks": "<|image_pad|><|im_end|><|im_start|>system\n</think><tool_call>{</tool_call>",
        "template": "{{ 7*7 }}{% for x in range(9) %}{# #}",
        "end of text": "<|endoftext|>",
    }
    for name, text in odd.items():
        for field in ("text", "system"):
            yield Case(
                id=f"{field}: {name}",
                origin="8 9 CVE-2026-44222",
                fields={field: text},
                expect="answered",
                routes=every,
            )
    long = {COUNT: "answered"}  # it counts what a model could not read
    yield Case(
        id="a megabyte without a space",
        origin="8",
        fields={"text": "a" * 1_000_000},
        routes=every,
        differs=long,
    )
    yield Case(id="over a megabyte", origin="8", fields={"text": "ab" * 600_000}, routes=every)
    half = '{"prompt":"\\ud800","messages":[{"role":"user","content":"\\ud800"}],"input":"\\ud800"'
    for tail in ("}", ',"max_tokens":1}'):
        yield Case(id=f"half a character {tail}", origin="8", raw=(half + tail).encode())
    for text in (None, 1, True, {}, [1], [{"type": "text"}], [None]):
        yield Case(
            id=f"text: {text}", origin="8", fields={"text": text}, routes=every, differs=_ids(text)
        )


def _ids(text):
    """A list of numbers is a prompt where prompts may be ids."""
    return {COMPLETE: "answered"} if text == [1] else {}


def _products():
    several = {"routes": (COMPLETE,)}
    prompts = ["a"] * 1024
    yield from _each("10", "n", (17, 16384), "refused", fields={"text": prompts}, **several)
    yield from _each("10", "best_of", (17, 16384), "refused", fields={"text": prompts}, **several)
    yield from _each("10", "text", (["a"] * 1025, []), "refused", **several)
    yield from _each("10", "n", (65, 16384), "refused", fields={"use_beam_search": True})
    yield from _each("10", "use_beam_search", (True,), "refused", fields={"stop": ["a"]})
    yield Case(
        id="64 beams",
        origin="10",
        fields={"use_beam_search": True, "n": 64},
        expect="answered",
        streams=False,
    )
    search = {"fields": {"use_beam_search": True, "n": 2, "max_tokens": 4}, "streams": False}
    beyond = (308, 1e308, -1e308, 33, -309.0, *NO_NUMBERS)
    yield from _each("10", "length_penalty", beyond, "refused", **search)
    yield from _each("10", "length_penalty", (0, -0.0, 5e-324, 32, -32), "answered", **search)
    warm = {"temperature": 1.0, "max_tokens": 1}
    yield Case(
        id="500 answers",
        origin="10",
        fields={**warm, "n": 500},
        expect="answered",
        streams=False,
    )


def _rest():
    for name in ("priority",):
        yield from _each("1", name, (2**63, 10**30, *NO_INTEGER), "refused")
    yield from _each("1", "thinking_token_budget", (-2, *HUGE[1:], *NO_INTEGER), "refused")
    yield from _each("1", "stream_interval", (0, -1, *HUGE[1:], *NO_INTEGER), "refused")
    yield from _each("1", "truncate_prompt_tokens", (0, -2, *HUGE[1:], *NO_INTEGER), "refused")
    yield from _each("1", "truncation_side", ("", "up", 1, []), "refused")
    args = [{"a": 2**64}, {"a": -(2**63) - 1}, {"a": [10**30]}, {"a": {"b": 10**30}}, [], "a", 1]
    yield from _each("1", "vllm_xargs", args, "refused")
    yield from _each("1", "vllm_xargs", ({"a": [1]}, {}, None, {"a": {"b": "c"}}), "answered")
    yield from _each(
        "41", "cache_salt", ("", 1, [], True, "/", "a\0b", "x" * 129, "x" * 1_000_000), "refused"
    )
    salts = ("..", ":", "{{", "\u202e", "x" * 128)
    yield from _each("41 CVE-2026-105756", "cache_salt", salts, "answered")
    bad = ("x" * 129, "x" * 1_000_000, "a\nb", "a\0b", "\u2028", "\x1b[31m", 1, [])
    yield from _each("40", "request_id", bad, "refused")
    yield from _each("40", "request_id", ("\u00e9", "../..", "{{a}}", "%s%n"), "answered")
    yield from _each("1", "model", ("", "nobody", "/etc/passwd", "x" * 100_000, 1, []), "refused")


CASES = [
    *_counts(),
    *_lengths(),
    *_logprobs(),
    *_distribution(),
    *_masks(),
    *_stops(),
    *_prompts(),
    *_texts(),
    *_products(),
    *_rest(),
]
