"""Results have the fields, defaults and repr of vLLM's."""

import dataclasses

import pytest

from quire.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FlatLogprobs,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    RequestStateStats,
    ScoringOutput,
    ScoringRequestOutput,
)


class Vector:
    """A tensor as far as results look at one."""

    def __init__(self, values, shape):
        self.values, self.shape = values, shape

    def tolist(self):
        return self.values


def test_a_completion_and_a_request_output_are_made_by_position_and_shown_in_full():
    completion = CompletionOutput(
        0, "hi", [1, 2], None, None, finish_reason="stop", stop_reason="x"
    )
    output = RequestOutput("7", "p", [3], None, [completion], True)
    assert completion.finished()
    assert not CompletionOutput(0, "", [], None, None).finished()
    assert repr(output) == (
        "RequestOutput(request_id=7, prompt='p', prompt_token_ids=[3], encoder_prompt=None, "
        "encoder_prompt_token_ids=None, prompt_logprobs=None, outputs=[CompletionOutput(index=0, "
        "text='hi', token_ids=[1, 2], cumulative_logprob=None, logprobs=None, finish_reason=stop, "
        "stop_reason=x)], finished=True, metrics=None, lora_request=None, num_cached_tokens=None)"
    )


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            RequestOutput,
            "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics lora_request "
            "encoder_prompt encoder_prompt_token_ids num_cached_tokens num_cache_creation_tokens "
            "prompt_token_id_logprobs kv_transfer_params ec_transfer_params",
        ),
        (
            CompletionOutput,
            "index text token_ids cumulative_logprob logprobs routed_experts finish_reason stop_reason "
            "lora_request sampling_mask spec_decode_metrics weight_versions",
        ),
        (Logprob, "logprob rank decoded_token"),
        (
            BeamSearchSequence,
            "orig_prompt tokens logprobs lora_request cum_logprob text finish_reason stop_reason",
        ),
        (BeamSearchOutput, "sequences"),
        (
            RequestStateStats,
            "num_generation_tokens num_preemptions arrival_time queued_ts scheduled_ts first_token_ts "
            "last_token_ts first_token_latency is_corrupted",
        ),
    ],
)
def test_the_fields_are_those_users_know(kind, names):
    mine = [field.name for field in dataclasses.fields(kind)]
    assert mine[: len(names.split())] == names.split()


def test_pooled_vectors_become_embeddings_and_classes():
    base = PoolingRequestOutput("1", PoolingOutput(Vector([1.0, 2.0], (2,))), [5, 6])
    embedded = EmbeddingRequestOutput.from_base(base)
    assert embedded.outputs == EmbeddingOutput([1.0, 2.0])
    assert embedded.outputs.hidden_size == 2
    assert repr(embedded) == (
        "EmbeddingRequestOutput(request_id='1', outputs=EmbeddingOutput(hidden_size=2), "
        "prompt_token_ids=[5, 6], num_cached_tokens=0, finished=True)"
    )
    assert ClassificationRequestOutput.from_base(base).outputs.num_classes == 2
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        EmbeddingOutput.from_base(PoolingOutput(Vector([[1.0, 2.0]], (1, 2))))


@pytest.mark.parametrize(("values", "shape"), [(0.5, ()), ([0.5], (1,)), ([[0.5]], (1, 1))])
def test_a_score_is_one_number_of_any_shape(values, shape):
    base = PoolingRequestOutput("1", PoolingOutput(Vector(values, shape)), [5])
    assert ScoringRequestOutput.from_base(base).outputs.score == 0.5


def test_several_numbers_are_no_score():
    with pytest.raises(ValueError, match="one number"):
        ScoringOutput.from_base(PoolingOutput(Vector([0.5, 0.1], (2,))))


# -- flat logprobs -----------------------------------------------------------------------------

ENTRIES = [
    None,
    {3: Logprob(-0.5, 1, "a")},
    {4: Logprob(-1.0, 2, "b"), 5: Logprob(-0.1, 1, None)},
    {},
]


def flat():
    made = FlatLogprobs()
    made.extend(ENTRIES)
    return made


def test_flat_logprobs_read_like_a_list():
    made = flat()
    assert len(made) == 4
    assert list(made) == [entry or {} for entry in ENTRIES]
    assert made[-2] == made[2] == ENTRIES[2]
    assert next(iter(made[2])) == 4  # the order is kept
    with pytest.raises(IndexError):
        made[4]


@pytest.mark.parametrize(
    "cut",
    [slice(1, 3), slice(None), slice(2, 1), slice(-2, None), slice(None, None, 2), slice(3, 9)],
)
def test_a_slice_of_flat_logprobs_is_flat(cut):
    assert list(flat()[cut]) == list(flat())[cut]
    assert isinstance(flat()[cut], FlatLogprobs)


def test_flat_logprobs_are_six_lists():
    made = flat()
    assert made.token_ids == [3, 4, 5]
    assert made.logprobs == [-0.5, -1.0, -0.1]
    assert made.ranks == [1, 2, 1]
    assert made.decoded_tokens == ["a", "b", None]
    assert (made.start_indices, made.end_indices) == ([0, 0, 1, 3], [0, 1, 3, 3])
    assert made == flat()
    assert made[1:2].start_indices == [0]
