"""The chain: reasoning, then calls, then content without special tokens; and how many tokens."""

import pytest

from quire.text.output.parsed_text import ParsedCallDelta, ParsedPiece, collect_pieces
from quire.text.output.parser_chain import ParserChain, ReasoningTokenCounter, special_token_strings
from quire.text.reasoning.parser import ReasoningParser
from quire.text.reasoning.qwen3 import FORMAT

HIDDEN = special_token_strings(["<|im_end|>", "<|x|>", ""])


class Shouts:
    """A reader of tools: every word in capitals is a call."""

    def __init__(self):
        self._word, self._calls = "", 0

    def push(self, text, *, last):
        pieces = []
        for char in text:
            self._word += char
            if char == " ":
                pieces += self._take()
        return pieces + (self._take() if last else [])

    def _take(self):
        word, self._word = self._word, ""
        if not word.strip().isupper():
            return [ParsedPiece(word)] if word else []
        self._calls += 1
        return [
            ParsedPiece(call=ParsedCallDelta(self._calls - 1, "id", word.strip(), "{}", "whole"))
        ]


TEXT = "<think>\nhm LOUD <|x|>\n</think>\n\nIt <|x|>says GO now<|im_end|> RUN"


def read(parts, **options):
    parser = ParserChain(ReasoningParser(FORMAT), Shouts(), HIDDEN, **options)
    pieces = [piece for part in parts for piece in parser.push(part, last=False)]
    return collect_pieces(pieces + parser.push("", last=True))


def test_calls_are_parsed_after_reasoning_and_special_tokens_are_removed():
    parsed = read([TEXT])
    assert parsed.reasoning == "hm LOUD "
    assert parsed.text == "It says now "
    assert [call.name for call in parsed.calls] == ["GO", "RUN"]


def test_no_cut_changes_the_result():
    whole = read([TEXT])
    for place in range(len(TEXT)):
        assert read([TEXT[:place], TEXT[place:]]) == whole, place
    assert read(list(TEXT)) == whole


def test_first_call_only_emits_one_call():
    parsed = read(list(TEXT), first_call_only=True)
    assert [call.name for call in parsed.calls] == ["GO"]
    assert len(parsed.notes) == 1


def test_pieces_are_emitted_in_order():
    parser = ParserChain(ReasoningParser(FORMAT), Shouts(), HIDDEN)
    pieces = parser.push(TEXT, last=True)
    kinds = ["r" if p.reasoning else "c" if p.call else "t" for p in pieces]
    assert "".join(kinds).replace("tt", "t") == "rtctc"


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_reasoning_tokens_are_counted_alike_in_any_chunks(size):
    tokens = ["<think>", "\n", "hm", ",", " so", "\n", "</think>", "\n\n", "Yes", "."]
    parser = ReasoningParser(FORMAT)
    counter = ReasoningTokenCounter(parser, lambda ids: "".join(tokens[i] for i in ids))
    for at in range(0, len(tokens), size):
        ids = range(at, min(at + size, len(tokens)))
        counter.push(ids)
        parser.push("".join(tokens[i] for i in ids), last=False)
        counter.count_pending()
    parser.push("", last=True)
    counter.count_pending()
    assert counter.count == 5  # with the line ends around


def test_reasoning_without_end_is_counted_to_the_end():
    parser = ReasoningParser(FORMAT, "<think>")
    counter = ReasoningTokenCounter(parser, lambda ids: "ab" * len(ids))
    counter.push([1, 2, 3, 4])
    parser.push("ababab", last=True)  # the last one ended the answer: it is no text
    counter.count_pending()
    assert counter.count == 3
