"""Media items: encoded once, kept while there is room, never divided, and never mixed up."""

import random

import pytest

from quire.config.memory.part_facts import PAGE_ROWS
from quire.core.media.encoder_cache import EncoderCache, pages_for
from quire.core.media.encoder_slices import EncoderSlices, SliceSizes
from quire.core.media.item_rows import least_tokens, rows_between, start_of_divided_run
from quire.core.scheduling.limits.media_encoder import MediaEncoderLimit, MediaSteps
from quire.core.scheduling.limits.undivided_runs import UndividedRunLimit
from quire.core.types import MediaItem, Request, StopConditions
from quire.errors import RequestError, TooLong, Unsupported
from tests import tiers
from tests.pure.core.workload import Run, Setup, check_outcome, random_media_run


def item(start, rows, content=1, *, modality="image", runs=None, length=None, bidirectional=False):
    runs = runs or ((1, rows),)
    length = length or runs[-1][0] + runs[-1][1] + 1
    return MediaItem(modality, bytes([content]), start, length, runs, (), bidirectional)


def ask(name, *items, tail=3, tokens=4, **more):
    """A request of two tokens before, between and `tail` after the items, which are moved there."""
    prompt, moved = [1, 2], []
    for one in items:
        moved.append(
            MediaItem(
                one.modality, one.digest, len(prompt), one.length, one.runs, (), one.bidirectional
            )
        )
        prompt += [0] * one.length + [3, 4]
    prompt = prompt[:-2] + list(range(tail)) if items else prompt
    extra = tuple((one.start, one.digest) for one in moved)
    stop = StopConditions(tokens)
    return Request(name, tuple(prompt), stop, media=tuple(moved), extra_content=extra, **more)


SIZES = {"max_rows": 64, "cache_rows": 64}


def finish(requests, *, add_per_step=3, **setup):
    run = Run(Setup(**{"media": SIZES} | setup), requests)
    out = run.run(add_per_step=add_per_step)
    check_outcome(run, out)
    return run, out


@pytest.mark.sampled(4)
@pytest.mark.parametrize("budget", range(1, 14))
def test_a_chunk_may_end_at_every_offset_inside_an_item(budget):
    runs = ((1, 3), (5, 2), (8, 1))
    run, _ = finish([ask("a", item(0, 6, runs=runs), item(0, 3, 2))], budget=budget)
    assert run.model.encoded_items == [b"\1", b"\2"]


def test_an_item_of_several_requests_is_encoded_once():
    requests = [ask(f"r{i}", item(0, 20), seed=i) for i in range(4)]
    run, _ = finish(requests, add_per_step=4, prefix_caching=False)
    assert run.model.encoded_items == [b"\1"]
    stats = run.setup.media_limit.stats()
    assert (stats.hits, stats.misses, stats.encoded_rows) == (3, 1, 20)
    assert (stats.cached, stats.cached_bytes, stats.capacity_bytes) == (1, 32, 64)


def test_the_sequences_of_a_request_and_a_preempted_one_use_what_was_encoded():
    requests = [ask(f"r{i}", item(0, 9, i), n=2, tokens=12) for i in range(2)]
    run, out = finish(requests, blocks=12, prefix_caching=False)
    assert out.preemptions
    assert sorted(run.model.encoded_items) == [b"\0", b"\1"]


def test_a_prefix_hit_needs_the_same_item():
    same, other = ask("b", item(0, 9)), ask("c", item(0, 9, 2))
    _, out = finish([ask("a", item(0, 9)), same, other], add_per_step=1)
    assert out.hits == 4, "the updates of b"


def test_a_prefix_hit_behind_an_item_does_not_need_it():
    first, again = ask("a", item(0, 9), tail=9), ask("b", item(0, 9), tail=9, seed=4)
    run = Run(Setup(media=SIZES), [first, again])
    run.add(first)
    for _ in range(6):
        run.step()
    run.setup.media_limit.observe_memory_release()
    run.add(again)
    for _ in range(6):
        run.step()
    assert run.out.finish == {("a", 0): "length", ("b", 0): "length"}
    assert run.model.encoded_items == [b"\1"]


