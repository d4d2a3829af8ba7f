"""Numbers of pooling results: chunks, similarities, and the encodings of vectors."""

import struct

import numpy as np
import pytest

from quire.core.types import Pooled, Pooling, Request, StopConditions
from quire.errors import RequestError
from quire.text import pooling_output
from quire.text.pooling_input import PoolingInput, ScoreInputs
from quire.text.pooling_output import binarize, encode_array


def pooled(values):
    array = np.asarray(values, "<f4")
    return Pooled(array.shape, array.tobytes())


def given(*lengths, **more):
    requests = tuple(
        Request(str(i), (1,) * n, StopConditions(1), pooling=Pooling("embed"))
        for i, n in enumerate(lengths)
    )
    return PoolingInput(requests, sum(lengths), **more)


def test_a_result_is_its_numbers():
    assert pooling_output.combine(given(3), [pooled([1, 2.5])]).tolist() == [1, 2.5]


def test_rows_that_do_not_count_are_left_out():
    made = pooling_output.combine(given(3, kept_rows=(0, 2)), [pooled([[1, 2], [3, 4], [5, 6]])])
    assert made.tolist() == [[1, 2], [5, 6]]


def test_chunks_are_averaged_by_their_tokens():
    chunks = [pooled([1, 0]), pooled([0, 4])]
    assert pooling_output.combine(given(3, 1), chunks).tolist() == [0.75, 1]
    made = pooling_output.combine(given(3, 1, normalize=True), chunks)
    assert made.tolist() == pytest.approx([0.6, 0.8])
    assert made.dtype == np.float32


@pytest.mark.parametrize(
    ("kind", "want"), [("cosine", 0.8), ("dot", 40), ("euclidean", -(45**0.5)), ("manhattan", -9)]
)
def test_scores_of_vectors(kind, want):
    arrays = [np.array([0, 5], np.float32), np.array([6, 8], np.float32)]
    scores = ScoreInputs("bi_encoder", [], [(0, 1), (1, 0)], kind)
    assert pooling_output.compute_scores(scores, arrays) == pytest.approx([want, want])


def test_a_vector_of_zeros_is_like_no_other():
    assert pooling_output.similarity(np.zeros(2), np.ones(2)) == 0


def test_late_interaction_sums_the_best_match_of_each_token():
    query, document = np.array([[1, 0], [0, 2]]), np.array([[3, 1], [1, 1], [0, 4]])
    arrays = [query.astype(np.float32), document.astype(np.float32), np.zeros((0, 2), np.float32)]
    scores = ScoreInputs("late_interaction", [], [(0, 1), (0, 2)], "")
    assert pooling_output.compute_scores(scores, arrays) == [3 + 8, 0]


def test_scores_of_pairs_are_the_results():
    scores = ScoreInputs("cross_encoder", [], [(1,), (0,)], "")
    arrays = [np.array([0.5], np.float32), np.array([0.25], np.float32)]
    assert pooling_output.compute_scores(scores, arrays) == [0.25, 0.5]


@pytest.mark.parametrize(("order", "mark"), [("little", "<"), ("big", ">"), ("native", "=")])
@pytest.mark.parametrize(("dtype", "letter"), [("float32", "f"), ("float16", "e")])
def test_numbers_are_encoded_in_an_order(order, mark, dtype, letter):
    values = [1.5, -2.0, 1e9 if dtype == "float32" else 0.25]
    want = struct.pack(f"{mark}3{letter}", *values)
    assert bytes(encode_array(np.array(values, np.float32), dtype, order)) == want


def test_too_large_a_number_is_infinite_in_float16():
    assert bytes(encode_array(np.array([1e9], np.float32), "float16", "little")) == b"\0\x7c"


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80), (-1.0, 0xBF80), (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82),
        (1 + 2**-8 + 2**-20, 0x3F81), (float("inf"), 0x7F80), (float("nan"), 0x7FC0), (0.0, 0),
    ],
)  # fmt: skip
def test_bfloat16_rounds_to_the_nearest(value, bits):
    array = np.array([value], np.float32)
    assert bytes(encode_array(array, "bfloat16", "little")) == struct.pack("<H", bits)
    assert bytes(encode_array(array, "bfloat16", "big")) == struct.pack(">H", bits)


@pytest.mark.parametrize(
    ("dtype", "value", "code"),
    [
        ("fp8_e4m3", 1.0, 0x38), ("fp8_e4m3", -1.0, 0xB8), ("fp8_e4m3", 448, 0x7E),
        ("fp8_e4m3", 1e9, 0x7E), ("fp8_e4m3", 2**-9, 1), ("fp8_e4m3", 2**-10, 0),
        ("fp8_e4m3", 1.0625, 0x38), ("fp8_e4m3", 1.1875, 0x3A), ("fp8_e4m3", float("nan"), 0x7F),
        ("fp8_e5m2", 1.0, 0x3C), ("fp8_e5m2", -1e9, 0xFB), ("fp8_e5m2", 2**-16, 1),
        ("fp8_e5m2", 1.125, 0x3C), ("fp8_e5m2", 1.375, 0x3E),
    ],
)  # fmt: skip
def test_fp8_rounds_to_the_nearest(dtype, value, code):
    assert bytes(encode_array(np.array([value], np.float32), dtype)) == bytes([code])


def test_bits_of_an_embedding():
    array = np.array([1, -1, 0, -0.5, 1, 1, 1, 1, -1] + [2] * 7, np.float32)
    assert binarize(array).tolist() == [0b10101111, 0b01111111]
    assert binarize(array, signed=True).tolist() == [0b10101111 - 128, 0b01111111 - 128]
    with pytest.raises(RequestError, match="multiple of 8 numbers, and this one has 12"):
        binarize(array[:12])
