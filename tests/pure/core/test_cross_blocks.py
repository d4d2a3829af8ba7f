"""Sources are encoded once, shared by reference count, found again, and forgotten when lost."""

import random
from itertools import chain

import pytest

from quire.core.types import MediaItem, Request, StopConditions
from quire.errors import TooLong
from tests import tiers
from tests.pure.core.workload import Run, Setup, check_outcome, random_run

SOURCE = (1, 2, 3, 4, 5, 1, 2)  # two blocks of four
OTHER = (5, 4, 3)


def ask(name, source=SOURCE, *, n=1, tokens=5, **more):
    return Request(name, (0,), StopConditions(tokens), n=n, encoder_prompt=source, **more)


def finish(setup, requests, **how):
    run = Run(setup, requests)
    out = run.run(**how)
    check_outcome(run, out)
    return run, out


def test_the_sequences_of_a_request_share_the_blocks_of_its_source():
    run = Run(Setup(encoder=(20, 20)), [])
    run.add(ask("a", n=4))
    run.step()
    tables = [[*chain(*seq.cross_tables)] for seq in run.scheduler.sequences()]
    assert len(tables) == 4
    assert len({tuple(table) for table in tables}) == 1
    held = run.kv.pool.size - run.kv.pool.available
    assert held == 2 + 4, "two blocks of the source, and one of each sequence"
    assert run.model.encoded == [SOURCE]


@pytest.mark.parametrize("together", [1, 9])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_source_that_comes_again_is_not_encoded_again(depth, together):
    requests = [ask(f"r{i}", seed=i) for i in range(6)] + [ask("other", OTHER)]
    run, _ = finish(Setup(encoder=(20, 20), depth=depth), requests, add_per_step=together)
    assert run.model.encoded == [SOURCE, OTHER]


def test_a_salt_separates_sources():
    run, _ = finish(Setup(encoder=(20, 20)), [ask("a"), ask("b", salt=b"b"), ask("c", salt=b"b")])
    assert run.model.encoded == [SOURCE, SOURCE]


def test_without_prefix_caching_only_a_request_s_own_sequences_share():
    setup = Setup(encoder=(20, 20), prefix_caching=False)
    run, _ = finish(setup, [ask("a", n=3), ask("b", n=2)])
    assert run.model.encoded == [SOURCE, SOURCE]


def test_the_decoder_s_blocks_of_another_source_are_not_found():
    prompt = (0, 1, 2, 3, 4, 5, 0, 1, 2)
    requests = [
        Request(f"r{i}", prompt, StopConditions(3), encoder_prompt=source)
        for i, source in enumerate((SOURCE, OTHER, SOURCE))
    ]
    run = Run(Setup(encoder=(20, 20)), [])
    cached = []
    for request in requests:
        run.requests = [request]
        run.add(request)
        while not run.scheduler.idle:
            cached += [seq.cached for seq in run.scheduler.sequences()]
            run.step()
        check_outcome(run, run.out)
    assert max(cached) == 8
    assert run.model.encoded == [SOURCE, OTHER]


def test_a_step_encodes_no_more_than_the_budget_and_known_sources_pass():
    run = Run(Setup(encoder=(7, 7)), [])
    for one in (ask("a"), ask("b", OTHER), ask("c")):
        run.add(one)
    run.step()
    assert run.model.encoded == [SOURCE]
    assert len([seq for seq in run.scheduler.sequences() if seq.slot >= 0]) == 2
    run.step()
    assert run.model.encoded == [SOURCE, OTHER]


def test_a_source_beyond_the_limit_is_refused():
    run = Run(Setup(encoder=(7, 5)), [])
    with pytest.raises(TooLong, match="at most 5"):
        run.add(ask("a"))


def test_a_request_that_cannot_fit_counts_its_source():
    run = Run(Setup(encoder=(20, 20), blocks=3), [])
    with pytest.raises(TooLong, match="need 4 KV cache blocks"):
        run.add(ask("a", tokens=8))