def test_a_text_overtakes_a_prompt_whose_item_must_wait():
    requests = [ask("a", item(0, 60, 1)), ask("b", item(0, 60, 2)), ask("text")]
    run = Run(Setup(media=SIZES), requests)
    for one in requests:
        run.add(one)
    plan = run.scheduler.plan()
    counts = {row.seq.request.id: row.count for row in plan.rows}
    assert counts == {"a": len(requests[0].prompt), "b": 3, "text": 2}


def test_the_budget_bounds_what_a_step_encodes_but_an_item_larger_than_it_runs_alone():
    requests = [ask(f"r{i}", item(0, 20, i)) for i in range(4)]
    run = Run(Setup(media={"max_rows": 41, "cache_rows": 640}), requests)
    for one in requests:
        run.add(one)
    (part,) = run.scheduler.plan().parts
    assert [len(step.encodes) for step in part.ranks] == [2]
    run = Run(Setup(media={"max_rows": 3, "cache_rows": 640}), requests)
    for one in requests:
        run.add(one)
    (part,) = run.scheduler.plan().parts
    assert isinstance(part, MediaSteps)
    assert [len(step.encodes) for step in part.ranks] == [1]


LARGE = {"max_rows": 4096, "cache_rows": 8192}


@pytest.mark.parametrize("rows_beside", [(300, 1), (200, 2), (600, 1)])
@pytest.mark.parametrize("paced", [False, True])
def test_a_step_beside_decoding_rows_of_several_ranks_encodes_less(rows_beside, paced):
    """A first step decodes nothing yet; in the second the first request does."""
    rows, beside = rows_beside
    images = [ask(f"r{i}", item(0, rows, i)) for i in range(8)]
    counts = []
    for texts in ([], [ask("text", tail=5, tokens=100)]):
        setup = Setup(media=LARGE | {"paced": paced}, budget=8192, blocks=4000, ranks=2)
        run = Run(setup, [*texts, *images])
        for one in texts:
            run.add(one)
            run.step()
        for one in images:
            run.add(one)
        found = next(one for one in run.scheduler.plan().parts if isinstance(one, MediaSteps))
        counts.append(max(len(step.encodes) for step in found.ranks))
    assert counts == [4, beside if paced else 4]


def slices_beside(texts, images, whole_rows=0):
    """Run texts, and images behind them. Returns each step's slice, (items, blocks) or None, from
    the first to the last that has one, and rows of the step."""
    media = LARGE | {"slices": SliceSizes(8, 64, whole_rows)}
    run = Run(Setup(media=media, budget=8192, blocks=4000), [*texts, *images])
    for one in texts:
        run.add(one)
    run.step()  # their prompts
    found, submit = [], run.model.submit

    def record(plan):
        part = next((one for one in plan.parts if isinstance(one, MediaSteps)), None)
        rows = part and [one.item.num_rows for step in part.ranks for one in step.encodes]
        assert not rows or max(rows) <= whole_rows, "a step beside decoding rows encodes it whole"
        one = part and part.slice
        digests = one and b"".join(each.item.digest for each in one.encodes)
        found.append((one and (digests, one.blocks), [row.seq.request.id for row in plan.rows]))
        submit(plan)

    run.model.submit = record
    for one in images:
        run.add(one)
    while run.in_flight or not run.scheduler.idle:
        run.step()
    check_outcome(run, run.out)
    return run, found


