"""Expansion of placeholders on token ids, and what a user's text must not become."""

import re

import numpy as np
import pytest

from quire.core.types import MediaTensor
from quire.errors import RequestError
from quire.media.expand import ReadyItem, place_items
from quire.media.processor import Expansion, MediaProcessor, ProcessedMedia, ProcessorFiles
from quire.text.media_prompt import (
    MediaInputs,
    MediaReader,
    PlaceholderGuard,
    as_token_placeholder,
    tokenize_prompt,
)

A, B, ROW, SEP, CLIP = 90, 91, 92, 93, 94


class Family(MediaProcessor):
    modalities = ("image", "video")

    def placeholder(self, modality, index):
        return {"image": "<a>", "video": "<v>"}[modality]


FAMILY = Family(ProcessorFiles({}))


def item(name, *, index=1, rows=2, modality="image", replaces=(A,), **more):
    """SEP, `rows` rows, SEP in place of a placeholder."""
    expansion = Expansion((SEP, *[ROW] * rows, SEP), ((1, rows),), replaces=replaces, **more)
    tensor = MediaTensor("pixels", "uint8", (1,), name.encode())
    media = ProcessedMedia(modality, (tensor,), {"rows": rows})
    return ReadyItem(modality, index, name.encode() * 32, media, expansion)


def test_each_placeholder_becomes_the_tokens_of_its_item():
    placed = place_items([1, A, 2, A, 3], [item("x"), item("y", index=2, rows=1)], FAMILY)
    assert placed.ids == (1, SEP, ROW, ROW, SEP, 2, SEP, ROW, SEP, 3)
    assert [(one.start, one.length, one.runs) for one in placed.items] == [
        (1, 4, ((1, 2),)),
        (6, 3, ((1, 1),)),
    ]
    assert placed.extra_content == ((1, b"x" * 32), (6, b"y" * 32))
    assert placed.rope_positions == b""


def test_modalities_keep_their_own_order():
    items = [item("x"), item("y", index=2), item("v", modality="video", replaces=(B, A))]
    placed = place_items([A, B, A, A], items, FAMILY)
    assert [one.digest[:1] for one in placed.items] == [b"x", b"v", b"y"]


def test_items_without_a_placeholder_are_inserted():
    items = [item("x", replaces=(), insert_at=1), item("y", replaces=(), insert_at=1, rows=1)]
    placed = place_items([1, 2], items, FAMILY)
    assert placed.ids == (1, SEP, ROW, ROW, SEP, SEP, ROW, SEP, 2)
    assert place_items([], [item("x", replaces=(), rows=1)], FAMILY).ids == (SEP, ROW, SEP)


def test_token_ids_may_have_all_tokens_already():
    whole = (1, SEP, ROW, ROW, SEP, 2)
    placed = place_items(whole, [item("x")], FAMILY, may_be_expanded=True)
    assert placed.ids == whole
    assert placed.items[0].start == 1
    mixed = place_items([*whole, A], [item("x"), item("y")], FAMILY, may_be_expanded=True)
    assert [one.start for one in mixed.items] == [1, 6]


def test_a_run_of_equal_ids_is_not_expanded_twice():
    rows = Expansion((A,) * 3, ((0, 3),), replaces=(A,))
    one = ReadyItem("image", 1, b"", ProcessedMedia("image", ()), rows)
    assert place_items([1, A, A, A, 2], [one], FAMILY, may_be_expanded=True).ids == (1, A, A, A, 2)
    assert place_items([1, A, 2], [one], FAMILY, may_be_expanded=True).ids == (1, A, A, A, 2)


@pytest.mark.parametrize(
    ("ids", "count", "reason"),
    [
        ([1], 1, "has 0 placeholders for image, and 1 items"),
        ([A], 2, "has 1 placeholders for image, and 2 items of image were given: write '<a>'"),
        ([A, A, A], 2, "Found more '<a>' placeholders .*: 3 placeholders, 2 items of image"),
    ],
)
def test_numbers_that_disagree_are_errors_with_both(ids, count, reason):
    items = [item(str(i), index=i + 1) for i in range(count)]
    with pytest.raises(RequestError, match=reason):
        place_items(ids, items, FAMILY)


