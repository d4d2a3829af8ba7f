"""What travels between processes arrives as it was sent."""

import dataclasses

import msgspec
import pytest

from quire import errors
from quire.core.constraint import Constraint
from quire.core.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.core.scheduler_stats import SchedulerStats
from quire.core.sequence_timing import SequenceTiming
from quire.core.tenant_limits import TenantLimits
from quire.core.types import (
    AdapterRef,
    CallOpener,
    ForcedTokens,
    MediaItem,
    MediaTensor,
    Pooling,
    PromptEmbeds,
    Request,
    StopConditions,
    ThinkingBudget,
    TimeRules,
    TokenLogprobs,
    Update,
)
from quire.engine import message_codec
from quire.engine.messages import (
    AddRequests,
    CallReply,
    Hello,
    OutputBatch,
    WireRequest,
    error_from_wire,
    error_to_wire,
    request_from_wire,
    request_to_wire,
)
from quire.errors import EngineAway, Overloaded, RequestError, TooLong, Unsupported

OTHERS = {
    "id": "mine-1",
    "prompt": (5, 6, 7),
    "stop": StopConditions(9, 2, frozenset({1}), frozenset({2, 3})),
    "params": SamplingParams(temperature=0.5, stop=["x"], logit_bias={7: -1.5}, n=2, seed=-(2**63)),
    "n": 2,
    "seed": 2**63 - 1,
    "priority": -3,
    "arrived_at": 12.25,
    "salt": b"\x00\xff",
    "read_prefix_cache": False,
    "parent": "other-1",
    "hold": True,
    "timed": True,
    "constraint": Constraint('{"kind":"regex","pattern":"a"}', "xgrammar"),
    "thinking": ThinkingBudget(40, (7, 8), (9,), ((5,),), (CallOpener((3,), (4, 6)),), (2,)),
    "resumed_tokens": ((4, 5), None),
    "engine_crashes": 2,
    "tenant": b"\x01\xfe",
    "tenant_limits": TenantLimits(2.0, 3, 4000, None, 0.25),
    "deadline_at": 99.5,
    "pooling": Pooling("embed", dimensions=4, returned_token_ids=(1,)),
    "token_types": b"\0\1",
    "extra_content": ((3, b"\x02digest"), (9, b"")),
    "num_beams": 4,
    "prompt_embeds": (PromptEmbeds(1, 2, "bfloat16", b"\x00\xff" * 4),),
    "encoder_prompt": (8, 9),
    "adapter": AdapterRef("mine", b"\x03", "/adapters/mine"),
    "forced": ForcedTokens(1, 3, 9, frozenset({2}), (4, 5), (6,), TimeRules(50, 49, 40, 5)),
    "encoder_media": MediaItem(
        "audio", b"\x05", 0, 2, ((0, 2),), (MediaTensor("x", "float32", (1,), bytes(4)),)
    ),
    "media": (
        MediaItem(
            "image",
            b"\x04" * 32,
            1,
            5,
            ((1, 2), (4, 1)),
            (MediaTensor("pixel_values", "uint8", (3, 2), b"\x00\xff\x80" * 2),),
            bidirectional=True,
        ),
    ),
    "rope_positions": b"\x00\xff\x00\x00" * 3,
    "rope_delta": -7,
    "bidirectional_tokens": 1,
    "speculates": False,
    "prediction": (4, 5),
}


def sent(request):
    (one,) = message_codec.decode_to_engine(
        message_codec.encode_to_engine(AddRequests(1, [request_to_wire(request)]))
    ).requests
    return request_from_wire(one)


def test_a_request_arrives_whole():
    names = [one.name for one in dataclasses.fields(Request)]
    assert sorted(OTHERS) == sorted(names), "a new field of Request: give it a value here"
    assert list(WireRequest.__struct_fields__) == names
    request = Request(**OTHERS)
    assert sent(request) == request
    plain = Request("a", (1,), StopConditions(1))
    assert sent(plain) == plain


def large_request():
    tensors = (
        MediaTensor("pixels", "uint8", (2, 1 << 16), bytes(range(256)) * 512),
        MediaTensor("factors", "float32", (2,), bytes(8)),
        MediaTensor("empty", "int32", (0, 3), b""),
    )
    item = MediaItem("image", b"d", 0, 1, ((0, 1),), tensors)
    return Request("a", (1, 2), StopConditions(1), media=(item, item))


