"""Fill in the middle: a prompt with a suffix, for code models with special tokens for it.

    prefix mark | prefix | suffix mark | suffix | middle mark

Codestral has no middle mark and begins with the suffix.
The model continues with what belongs between the two. Which family a model is of follows from the
marks alone. Formats: the model cards and papers of the families named in FORMATS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import RequestError
from quire.text.tokenizing.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FillInMiddleFormat:
    """The special tokens of a model family. middle: None if the prefix comes last."""

    family: str
    prefix: str
    suffix: str
    middle: str | None


FORMATS = (
    FillInMiddleFormat("Qwen-Coder", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    FillInMiddleFormat("StarCoder", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    FillInMiddleFormat("SantaCoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    FillInMiddleFormat("DeepSeek-Coder", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FillInMiddleFormat("CodeLlama", "▁<PRE>", "▁<SUF>", "▁<MID>"),
    FillInMiddleFormat("Codestral", "[PREFIX]", "[SUFFIX]", None),
)
_PROBE = "☺"  # rarely joins with what follows; where it does, the text is encoded alone


def build_prompt(
    tokenizer: Tokenizer, prefix: str | Sequence[int], suffix: str, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """Return the ids of a prompt whose completion is the text between prefix and suffix.

    Raises: RequestError if the vocabulary has no marks.
    """
    vocab = tokenizer.get_added_vocab()
    for form in FORMATS:
        marks = [mark for mark in (form.prefix, form.suffix, form.middle) if mark is not None]
        if all(mark in vocab for mark in marks):
            break
    else:
        families = ", ".join(form.family for form in FORMATS)
        raise RequestError(
            "suffix: this model does not fill in the middle, its vocabulary has no marks for it "
            f"(those of {families} are supported)",
            param="suffix",
        )
    before = tokenizer.encode(prefix, False) if isinstance(prefix, str) else list(prefix)
    begins = tokenizer.encode("", add_special_tokens) if add_special_tokens else []
    begins = [one for one in begins if one != tokenizer.eos_token_id]
    opening = [vocab[form.prefix], *before]
    closing = [vocab[form.suffix], *_encode_inner(tokenizer, suffix)]
    if form.middle is None:
        return (*begins, *closing, *opening)
    return (*begins, *opening, *closing, vocab[form.middle])


def _encode_inner(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text that does not begin a sentence: without the space that SentencePiece adds."""
    probe, whole = tokenizer.encode(_PROBE, False), tokenizer.encode(_PROBE + text, False)
    if whole[: len(probe)] == probe:
        return whole[len(probe) :]
    return tokenizer.encode(text, False)