@pytest.mark.parametrize("host", [0, 30])
def test_preempted_sequences_find_their_source_or_encode_it_again(host):
    requests = [ask(f"r{i}", (i % 6, *SOURCE), tokens=14) for i in range(6)]
    setup = Setup(encoder=(20, 20), blocks=12, host=host)
    run, out = finish(setup, requests)
    assert out.preemptions
    assert (out.loads > 0) == (host > 0)
    if host:
        assert len(run.model.encoded) == 6, "the host tier keeps sources too"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_source_whose_step_failed_is_encoded_again(depth):
    setup = Setup(encoder=(20, 20), depth=depth, fails=frozenset({1, 4}))
    run, _ = finish(setup, [ask("a"), ask("b"), ask("c", OTHER)], add_per_step=1)
    assert sorted(run.model.encoded) == [SOURCE, OTHER]


def test_a_source_of_non_finite_logits_is_forgotten():
    run = Run(Setup(encoder=(20, 20)), [])
    run.add(ask("a"))
    run.step()
    (seq,) = run.scheduler.sequences()
    run.kv.invalidate(seq)
    assert not any(key in run.kv.pool for key in chain(*run.kv._cross.keys(seq)))


def test_children_of_a_held_request_share_its_source():
    run = Run(Setup(encoder=(20, 20)), [])
    run.add(ask("a", tokens=1, hold=True))
    run.step()
    child = Request(
        "b", (0, run.out.tokens["a", 0][0]), StopConditions(2), encoder_prompt=SOURCE, parent="a"
    )
    other = Request(
        "c", (0, run.out.tokens["a", 0][0]), StopConditions(2), encoder_prompt=OTHER, parent="a"
    )
    run.add(child)
    run.add(other)
    assert [seq.computed for seq in run.scheduler.sequences()] == [1, 0]
    while not run.scheduler.idle:
        run.step()
    run.scheduler.release("a")
    assert run.model.encoded == [SOURCE, OTHER]
    run.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(tiers.amount(25, 400)))
def test_random_requests_with_sources(seed):
    random_run(f"with sources {seed}", sources=True)


def with_images(name, *runs, text=3, **more):
    """Text, and before each part of it neighbouring images: (digest, rows)."""
    prompt, items = [], []
    for run in runs:
        for digest, rows in run:
            items.append(MediaItem("image", digest, len(prompt), 1, (), (), source_rows=rows))
            prompt.append(1)
        prompt += range(text)
    extra = tuple((one.start, one.digest) for one in items)
    stop = StopConditions(more.pop("tokens", 9))
    made = Request(name, tuple(prompt), stop, media=tuple(items), extra_content=extra, **more)
    return made


A, B, C = (b"a", 5), (b"b", 9), (b"c", 2)


def test_neighbouring_images_are_one_source_and_equal_ones_of_a_request_are_shared():
    requests = [
        with_images("two", (A,), (B,)),
        with_images("together", (A, B), n=2),
        with_images("twice", (C,), (C,)),
        with_images("salted", (A,), salt=b"x"),
        ask("none", ()),
    ]
    run, _ = finish(Setup(encoder=(30, 30)), requests)
    assert run.model.encoded == [(b"a",), (b"b",), (b"a", b"b"), (b"c",), (b"a",)]


def test_images_of_one_prompt_with_too_many_positions_are_refused():
    run = Run(Setup(encoder=(13, 13)), [])
    with pytest.raises(TooLong, match="images of the prompt have 14 positions"):
        run.add(with_images("a", (A,), (B,)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(tiers.amount(12, 400)))
def test_random_requests_with_images(seed):
    rng = random.Random(f"images {seed}")
    contents = [(bytes([i]), rng.randrange(1, 12)) for i in range(4)]

    def images():
        return [rng.choices(contents, k=rng.randrange(1, 3)) for _ in range(rng.randrange(3))]

    requests = [
        with_images(f"r{i}", *images(), (), text=rng.randrange(1, 6), n=rng.choice([1, 2]), seed=i)
        for i in range(8)
    ]
    setup = Setup(
        encoder=(60, 60),
        blocks=rng.choice([24, 40, 200]),
        host=rng.choice([0, 20]),
        depth=rng.choice([1, 2]),
        budget=rng.choice([3, 5, 1000]),
        prefix_caching=rng.random() < 0.8,
        fails=frozenset(rng.choices(range(9), k=rng.choice([0, 2]))),
    )
    if not setup.prefix_caching:
        setup.host = 0
    finish(setup, requests, add_per_step=rng.choice([1, 8]))