def test_an_item_is_encoded_in_slices_beside_decoding_rows_and_its_prompt_continues_then():
    texts = [ask(f"t{i}", tail=5, tokens=100) for i in range(2)]
    run, found = slices_beside(texts, [ask("a", item(0, 256, 1)), ask("b", item(0, 100, 2))])
    slices = [one for one, _ in found]
    quarters = [(b"\1", (i, i + 2)) for i in (0, 2, 4, 6)]
    assert slices[:6] == [*quarters, (b"\2", (0, 5)), (b"\2", (5, 8))]
    assert not any(slices[6:])
    firsts = {name: next(i for i, (_, ids) in enumerate(found) if name in ids) for name in "ab"}
    assert firsts == {"a": 0, "b": 0}  # the tokens before the item
    taking = [i for i, (_, ids) in enumerate(found) if "a" in ids][1]
    assert taking == 4  # the step after its last slice
    stats = run.setup.media_limit.stats()
    assert (stats.misses, stats.hits, stats.encoded_rows) == (2, 0, 356)


def test_an_item_of_few_rows_is_not_divided_where_those_are_quick():
    images = [ask("a", item(0, 40, 1)), ask("b", item(0, 256, 2)), ask("c", item(0, 41, 3))]
    run, found = slices_beside([ask("t", tail=5, tokens=100)], images, whole_rows=40)
    assert {one[0] for one, _ in found if one} == {b"\2", b"\3"}
    assert run.model.encoded_items.count(b"\1") == 1


def test_an_item_whose_space_others_took_meanwhile_is_dropped():
    cache = EncoderCache(12)
    slices, one, large = (
        EncoderSlices(SliceSizes(2, 64), cache),
        item(0, 130, 1),
        item(0, 12 * PAGE_ROWS, 2),
    )
    for each in (one, large):
        cache.add_reference(each.digest)
    assert slices.want(one)
    assert slices.advance(1, ()).blocks == (0, 1)
    cache.store(large.digest, large.num_rows, ())
    slices.wanted.clear()
    assert slices.advance(1, ()) is None
    assert large.digest in cache
    assert not slices.want(one)


def test_slices_are_as_large_as_many_waiting_prompts_need():
    """Small items are encoded together. Many that wait for few decoding rows take larger slices."""
    text = [ask("t", tail=5, tokens=100)]
    small = [ask(f"r{i}", item(0, 30, i)) for i in range(3)]
    _, found = slices_beside(text, small)
    assert [one for one, _ in found[:1]] == [(b"\0\1\2", (0, 8))]
    _, found = slices_beside(text, [ask(f"r{i}", item(0, 256, i)) for i in range(4)])
    assert [one for one, _ in found[:1]] == [(b"\0", (0, 8))]


def test_a_run_that_must_not_be_divided_is_computed_whole():
    one = item(0, 20, bidirectional=True)
    finish([ask(f"r{i}", one) for i in range(6)], budget=22, block_size=4)
    with pytest.raises(TooLong, match=r"20 tokens.*at most 19.*max_num_batched_tokens"):
        UndividedRunLimit(19).check_request(ask("a", one))


def test_a_prefix_hit_ends_before_a_run_that_it_would_divide():
    one = item(0, 20, bidirectional=True)
    first, again = ask("a", one, tail=0), ask("b", one, tail=0)
    longer = ask("c", one, one, tail=1)
    run, _ = finish([first, again, longer], add_per_step=1, block_size=4)
    causal = [ask(each.id, *[item(0, 20)] * len(each.media), tail=0) for each in (first, again)]
    found = [
        finish(given, add_per_step=1, block_size=4)[1].hits for given in ([first, again], causal)
    ]
    assert found == [0, 4], "the updates of b"
    assert run.model.encoded_items == [b"\1"]


def test_which_positions_take_rows():
    one = item(10, 6, runs=((1, 3), (5, 2), (8, 1)), bidirectional=True)
    assert [tuple(run) for run in rows_between(one, 12, 16)] == [(12, 1, 2), (15, 3, 1)]
    request = ask("a", one)
    assert [start_of_divided_run(request, end) for end in range(2, 12)] == [
        None, None, 3, 3, None, None, 7, None, None, None
    ]  # fmt: skip
    seq = next(Run(Setup(), []).scheduler.sequences(), None)
    assert seq is None
    run = Run(Setup(media=SIZES), [])
    run.add(request)
    (seq,) = run.scheduler.sequences()
    found = []
    for seq.planned in range(2, 12):
        found.append(least_tokens(seq))
    assert found == [1, 3, 1, 1, 1, 2, 1, 1, 1, 1]


