"""Updates of the engine become the outputs of vLLM's API."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.sequence_timing import SequenceTiming
from quire.core.types import TokenLogprobs, Update
from quire.text.input_processor import InputProcessor
from quire.text.output.output_processor import RequestOutputProcessor
from tests.pure.text.made import face

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
CUMULATIVE = RequestOutputKind.CUMULATIVE
TOKENIZER = face("byte_level")
EOS = TOKENIZER.eos_token_id
INPUTS = InputProcessor(TOKENIZER, max_model_len=4096, vocab_size=1000, max_logprobs=-1)


def assembler(prompt="hello", clock=None, interval=1, **fields):
    prepared = INPUTS.process(
        prompt, SamplingParams(**{"max_tokens": None} | fields), request_id="r"
    )
    return RequestOutputProcessor(prepared, TOKENIZER, clock=clock, stream_interval=interval)


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def updates(ids, finish="length", chunks=1, index=0, reason=None, logprobs=False):
    """One update per chunk of ids, the last one with the finish."""
    pieces = [ids[i : i + chunks] for i in range(0, len(ids), chunks)] or [[]]
    return [
        Update(
            "r", index, piece,
            finish if i == len(pieces) - 1 else None,
            reason if i == len(pieces) - 1 else None,
            logprobs=[TokenLogprobs([t, 1], [-float(t), -0.5], [2, 1]) for t in piece] if logprobs else None,
        )
        for i, piece in enumerate(pieces)
    ]  # fmt: skip


def push(to, news):
    """(outputs, aborted): as an engine would, which stops sending after an abort."""
    outputs, aborted = [], set()
    for update in news:
        if update.index in aborted:
            continue
        output = to.push(update)
        aborted.update(to.aborts)
        if output is not None:
            outputs.append(output)
    return outputs, aborted


# -- kinds -------------------------------------------------------------------------------------


@given(text=st.text(max_size=20), chunks=st.integers(1, 4), stop=st.sampled_from(["", "zz"]))
@settings(deadline=None)
def test_the_output_kinds_agree(text, chunks, stop):
    ids = ids_of("x" + text.encode("utf-8", "ignore").decode())
    told = {}
    for kind in RequestOutputKind:
        to = assembler(output_kind=kind, stop=stop or None)
        outputs, _ = push(to, updates(ids, chunks=chunks))
        parts = [output.outputs[0] for output in outputs]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        if kind is DELTA:
            told[kind] = "".join(p.text for p in parts), [i for p in parts for i in p.token_ids]
        else:
            told[kind] = parts[-1].text, list(parts[-1].token_ids)
        if kind is CUMULATIVE:
            for a, b in itertools.pairwise(parts):
                assert b.text.startswith(a.text)
                assert b.token_ids[: len(a.token_ids)] == a.token_ids
        assert parts[-1].finish_reason == "length"
    assert told[DELTA] == told[CUMULATIVE] == told[FINAL]


def test_an_output_that_was_given_out_does_not_change():
    to = assembler(logprobs=1)
    first = to.push(updates(ids_of("hello world"), logprobs=True)[0])
    before = repr(first.outputs)
    push(to, updates(ids_of(" world and"), logprobs=True))
    assert repr(first.outputs) == before


def test_the_stream_interval_gathers_tokens():
    to = assembler(output_kind=DELTA, interval=3)
    outputs, _ = push(to, updates(list(range(100, 108))))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 3, 3, 1]
    to = assembler(output_kind=DELTA, interval=3, stream_interval=1)
    assert len(push(to, updates(list(range(100, 108))))[0]) == 8


def test_facts_about_the_request_are_on_every_output():
    to = assembler("hello world")
    output = to.push(Update("r", 0, ids_of("x"), cached_tokens=1))
    assert (output.request_id, output.prompt, output.num_cached_tokens) == ("r", "hello world", 1)
    assert output.prompt_token_ids == ids_of("hello world")


# -- the end -----------------------------------------------------------------------------------


def test_eos_has_no_stop_reason_and_is_no_text():
    output = push(assembler(output_kind=FINAL), updates([*ids_of("hi"), EOS], "stop"))[0][
        -1
    ].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("hi", "stop", None)
    assert output.token_ids[-1] == EOS


def test_a_stop_token_stays_among_the_ids_and_is_text_only_if_requested():
    ids = [*ids_of("hi"), *ids_of("!")]
    for include, text in ((False, "hi"), (True, "hi!")):
        to = assembler(
            output_kind=FINAL, stop_token_ids=ids[-1:], include_stop_str_in_output=include
        )
        output = push(to, updates(ids, "stop", reason=ids[-1]))[0][-1].outputs[0]
        assert (output.text, output.stop_reason, output.token_ids) == (text, ids[-1], ids)


def test_the_last_token_is_text_when_the_length_ended_it():
    assert (
        push(assembler(output_kind=FINAL), updates(ids_of("hi!")))[0][-1].outputs[0].text == "hi!"
    )


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_the_last_token_is_text_when_the_text_is_whole(kind, stop):
    news = updates(ids_of("hi!"), "stop")
    news[-1] = news[-1]._replace(last_token_is_text=True)
    outputs, _ = push(assembler(output_kind=kind, stop=stop), news)
    last = outputs[-1].outputs[0]
    assert last.finish_reason == "stop"
    shown = outputs if kind is DELTA else outputs[-1:]
    assert "".join(one.outputs[0].text for one in shown) == "hi!"


def test_an_error_of_the_request_comes_as_an_exception_to_raise():
    news = Update("r", 0, [], "error", error="no", fault="request", param="max_tokens")
    output = assembler(output_kind=FINAL).push(news)
    assert (output.error, str(output.fault), output.fault.param) == ("no", "no", "max_tokens")
    ours = assembler(output_kind=FINAL).push(Update("r", 0, [], "error", error="lost"))
    assert (ours.error, ours.fault) == ("lost", None)


def test_half_a_character_at_the_end_is_a_hole():
    ids = ids_of("a🦊")[:-1]
    for kind in RequestOutputKind:
        outputs, _ = push(assembler(output_kind=kind), updates(ids))
        text = (
            "".join(o.outputs[0].text for o in outputs)
            if kind is DELTA
            else outputs[-1].outputs[0].text
        )
        assert text == "a\ufffd"


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("chunks", [1, 2, 100])
@pytest.mark.parametrize(("include", "text"), [(False, "one two th"), (True, "one two three")])
def test_a_stop_string_cuts_text_and_tokens_and_requests_an_abort(kind, chunks, include, text):
    ids = ids_of("one two three four")
    completing = next(n for n in range(len(ids)) if "three" in TOKENIZER.decode(ids[:n]))
    to = assembler(output_kind=kind, stop=["ree"], include_stop_str_in_output=include, logprobs=1)
    news = updates([*ids, *ids_of(" and more")], chunks=chunks, logprobs=True)
    outputs, aborted = push(to, news)
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "ree")
    assert to.finished
    assert outputs[-1].finished
    assert aborted == ({0} if chunks < 100 else set())  # the engine had ended it anyway
    parts = [o.outputs[0] for o in outputs] if kind is DELTA else [last]
    assert "".join(p.text for p in parts) == text
    assert [i for p in parts for i in p.token_ids] == ids[:completing]
    assert sum(len(p.logprobs) for p in parts) == completing
    assert last.cumulative_logprob == -sum(ids[:completing])
    assert to.push(Update("r", 0, [5])) is None  # a step that was in flight


def test_text_that_may_begin_a_stop_string_is_held_back_until_the_end():
    to = assembler(output_kind=DELTA, stop=["END"])
    outputs, _ = push(to, updates(ids_of("the EN"), chunks=1))
    assert "".join(o.outputs[0].text for o in outputs) == "the EN"
    assert "EN" not in "".join(o.outputs[0].text for o in outputs[:-1])


def test_stop_strings_count_only_after_min_tokens():
    ids = [ids_of("a")[0]] * 6
    for least, length in ((0, 1), (3, 4), (6, 6)):
        to = assembler(output_kind=FINAL, stop=["a"], min_tokens=least)
        output = push(to, updates(ids))[0][-1].outputs[0]
        assert len(output.token_ids) == length
        assert output.finish_reason == ("length" if least == 6 else "stop")


def test_errors_and_aborts_are_the_finish():
    to = assembler(output_kind=FINAL)
    to.push(Update("r", 0, ids_of("hi")))
    output = to.push(Update("r", 0, [], "error", error="the device is gone"))
    assert (output.outputs[0].finish_reason, output.error) == ("error", "the device is gone")
    assert output.outputs[0].text == "hi"
    output = assembler(output_kind=DELTA).push(Update("r", 0, [], "abort"))
    assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("abort", "")


def test_without_text_there_is_no_text():
    output = push(assembler(detokenize=False, logprobs=0), updates(ids_of("hi"), logprobs=True))[0][
        -1
    ]
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == ids_of("hi")
    assert next(iter(output.outputs[0].logprobs[0].values())).decoded_token is None


def test_special_tokens_in_the_text_follow_the_parameters():
    ids = ids_of("a<|im_start|>b")
    assert push(assembler(output_kind=FINAL), updates(ids))[0][-1].outputs[0].text == "ab"
    to = assembler(output_kind=FINAL, skip_special_tokens=False)
    assert push(to, updates(ids))[0][-1].outputs[0].text == "a<|im_start|>b"


# -- several answers ---------------------------------------------------------------------------


def interleaved(answers, **options):
    streams = [updates(ids, index=i, **options) for i, ids in enumerate(answers)]
    return [u for group in zip(*streams) for u in group]


def test_several_answers_come_together_at_the_end():
    answers = [ids_of("aaa bbb"), ids_of("ccc ddd")]
    assert len(answers[0]) == len(answers[1])
    to = assembler(n=2, output_kind=FINAL)
    (output,), _ = push(to, interleaved(answers))
    assert [o.index for o in output.outputs] == [0, 1]
    assert [o.text for o in output.outputs] == ["aaa bbb", "ccc ddd"]
    assert output.finished


def test_several_answers_stream_one_by_one():
    answers = [ids_of("aaa"), ids_of("ccc")]
    outputs, _ = push(assembler(n=2, output_kind=DELTA), interleaved(answers))
    assert [len(o.outputs) for o in outputs] == [1] * len(outputs)
    for i, text in enumerate(("aaa", "ccc")):
        assert "".join(o.outputs[0].text for o in outputs if o.outputs[0].index == i) == text
    assert [o.finished for o in outputs][-2:] == [False, True]


def test_a_stop_string_ends_only_its_own_answer():
    to = assembler(n=2, output_kind=FINAL, stop=["STOP"])
    outputs, aborted = push(to, updates(ids_of("a STOP b")) + updates(ids_of("c"), index=1))
    assert aborted == {0}
    assert to.aborts == []  # told once, after the push that found it
    assert [o.text for o in outputs[0].outputs] == ["a ", "c"]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_best_of_returns_the_likeliest_and_hides_the_logprobs(kind):
    to = assembler(n=2, best_of=3, output_kind=kind)
    news = []
    for i, value in enumerate((-3.0, -1.0, -2.0)):
        lp = [TokenLogprobs([50 + i], [value], [1])]
        news.append(Update("r", i, [50 + i], "length", logprobs=lp))
    (output,), _ = push(to, news)
    assert [o.token_ids for o in output.outputs] == [[51], [52]]
    assert [o.index for o in output.outputs] == [0, 1]
    assert [o.cumulative_logprob for o in output.outputs] == [-1.0, -2.0]
    assert [o.logprobs for o in output.outputs] == [None, None]


# -- logprobs ----------------------------------------------------------------------------------


def test_the_chosen_token_is_first_and_each_token_is_there_once():
    to = assembler(logprobs=2, output_kind=FINAL)
    chosen_is_not_among = TokenLogprobs([9, 5, 6], [-3.0, -0.1, -0.2], [7, 1, 2])
    chosen_is_among = TokenLogprobs([6, 5, 6], [-0.2, -0.1, -0.2], [2, 1, 2])
    output = to.push(
        Update("r", 0, [9, 6], "length", logprobs=[chosen_is_not_among, chosen_is_among])
    )
    first, second = output.outputs[0].logprobs
    assert list(first) == [9, 5, 6]
    assert list(second) == [6, 5]
    assert (first[9].logprob, first[9].rank, first[9].decoded_token) == (
        -3.0,
        7,
        TOKENIZER.decode([9]),
    )
    assert output.outputs[0].cumulative_logprob == pytest.approx(-3.2)


def test_without_logprobs_there_is_no_sum():
    output = push(assembler(output_kind=FINAL), updates(ids_of("hi")))[0][-1].outputs[0]
    assert output.cumulative_logprob is None
    assert output.logprobs is None


def prompt_news(positions):
    return [TokenLogprobs([i, 1], [-float(i), -0.5], [3, 1]) for i in positions]


def test_prompt_logprobs_begin_with_none_and_come_in_chunks():
    for kind, last in ((FINAL, True), (CUMULATIVE, True), (DELTA, False)):
        to = assembler([10, 11, 12, 13], prompt_logprobs=1, output_kind=kind)
        assert to.push(Update("r", 0, [], prompt_logprobs=prompt_news([11, 12]))) is None
        first = to.push(Update("r", 0, [7], prompt_logprobs=prompt_news([13])))
        final = to.push(Update("r", 0, [8], "length"))
        seen = (final if last else first).prompt_logprobs
        assert [None if one is None else list(one) for one in seen] == [
            None,
            [11, 1],
            [12, 1],
            [13, 1],
        ]
        if not last:
            assert final.prompt_logprobs is None  # told once


def test_cached_positions_of_a_prompt_have_no_logprobs():
    to = assembler([10, 11, 12, 13], prompt_logprobs=1, output_kind=FINAL)
    news = prompt_news([13])
    seen = to.push(
        Update("r", 0, [7], "length", prompt_logprobs=news, cached_tokens=2)
    ).prompt_logprobs
    assert [one is None for one in seen] == [True, True, True, False]


def test_flat_logprobs_hold_the_same():
    plain, flat = (
        assembler([10, 11], prompt_logprobs=1, logprobs=1, output_kind=FINAL) for _ in range(2)
    )
    flat = RequestOutputProcessor(_flat(), TOKENIZER)
    seen = []
    for to in (plain, flat):
        to.push(Update("r", 0, [], prompt_logprobs=prompt_news([11])))
        seen.append(push(to, updates([7, 8], logprobs=True))[0][-1])
    assert list(seen[1].outputs[0].logprobs) == seen[0].outputs[0].logprobs
    assert list(seen[1].prompt_logprobs) == [{}, seen[0].prompt_logprobs[1]]


def _flat():
    params = SamplingParams(max_tokens=None, prompt_logprobs=1, logprobs=1, output_kind=FINAL)
    prepared = INPUTS.process([10, 11], params, request_id="r")
    prepared.params.flat_logprobs = True
    return prepared


# -- times -------------------------------------------------------------------------------------


def test_times_are_kept_when_there_is_a_clock():
    times = iter([10.0, 12.0, 15.0])
    to = assembler(clock=lambda: next(times), output_kind=FINAL)
    outputs, _ = push(to, updates(ids_of("abc")[:3]))
    stats = outputs[-1].metrics
    assert (stats.num_generation_tokens, stats.first_token_ts, stats.last_token_ts) == (
        3,
        10.0,
        15.0,
    )
    assert stats.first_token_latency == 10.0
    assert push(assembler(output_kind=FINAL), updates([5]))[0][-1].metrics is None


def test_metrics_have_the_times_of_queueing_and_scheduling():
    to = assembler(output_kind=DELTA, clock=lambda: 9.0)
    timing = SequenceTiming(2.0, 8.0, 7.0, 1.0, 2.0, 2.0, 0.0, 0.0, 1.0, 0.0, 0.0, preemptions=4)
    stats = to.push(Update("r", 0, [5], "length", timing=timing)).metrics
    assert (stats.queued_ts, stats.scheduled_ts, stats.num_preemptions) == (2.0, 5.0, 4)


def test_random_streams_end_exactly_once():
    rng = random.Random(0)
    for _ in range(200):
        n = rng.randint(1, 3)
        to = assembler(
            n=n,
            output_kind=rng.choice(list(RequestOutputKind)),
            stop=rng.choice([None, ["e"], ["th"]]),
        )
        streams = [
            updates(
                ids_of("the quick brown fox")[: rng.randint(0, 8)],
                rng.choice(["stop", "length", "abort", "error"]),
                index=i,
            )
            for i in range(n)
        ]
        outputs = []
        live = list(range(n))
        while live:
            i = rng.choice(live)
            output = to.push(streams[i].pop(0))
            if i in to.aborts or not streams[i]:
                live.remove(i)
            if output:
                outputs.append(output)
        assert [o.finished for o in outputs].count(True) == 1
        assert outputs[-1].finished
        assert to.finished
