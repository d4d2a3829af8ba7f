"""Tensors of media items: what the engine refuses, and what a continued request does not repeat."""

import struct
from dataclasses import replace

import pytest

from quire.core.media.item_tensors import check_tensors, with_tensors_of, without_tensors
from quire.core.scheduling.limits.media_encoder import MediaEncoderLimit
from quire.core.types import MediaItem, MediaTensor, Request, StopConditions
from quire.errors import RequestError

PIXELS = MediaTensor("pixels", "float32", (2, 3), bytes(24))


def item(number=0, start=1, tensors=(PIXELS,)):
    return MediaItem("image", b"%d" % number, start, 2, ((0, 2),), tensors)


def ask(*items, **fields):
    extra = tuple((one.start, one.digest) for one in items)
    return Request("a", (5,) * 9, StopConditions(3), media=items, extra_content=extra, **fields)


def test_a_continued_request_gets_the_tensors_of_its_parent():
    parent = ask(item(0), item(1, 4))
    child = without_tensors(replace(parent, id="b", parent="a"))
    assert [one.tensors for one in child.media] == [(), ()]
    check_tensors(child)
    found = with_tensors_of(child, parent)
    assert found.media == parent.media
    assert found.media[0].tensors[0] is PIXELS
    other = replace(child, media=(*child.media[:1], replace(child.media[1], digest=b"other")))
    with pytest.raises(RequestError, match="has no content"):
        with_tensors_of(other, parent)
    recording = replace(ask(), encoder_prompt=(0,) * 4, encoder_media=item())
    bare = without_tensors(replace(recording, parent="a"))
    assert bare.encoder_media.tensors == ()
    assert with_tensors_of(bare, recording) == replace(recording, parent="a")


@pytest.mark.parametrize(
    "tensor",
    [
        replace(PIXELS, data=bytes(23)),
        replace(PIXELS, dtype="float64"),
        replace(PIXELS, shape=(2, -3)),
        replace(PIXELS, shape=(2, 3, 1 << 40)),
    ],
)
def test_tensors_have_the_bytes_of_their_shape(tensor):
    check_tensors(ask(item()))
    with pytest.raises(RequestError, match="position 1 of the prompt has"):
        check_tensors(ask(item(tensors=(tensor,))))
    with pytest.raises(RequestError, match="has no content"):
        check_tensors(ask(item(tensors=())))


def positions(*last):
    return struct.pack("<27i", *range(9), *range(9), *range(8), *last)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_positions": positions(16)}, r"\[0, 16\)"),
        ({"rope_positions": positions(-1)}, r"\[0, 16\)"),
        ({"rope_positions": positions(3), "rope_delta": 8}, r"\[0, 16\)"),
        ({"bidirectional_tokens": 10}, "prompt has 9"),
    ],
)
def test_the_engine_checks_what_a_client_computed(fields, words):
    limit = MediaEncoderLimit(
        ("image",), max_rows=8, cache_rows=64, row_bytes=1, counts={"image": 2}, max_len=16
    )
    limit.check_request(ask(item(), item(1, 4), rope_positions=positions(15), rope_delta=7))
    with pytest.raises(RequestError, match=words):
        limit.check_request(ask(item(), **fields))
    with pytest.raises(RequestError, match="At most 2 image"):
        limit.check_request(ask(item(), item(1, 3), item(2, 5)))