def test_large_tensors_travel_in_frames_of_their_own_which_nothing_copies():
    request = large_request()
    data = request.media[0].tensors[0].data
    frames = message_codec.encode_to_engine(AddRequests(1, [request_to_wire(request)]))
    assert len(frames[0]) < 2000
    assert [one is data for one in frames[1:]] == [True, True]
    views = [memoryview(one) for one in frames]
    (one,) = message_codec.decode_to_engine(views).requests
    assert request_from_wire(one) == request
    assert [item.tensors[0].data is view for item, view in zip(one.media, views[1:])] == [True] * 2


@pytest.mark.parametrize("change", [lambda some: some[:-1], lambda some: [*some, b"x"]])
def test_frames_that_do_not_fit_their_message_are_refused(change):
    frames = message_codec.encode_to_engine(AddRequests(7, [request_to_wire(large_request())]))
    with pytest.raises(msgspec.DecodeError, match=r"missing|more frames"):
        message_codec.decode_to_engine(change(frames))
    assert message_codec.call_id_of(frames[0]) == 7


def test_fields_of_params_that_are_more_than_plain_data_arrive_as_what_they_were():
    params = SamplingParams(
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        repetition_detection={"max_pattern_size": 4, "min_count": 3},
        extra_args={"deep": [{"a": 1.5}]},
        bad_words=["no"],
    )
    params.bad_words_token_ids = [[4], [5, 6]]
    arrived = sent(Request("a", (1,), StopConditions(1), params)).params
    assert arrived == params
    assert arrived.output_kind is RequestOutputKind.DELTA
    assert arrived.stop_strings == []


def test_requests_that_arrived_share_no_list():
    one, two = (
        sent(Request("a", (1,), StopConditions(1))),
        sent(Request("b", (1,), StopConditions(1))),
    )
    one.params.stop_token_ids.append(3)
    assert two.params.stop_token_ids == []
    assert SamplingParams().stop_token_ids == []


def test_only_what_differs_from_the_defaults_travels():
    assert request_to_wire(
        Request("a", (1,), StopConditions(1), SamplingParams(top_k=3))
    ).params == {"top_k": 3}


def test_values_that_cannot_be_sent_are_request_errors():
    for params, error in (
        (SamplingParams(logits_processors=[lambda ids, logits: logits]), Unsupported),
        (SamplingParams(extra_args={"f": object()}), RequestError),
    ):
        with pytest.raises(error):
            sent(Request("a", (1,), StopConditions(1), params))


def test_numbers_and_sets_of_python_code_become_plain():
    class Half(float):
        pass

    params = SamplingParams(temperature=Half(0.5), stop_token_ids={4})
    arrived = sent(Request("a", (1,), StopConditions(1), params)).params
    assert type(arrived.temperature) is float
    assert arrived.temperature == 0.5
    assert arrived.stop_token_ids == [4]


def test_updates_arrive_as_they_are():
    logprobs = [TokenLogprobs([3, 4], [-0.5, -1.0], [1, 2])]
    timing = SequenceTiming(1.0, 2.0, None, *[0.125] * 8)
    updates = [
        Update("a", 0, [3]),
        Update("a", 1, [], "error", None, None, None, 16, "broken"),
        Update("b", 0, [3], "stop", 3, logprobs, logprobs, 16, None, timing),
        Update("c", 0, [], "error", error="too deep", fault="request", param="max_tokens"),
    ]
    news = message_codec.decode_from_engine(
        message_codec.encode(OutputBatch(updates, [CallReply(4, SchedulerStats(*range(15)))]))
    )
    assert news.updates == updates
    assert news.replies[0].result["free_blocks"] == 5


@pytest.mark.parametrize(
    "kind",
    [k for k in vars(errors).values() if isinstance(k, type) and k not in (Overloaded, EngineAway)],
)
def test_errors_arrive_as_what_they_were(kind):
    arrived = error_from_wire(error_to_wire(kind("bad luck")))
    assert type(arrived) is kind
    assert str(arrived) == "bad luck"


def test_errors_keep_what_they_carry():
    assert error_from_wire(error_to_wire(TooLong("no", param="prompt"))).param == "prompt"
    for kind in (Overloaded, EngineAway):
        assert error_from_wire(error_to_wire(kind("no", retry_after_s=2.5))).retry_after_s == 2.5
    foreign = error_from_wire(error_to_wire(ZeroDivisionError("by zero")))
    assert type(foreign) is errors.EngineError
    assert str(foreign) == "ZeroDivisionError: by zero"


def test_the_number_of_a_message_that_cannot_be_read_can_be():
    import msgspec

    assert message_codec.call_id_of(msgspec.msgpack.encode(["AddRequests", 7, "nonsense"])) == 7
    for data in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"a": 1}),
        message_codec.encode(Hello(1, "x")),
    ):
        assert message_codec.call_id_of(data) is None