def refused(request, **sizes):
    limit = MediaEncoderLimit(("image",), **SIZES | sizes, row_bytes=1)
    with pytest.raises(RequestError) as caught:
        limit.check_request(request)
    return caught.value


def test_what_no_step_could_encode_is_refused_with_the_numbers():
    error = refused(ask("a", item(0, 65)))
    assert isinstance(error, TooLong)
    assert str(error) == (
        "the image at position 2 of the prompt takes 65 embeddings, and the encoder cache holds "
        "64: make it smaller, or raise mm_encoder_cache_gb"
    )
    error = refused(ask("a", item(0, 40), item(0, 40, 2)), whole_prompts=True)
    assert "80 embeddings" in str(error)
    assert "send fewer" in str(error)
    error = refused(ask("a", item(0, 3, modality="audio")))
    assert isinstance(error, Unsupported)
    assert str(error) == "this model reads no audio, but image"


def test_items_that_do_not_agree_with_the_prompt_are_refused():
    good = ask("a", item(0, 3))
    (one,) = good.media

    def changed(**fields):
        values = {name: getattr(one, name) for name in MediaItem.__slots__} | fields
        return MediaItem(**values)

    def request(*items, **more):
        extra = tuple((each.start, each.digest) for each in items)
        fields = {"extra_content": extra, **more}
        return Request("a", good.prompt, StopConditions(1), media=items, **fields)

    MediaEncoderLimit(("image",), **SIZES, row_bytes=1).check_request(good)
    for wrong in (
        request(changed(start=len(good.prompt) - 1)),
        request(one, changed(start=one.end - 1)),
        request(changed(runs=((0, 2), (1, 2)))),
        request(changed(runs=((4, 2),))),
        request(one, extra_content=()),
        request(one, rope_positions=bytes(7)),
    ):
        assert refused(wrong).param in ("image", "prompt")


def test_the_cache_keeps_its_pages_whatever_happens():
    """10,000 random operations on a cache that holds a few of the items."""
    rng = random.Random(5)
    cache, sizes, references = EncoderCache(12), {}, []
    for _ in range(10_000):
        digest = bytes([rng.randrange(40)])
        rows = sizes.setdefault(digest, rng.randrange(1, 5 * PAGE_ROWS))
        match rng.randrange(20):
            case 0 | 1 | 2:
                cache.add_reference(digest)
                references.append(digest)
            case 3 | 4 | 5 if references:
                cache.remove_reference(references.pop(rng.randrange(len(references))))
            case 6 if rng.random() < 0.01:
                cache.clear()
            case _ if digest in cache:
                cache.touch(digest)
                assert len(cache.pages(digest)) == pages_for(rows)
            case _:
                others = [one for one in sizes if one in cache]
                kept = {one for one in others[:2] if pages_for(sizes[one]) <= 3}
                before = {one: cache.pages(one) for one in kept}
                unreferenced = [one for one in others if not cache.is_referenced(one)]
                pages = cache.store(digest, rows, kept)
                assert len(pages) == pages_for(rows)
                assert {one: cache.pages(one) for one in kept} == before
                lost = [one for one in others if one not in cache]
                if any(cache.is_referenced(one) for one in lost):
                    assert not [one for one in unreferenced if one in cache and one not in kept]
        cache.check()
    assert cache.evictions > 1000


@pytest.mark.parametrize("seed", range(tiers.amount(15, 600)))
def test_requests_with_items_have_their_outputs_whatever_the_engine_is(seed):
    random_media_run(seed)