def test_positions_of_several_axes_are_packed():
    class Turned(Family):
        def rope(self, ids, items):
            return np.tile(np.arange(len(ids), dtype=np.int32), (3, 1)), -items[0].sizes["rows"]

    placed = place_items([A], [item("x")], Turned(ProcessorFiles({})))
    assert np.frombuffer(placed.rope_positions, np.int32).reshape(3, 4)[1].tolist() == [0, 1, 2, 3]
    assert placed.rope_delta == -2


# -- text of users --------------------------------------------------------------------------------


def read(reader, *texts, url="data:;base64,AA=="):
    image = {"type": "image_url", "image_url": {"url": url}}
    content = [image, *({"type": "text", "text": one} for one in texts)]
    return reader.read_conversation([{"role": "user", "content": content}])


def test_a_placeholder_in_a_text_of_a_user_is_text(pipeline, tokenizer):
    reader = MediaReader(pipeline, tokenizer, 100)
    found = read(reader, "what is <image> here?", "<s>")
    texts = [part.get("text") for part in found.messages[0]["content"]]
    assert "<image>" not in texts[1]
    assert texts[2] == "<s>"
    text, literals = found.restore(f"<image>{texts[1]}{texts[2]}")
    assert text == "<image>what is <image> here?<s>"
    assert [text[start:end] for start, end in literals] == ["<image>"]
    ids, _ = tokenize_prompt(
        tokenizer, text, MediaInputs((), literals), pipeline.processor, add_special_tokens=False
    )
    assert ids.count(3) == 1
    assert ids.count(1) == 1
    assert tokenizer.decode(ids) == text


def test_marks_are_found_in_every_part_of_a_message():
    guard = PlaceholderGuard(re.compile("<a>"))
    message = {"name": "<a>", "tool_calls": [{"arguments": {"x": ("<a>b", 3)}}], "<a>": None}
    made = guard.protect(message)
    assert "<a>" not in repr(made)
    text, literals = guard.restore(f"{made['name']}{made['tool_calls'][0]['arguments']['x'][0]}!")
    assert (text, literals) == ("<a><a>b!", [(0, 3), (3, 6)])
    assert guard.protect(plain := {"a": ["b"]}) is plain
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deep"):
        guard.protect(deep)


def test_placeholders_that_are_no_tokens_are_found_in_the_text(tokenizer):
    class Numbered(Family):
        text_placeholders = True

        def placeholder(self, modality, index):
            return f"[{modality} {index}]"

    family = Numbered(ProcessorFiles({}))
    items = [item("x", replaces=()), item("y", index=2, replaces=(), rows=1)]
    ids, made = tokenize_prompt(
        tokenizer,
        "a[image 2]b[image 1]",
        MediaInputs(items),
        family,
        add_special_tokens=False,
    )
    a, b = tokenizer.encode("a", False), tokenizer.encode("b", False)
    assert ids == [*a, -2, *b, -1]
    placed = place_items(ids, made, family)
    assert placed.ids == (*a, SEP, ROW, SEP, *b, SEP, ROW, ROW, SEP)
    with pytest.raises(RequestError, match=r"Found more .* placeholders .*: 3 placeholders, 2"):
        tokenize_prompt(
            tokenizer,
            "[image 1][image 2][image 1]",
            MediaInputs(items),
            family,
            add_special_tokens=False,
        )


def test_a_prompt_of_ids_has_the_tokens_of_placeholders_that_are_texts(tokenizer):
    class Around(Family):
        text_placeholders = True

        def placeholder(self, modality, index):
            return "[i]"

        def item_text(self, media, index):
            return "<[i]>"

    family = Around(ProcessorFiles({}))
    one = as_token_placeholder(tokenizer, item("x", replaces=(), rows=1), family)
    before, after = tokenizer.encode("<", False), tokenizer.encode(">", False)
    ids = tokenizer.encode("a[i]b", False)
    placed = place_items(ids, [one], family, may_be_expanded=True)
    whole = (*tokenizer.encode("a", False), *before, SEP, ROW, SEP, *after)
    assert placed.ids == (*whole, *tokenizer.encode("b", False))
    assert placed.items[0].runs == ((2, 1),)
    assert place_items(placed.ids, [one], family, may_be_expanded=True).ids == placed.ids
