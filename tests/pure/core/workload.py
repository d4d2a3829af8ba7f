"""Random requests and engine configurations, and the invariants of a run.

Prompts share beginnings and are repeated, because a cache that is never hit is never wrong. Setup
has everything that may vary; none of it may change the output.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial

from quire.core.admission.admission_control import AdmissionControl
from quire.core.kv.block_pool import BlockPool
from quire.core.kv.cache_spec import FullAttentionSpec, SlidingWindowSpec
from quire.core.kv.kv_cache import KVCache
from quire.core.kv.state_checkpoints import StateCheckpoints
from quire.core.kv.tiers.host import HostTier
from quire.core.media.encoder_cache import pages_for
from quire.core.media.encoder_slices import SliceSizes
from quire.core.scheduling.drafting import Drafting
from quire.core.scheduling.grammar_wait import GrammarWait
from quire.core.scheduling.limits.base import NO_BOUND, by_contract
from quire.core.scheduling.limits.encoder_budget import EncoderBudget
from quire.core.scheduling.limits.isolation_limit import FaultIsolationLimit
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.scheduling.limits.media_encoder import MediaEncoderLimit
from quire.core.scheduling.limits.per_rank import PerRankBudget
from quire.core.scheduling.limits.pipeline import PipelineLimit
from quire.core.scheduling.limits.prefill_limits import (
    LongPrefillLimit,
    PartialPrefillLimit,
    PrefillChunkLimit,
)
from quire.core.scheduling.limits.shared_prompts import SharedPromptLimit
from quire.core.scheduling.limits.shortest_prompt_first import ShortestPromptFirst
from quire.core.scheduling.limits.state_checkpoints import StateCheckpointLimit
from quire.core.scheduling.limits.tenant_kv_quota import TenantKVQuota
from quire.core.scheduling.limits.token_budget import TokenBudget, WholePromptLimit
from quire.core.scheduling.limits.undivided_runs import UndividedRunLimit
from quire.core.scheduling.order.fair import FairQueue
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.order.priority import Priority
from quire.core.scheduling.scheduler import Scheduler
from quire.core.tenant_limits import TenantLimits
from quire.core.types import (
    UNKNOWN,
    DataParallelTokens,
    MediaItem,
    Pooling,
    RankRows,
    Request,
    StopConditions,
    Wants,
)
from tests.pure.core.builders import FakeGrammars, FunctionDrafter, fake_constraint
from tests.pure.core.fake_model import (
    VOCAB,
    FakeModel,
    FakeRanks,
    media_tokens,
    reference_output,
    seen_cells,
)


class SmallShares(PipelineLimit):
    """Divides the short prompts of these runs too."""

    least_share = 3


class VaryingMaxSeqsLimit(MaxSeqsLimit):
    """Changes its number in each step, so that some running sequences have no row."""

    def begin_step(self, sequences):
        self.max_seqs = self.max_seqs * 5 % 7 + 1  # 1, 6, 3, 2, 4, 7, ...
        self.left = self.max_seqs


@dataclass
class Setup:
    blocks: int = 1000
    block_size: int = 4
    windows: tuple = (None,)
    budget: int = 1000
    max_rows: int = 64
    slots: int = 64
    chunked: bool = True
    chunk_cap: int = 0
    partial: int = 0
    long: tuple = ()
    media: dict = field(default_factory=dict)  # sizes of MediaEncoderLimit; {}: no items
    encoder: tuple = ()  # source tokens per step, and of one source
    varying_max_seqs: bool = False
    priority: bool = False
    fair: bool = False
    short_first: bool = False
    host: int = 0  # blocks of the host tier
    depth: int = 1
    prefix_caching: bool = True
    least_shared: int = 0  # tokens of a prompt that others wait for; 0: none does
    watermark: float = 0.0
    aborts: dict = field(default_factory=dict)  # step -> ids (or (id, index)) to abort before it
    fails: frozenset = frozenset()  # plans that raise instead of giving a result
    errors: frozenset = frozenset()  # plans whose first row reports an error
    grammars: object = None  # a FakeGrammars
    fault_isolation: bool = False
    more: list = field(default_factory=list)  # limits, before the others
    drafts: int = 0  # maximum of a row
    adaptive: bool = False  # else every row has as many drafts as are proposed
    draft_rows: int = NO_BOUND  # of a step with drafts, each of which is one
    proposer: object = None  # (sequence, tokens) -> drafts
    model_proposes: bool = False  # else the scheduler proposes
    continues: bool = True  # steps are planned behind drafts of a model that are not verified
    skips: object = None  # random.Random: a tenth of the rows yields no token
    ranks: int = 1  # data-parallel ones, each with blocks and slots as above
    stages: int = 1  # of a pipeline, whose steps have different sequences
    states: tuple = ()  # of recurrent layers: checkpoints, tokens between two; (): there are none

    @property
    def has_more_ranks(self):
        return self.ranks > 1 or self.stages > 1 or bool(self.states)

    def limits(self, order, kv):
        limits = [
            *self.more,
            *([FaultIsolationLimit()] if self.fault_isolation else []),
            AdmissionControl(clock=lambda: 0.0),
        ]
        if self.fair:
            limits.append(TenantKVQuota(order, self.ranks * self.blocks, kv.max_blocks))
        if self.ranks == 1:
            limits += self.rank_limits(order)
        else:
            of_ranks = zip(*(self.rank_limits(order) for _ in range(self.ranks)))
            limits += [PerRankBudget(one) for one in of_ranks]
        if self.encoder:
            limits.append(EncoderBudget(*self.encoder))
        if self.media:
            whole = not self.chunked
            self.media_limit = MediaEncoderLimit(
                ("image",), **self.media, row_bytes=1, ranks=self.ranks, whole_prompts=whole
            )
            limits += [self.media_limit, UndividedRunLimit(self.budget)]
        if self.least_shared:
            limits.insert(
                len(self.more),
                SharedPromptLimit(self.block_size, kv.extend_keys, order, self.least_shared),
            )
        if self.grammars is not None:
            limits.append(GrammarWait(self.grammars, 10_000))
        if kv.states is not None:
            limits.append(StateCheckpointLimit(kv, divides=self.chunked))
        if self.stages > 1:
            listeners = [one for one in limits if isinstance(one, FaultIsolationLimit)]
            serialized = lambda: any(one.serialize_steps for one in listeners)  # noqa: E731
            stages = min(self.stages, self.depth)
            limits.append(SmallShares(stages, order, serialized, divides=self.chunked))
        return limits

    def rank_limits(self, order):
        limits = []
        if self.chunk_cap:
            limits.append(PrefillChunkLimit(self.chunk_cap))
        budget = TokenBudget(self.budget)
        limits += [budget, MaxSeqsLimit(self.max_rows)]
        if not self.chunked:
            limits.append(WholePromptLimit(self.budget))
        elif self.short_first:
            limits.append(ShortestPromptFirst(order, lambda: budget.left))
        if self.partial:
            limits.append(PartialPrefillLimit(self.partial))
        if self.varying_max_seqs:
            limits.append(VaryingMaxSeqsLimit(1))
        if self.long:
            limits.append(LongPrefillLimit(*self.long))
        return limits

    def checkpoints(self):
        if not self.states:
            return None
        count, every = self.states
        return StateCheckpoints(
            count, self.block_size, every, shared=self.prefix_caching, first=min(2, every)
        )

    def build(self, max_len=10_000):
        kv, *others = [
            KVCache(
                BlockPool(self.blocks),
                self.block_size,
                tuple(
                    FullAttentionSpec() if w is None else SlidingWindowSpec(w) for w in self.windows
                ),
                prefix_caching=self.prefix_caching,
                host=HostTier(self.host) if self.host and self.prefix_caching else None,
                states=self.checkpoints(),
            )
            for _ in range(self.ranks)
        ]
        inner = Priority if self.priority else Fifo
        order = FairQueue(inner) if self.fair else inner()
        scheduler = Scheduler(
            kv,
            order,
            **by_contract(self.limits(order, kv)),
            max_seqs=self.slots,
            max_len=max_len,
            steps_in_flight=self.depth,
            watermark=self.watermark,
            drafting=Drafting(
                None
                if self.model_proposes or self.proposer is None
                else FunctionDrafter(self.proposer),
                max_drafts=self.drafts,
                adaptive=self.adaptive,
                overlaps=self.depth > 1 and self.stages == 1,
                step_tokens=self.budget,
                step_rows=self.draft_rows,
                model=self.model_proposes,
                continues=self.continues and self.model_proposes and not self.has_more_ranks,
            ),
            other_ranks=others,
        )
        models = []
        for _ in range(self.ranks):
            model = FakeModel(self.blocks, self.block_size, self.windows, self.host, self.slots)
            if self.model_proposes:
                model.proposer = self.proposer
            if self.states:
                model.states = [-1] * (self.slots + self.states[0])
            if self.skips is not None:
                model.skips = lambda: self.skips.random() < 0.1
            models.append(model)
        return scheduler, kv, models[0] if self.ranks == 1 else FakeRanks(models)


@dataclass
class Outcome:
    tokens: dict  # (id, index) -> output
    finish: dict  # (id, index) -> reason
    preemptions: int
    steps: int
    hits: int
    loads: int  # blocks from the host
    stores: int
    copies: int
    pooled: dict = field(default_factory=dict)  # (id, index) -> result


def expected(request, index, windows, recurrent=False):
    """Return the expected output and finish reason of a sequence."""
    out = reference_output(
        media_tokens(request),
        request.stop.max_tokens,
        windows=windows,
        seed=request.seed + index,
        salt=request.salt,
        source=partial(seen_cells, request),
        recurrent=recurrent,
    )
    ids = request.stop.eos_ids | request.stop.token_ids
    for i, token in enumerate(out, 1):
        if token in ids and i >= request.stop.min_tokens:
            return out[:i], "stop"
    return out, "length"


class Run:
    """Runs one engine, and checks all invariants after each step."""

    def __init__(self, setup, requests, max_len=10_000):
        self.setup, self.requests = setup, list(requests)
        self.by_id = {one.id: one for one in self.requests}
        self.scheduler, self.kv, self.model = setup.build(max_len)
        self.out = Outcome({}, {}, 0, 0, 0, 0, 0, 0)
        self.in_flight = []
        self.silently_aborted = set()
        self.prompt_logprobs = {}

    def run(self, most_steps=20_000, add_per_step=3):
        todo = list(self.requests)
        while (
            todo
            or self.in_flight
            or self.scheduler.any_waiting_for_resources
            or not self.scheduler.idle
        ):
            assert self.out.steps < most_steps, "no progress"
            for request in todo[:add_per_step]:
                self.add(request)
            del todo[:add_per_step]
            self._abort_some()
            self.step()
        for request in self.requests:
            self.scheduler.release(request.id)
        self.close()
        return self.out

    def add(self, request):
        self.scheduler.add(request)
        for index in range(request.n):
            self.out.tokens[request.id, index] = []

    def step(self):
        planned = None
        if self.setup.grammars is not None:
            self.setup.grammars.tick()
        if self.scheduler.has_ready:
            self._record(self.scheduler.enqueue_ready().failed)
            self.scheduler.check()
        awaits = self.in_flight and self.scheduler.awaits_result
        if not self.scheduler.idle and not awaits:
            planned = self.scheduler.plan()
            self._check_plan(planned)
            self.scheduler.check()
            self.model.submit(planned)
            self.in_flight.append(planned)
        if self.in_flight and (
            len(self.in_flight) >= self.setup.depth or planned is None or not planned.rows
        ):
            plan = self.in_flight.pop(0)
            self._record(self._result(plan))
            self.scheduler.check()
        self.out.steps += 1

    def _result(self, plan):
        if plan.step in self.setup.fails:
            self.model.lose()
            failed = self.scheduler.fail_step(plan)
            return (
                []
                if failed.culprit is None
                else self.scheduler.fail_request(failed.culprit, "lost")
            )
        result = self.model.wait()
        if plan.step in self.setup.errors and plan.rows:
            result = replace(result, errors={0: "bad row"})
        updates = self.scheduler.apply(plan, result)
        self.scheduler.observe_step(0, 1.0 + sum(row.count for row in plan.rows) / 64)
        return updates

    def _check_plan(self, plan):
        self._check_ranks(plan)
        for own in plan.dp_plans or (plan,):
            assert sum(row.count for row in own.rows) <= self.setup.budget
            assert len(own.rows) <= self.setup.max_rows
        running = len(plan.rows) - len(plan.joins)
        assert not plan.num_drafts or running + plan.num_drafts <= self.setup.draft_rows
        idle = not plan.rows and not plan.leaves and not self.in_flight
        assert not idle, "a plan does nothing, and nothing is in flight"
        for row in plan.rows:
            assert row.count > 0
            known = row.seq.tokens[row.start : row.start + row.count - row.drafts]
            waits = row.drafts or row.seq.request.constraint is not None
            assert not (self.setup.stages > 1 and waits and UNKNOWN in known)
            for table in row.seq.tables:
                assert len(table) * self.setup.block_size >= row.start + row.count
        self.out.preemptions += len(plan.preempted)
        assert plan.rows or not plan.parts, "workers read no parts of a step without rows"
        self.out.loads += len(plan.swap_in)
        self.out.stores += len(plan.swap_out)
        self.out.copies += len(plan.copies)

    def _check_ranks(self, plan):
        assert len(plan.dp_plans) == (0 if self.setup.ranks == 1 else self.setup.ranks)
        counts = tuple(sum(row.count for row in own.rows) for own in plan.dp_plans)
        decodes = all(row.count == 1 and row.wants is Wants.TOKEN for row in plan.rows)
        ones = [sum(row.count == 1 for row in own.rows) for own in plan.dp_plans]
        rows = [RankRows(n, len(own.rows) - n) for n, own in zip(ones, plan.dp_plans)]
        found = DataParallelTokens(counts, decodes, () if plan.num_drafts else tuple(rows))
        for rank, own in enumerate(plan.dp_plans):
            seqs = [*own.joins, *own.changed_tables, *(row.seq for row in own.rows)]
            assert all(seq.dp_rank == rank for seq in seqs)
            assert (found in own.parts) == bool(plan.rows)

    def _record(self, updates):
        for u in updates:
            key = u.request_id, u.index
            assert key not in self.out.finish, f"{key} has an update after its end"
            assert key not in self.silently_aborted, f"{key} was aborted silently and has an update"
            if u.token_ids and not self.out.tokens[key]:
                self.prompt_logprobs[key] = [p.ids[0] for p in u.prompt_logprobs or ()]
            else:
                assert u.prompt_logprobs is None, f"{key} has prompt logprobs after its first token"
            self.out.tokens[key] += u.token_ids
            if u.finish:
                self.out.finish[key] = u.finish
            if u.pooled is not None:
                self.out.pooled[key] = u.pooled
            self.out.hits += u.cached_tokens > 0

    def _abort_some(self):
        for what in self.setup.aborts.get(self.out.steps, ()):
            if isinstance(what, str):
                self._record(self.scheduler.abort(what))
                self.scheduler.check()
            elif what in self.out.tokens and what not in self.out.finish:
                self.silently_aborted.add(what)
                self.scheduler.abort_sequence(*what)
                self.scheduler.check()

    def close(self):
        for kv in self.scheduler._kvs:
            assert kv.pool.available == kv.pool.size, "blocks leaked"
            states = kv.states
            assert states is None or states.pool.available == states.pool.size, "states leaked"
            host = kv.host
            assert host is None or host.pool.available == host.pool.size, "host blocks leaked"
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.held_host_blocks) == (0, 0, 0)
        assert self.scheduler.reset_prefix_cache()
        assert not self.kv.pool.cached
        assert host is None or not host.pool.cached
        if self.setup.media:
            for rank in self.setup.media_limit._ranks:
                rank.cache.check()
                assert not rank.cache._references, "an item is referred to without a request"
        if self.setup.grammars is not None:
            assert not +self.setup.grammars.held, "a grammar is held without a request"


def check_outcome(run, out):
    """Check that every sequence has the expected output, and ended once."""
    for request in run.requests:
        for index in range(request.n):
            key = request.id, index
            if request.pooling is not None:
                if key not in run.silently_aborted:
                    check_pooled(request, out.finish[key], out.pooled.get(key))
                continue
            setup = run.setup
            want, finish = expected(request, index, setup.windows, bool(setup.states))
            if out.finish.get(key) in ("abort", "error") or key in run.silently_aborted:
                assert out.tokens[key] == want[: len(out.tokens[key])], key
            else:
                assert (out.tokens[key], out.finish.get(key)) == (want, finish), key
            if index == 0 and not request.read_prefix_cache and out.tokens[key]:
                assert run.prompt_logprobs[key] == list(range(1, len(request.prompt))), key


def check_pooled(request, finish, pooled):
    """Check a pooled result of the fake model: of all tokens, unless a cache was read."""
    if finish in ("abort", "error"):
        assert pooled is None
    elif request.read_prefix_cache:
        assert pooled.data[-1] == request.prompt[-1]
    else:
        assert pooled.data == bytes(request.prompt)


def with_pooling(rng, requests, share):
    """Return the requests, so many of them for pooled results."""
    return [
        replace(one, n=1, pooling=Pooling("embed"), stop=StopConditions(1))
        if rng.random() < share
        else one
        for one in requests
    ]


def random_requests(rng, most=12):
    """Return random requests with few heads, so that prompts share beginnings."""
    heads = [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24))) for _ in range(3)]
    requests = []
    for i in range(rng.randrange(1, most)):
        prompt = rng.choice(heads) + rng.choice(heads)[: rng.randrange(6)]
        stop = StopConditions(
            max_tokens=rng.randrange(1, 15),
            min_tokens=rng.choice([0, 0, 3]),
            eos_ids=frozenset({3} if rng.random() < 0.4 else ()),
            token_ids=frozenset({5} if rng.random() < 0.2 else ()),
        )
        requests.append(
            Request(
                f"r{i}",
                prompt,
                stop,
                n=rng.choice([1, 1, 1, 2, 3, 5]),
                seed=rng.choice([0, 0, 5]),
                priority=rng.randrange(3),
                arrived_at=float(i),
                salt=rng.choice([b"", b"", b"adapter"]),
                read_prefix_cache=rng.random() < 0.85,
            )
        )
    keys = [(r.prompt, r.stop.max_tokens, r.n, r.salt) for r in requests]
    return with_tenants(random.Random(f"tenants {keys}"), requests)


def with_sources(rng, requests):
    """Return the requests with sources of three, all of them or none."""
    sources = [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 14))) for _ in range(3)]
    return [replace(one, encoder_prompt=rng.choice(sources)) for one in requests]


def with_media(rng, requests, *, bidirectional):
    """Return the requests with up to three items each, of four contents."""
    contents = []
    for digest in range(4):
        runs, offset, left = [], rng.randrange(2), rng.choice([1, 2, 5, 9, 20, 40])
        while left:
            count = left if bidirectional else rng.randrange(1, left + 1)
            runs.append((offset, count))
            offset, left = offset + count + rng.randrange(1, 3), left - count
        length = sum(runs[-1]) + rng.randrange(3)
        contents.append((bytes([digest]), length, tuple(runs)))
    return [_with_items(rng, one, contents, bidirectional=bidirectional) for one in requests]


def _with_items(rng, request, contents, *, bidirectional):
    prompt, items, at = list(request.prompt), [], 0
    for _ in range(rng.randrange(4)):
        at = rng.randrange(at, len(prompt) + 1)
        digest, length, runs = rng.choice(contents)
        prompt[at:at] = [0] * length
        items.append(MediaItem("image", digest + request.salt, at, length, runs, (), bidirectional))
        at += length
    extra = tuple((item.start, item.digest) for item in items)
    return replace(request, prompt=tuple(prompt), media=tuple(items), extra_content=extra)


def with_tenants(rng, requests):
    """Return the requests with random tenants."""
    tenant_limits = {
        name: TenantLimits(
            weight=rng.choice([0.5, 1, 4]), kv_share=rng.choice([None, None, 0.1, 0.5])
        )
        for name in (b"", b"a", b"b")[: rng.randrange(1, 4)]
    }
    return [
        replace(
            one, tenant=(name := rng.choice([*tenant_limits])), tenant_limits=tenant_limits[name]
        )
        for one in requests
    ]


def random_setup(rng, requests, windows=None):
    """Return a setup whose memory just suffices for the largest sequence, or a little more."""
    if windows is None:
        windows = rng.choice([(None,), (None,), (None, 5), (3, None), (9,), (None, 7, 2)])
    size = rng.choice([1, 2, 3, 4, 4, 8])
    setup = Setup(block_size=size, windows=windows)
    need = max(least_blocks(setup, r) for r in requests)
    setup.blocks = need + rng.choice([0, 0, 1, 2, 5, 20, 60])
    setup.budget = rng.choice([1, 3, 7, 16, 40, 1000])
    setup.max_rows = rng.randrange(1, 8)
    setup.slots = rng.randrange(1, 10)
    setup.chunk_cap = rng.choice([0, 0, 2, 5])
    setup.partial = rng.choice([0, 0, 1, 2])
    setup.long = rng.choice([(), (), (1, 8)])
    setup.varying_max_seqs = rng.random() < 0.1
    setup.priority = rng.random() < 0.4
    setup.fair, setup.short_first = rng.random() < 0.6, rng.random() < 0.6
    setup.host = rng.choice([0, 3, 20, 100])
    setup.depth = rng.choice([1, 2])
    setup.prefix_caching = rng.random() < 0.8
    setup.watermark = rng.choice([0.0, 0.0, 0.1])
    if rng.random() < 0.15:
        setup.chunked = False
        setup.budget = max(len(r.prompt) for r in requests) + rng.randrange(5)
        setup.chunk_cap = 0
    if setup.prefix_caching:
        setup.least_shared = rng.choice([0, 1, 2, 4]) * size
    return setup


def least_blocks(setup, request):
    if not setup.windows:
        return 0
    _, kv, _ = Setup(block_size=setup.block_size, windows=setup.windows).build()
    return kv.max_blocks(request, len(request.prompt) + request.stop.max_tokens - 1)


def random_aborts(rng, requests):
    """Return aborts of some requests and sequences, at random steps."""
    aborts = {}
    for request in requests:
        if rng.random() < 0.3:
            what = request.id if rng.random() < 0.5 else (request.id, rng.randrange(request.n))
            aborts.setdefault(rng.randrange(1, 30), []).append(what)
    return aborts


def random_run(seed, most_steps=20_000, *, sources=False, pooled=0.0, **fixed):
    """Run the workload of one seed. Raises AssertionError if the output is wrong.

    sources: all requests have an encoder prompt. pooled: share of requests for pooled results.
    """
    rng = random.Random(seed)
    requests = with_pooling(random.Random(f"pooled {seed}"), random_requests(rng), pooled)
    encoder = random.Random(f"sources {seed}")
    if has_encoder := sources or encoder.random() < 0.1:
        requests = with_sources(encoder, requests)
    setup = random_setup(rng, requests)
    if has_encoder:
        setup.encoder = (encoder.randrange(13, 40), 13)
    if rng.random() < 0.4:
        setup.aborts = random_aborts(rng, requests)
    if rng.random() < 0.15:
        setup.fails = frozenset(rng.sample(range(2, 30), 2))
        setup.errors = frozenset(rng.sample(range(2, 30), 3))
    rng2 = random.Random(f"drafts {seed}")
    if rng2.random() < 0.3:
        with_drafts(rng2, setup)
    if rng2.random() < 0.2:
        setup.skips = rng2
    for name, value in fixed.items():
        setattr(setup, name, value)
    run = Run(setup, with_grammars(random.Random(f"grammars {seed}"), requests, setup))
    out = run.run(most_steps)
    check_outcome(run, out)
    return out


def with_states(rng, setup, alone=0.3):
    """Add recurrent layers to the setup, beside attention or alone."""
    setup.states = rng.choice([0, 1, 2, 5, 40]), rng.choice([2, 4, 7, 16])
    setup.drafts, setup.proposer, setup.model_proposes = 0, None, False
    if rng.random() < alone:
        setup.windows, setup.blocks, setup.host = (), 0, 0


def random_recurrent_run(seed, most_steps=20_000):
    """As random_run(), of a model with recurrent layers."""
    rng = random.Random(f"states {seed}")
    requests = random_requests(rng)
    setup = random_setup(rng, requests)
    with_states(rng, setup)
    if rng.random() < 0.4:
        setup.aborts = random_aborts(rng, requests)
    if rng.random() < 0.3:
        setup.fails = frozenset(rng.sample(range(2, 30), 2))
        setup.errors = frozenset(rng.sample(range(2, 30), 3))
    if rng.random() < 0.2:
        setup.skips = rng
    run = Run(setup, with_grammars(random.Random(f"grammars {seed}"), requests, setup))
    out = run.run(most_steps)
    check_outcome(run, out)
    return out


def random_media_run(seed, most_steps=20_000, **fixed):
    """Run requests with images on a cache that holds few of them."""
    rng = random.Random(f"media {seed}")
    bidirectional = rng.random() < 0.4
    requests = with_media(rng, random_requests(rng), bidirectional=bidirectional)
    items = [item for one in requests for item in one.media]
    setup = random_setup(rng, requests)
    setup.ranks = rng.choice([1, 1, 2])
    largest = max([item.num_rows for item in items], default=1)
    most = max([sum(item.num_rows for item in one.media) for one in requests])
    setup.media = {
        "max_rows": rng.choice([1, 20, 100]),
        "cache_rows": 16 * (pages_for(largest) + rng.choice([0, 0, 1, 3, 20])),
        "paced": rng.random() < 0.7,
    }
    blocks, whole_rows = rng.choice([1, 5]), rng.choice([0, 0, 12])
    if setup.media["paced"] and setup.ranks == 1:
        setup.media["slices"] = SliceSizes(blocks, 8, whole_rows)  # items have few rows
    if bidirectional and rng.random() < 0.3:
        requests = [
            replace(one, bidirectional_tokens=len(one.prompt) if one.media else 0)
            for one in requests
        ]
        largest = max(len(one.prompt) for one in requests)
    if not setup.chunked or any(one.bidirectional_tokens for one in requests):
        setup.media["cache_rows"] = 16 * (pages_for(most) + 3)
    if bidirectional:
        setup.budget = max(setup.budget, largest + setup.max_rows)
        blocks = -(-max(len(one.prompt) for one in requests) // setup.block_size) + 1
        setup.blocks = max(setup.blocks, len(setup.windows) * blocks)
    if rng.random() < 0.4:
        setup.aborts = random_aborts(rng, requests)
    if rng.random() < 0.15:
        setup.fails = frozenset(rng.sample(range(2, 30), 2))
        setup.errors = frozenset(rng.sample(range(2, 30), 3))
    for name, value in fixed.items():
        setattr(setup, name, value)
    run = Run(setup, requests)
    out = run.run(most_steps)
    check_outcome(run, out)
    return out


def random_run_without_kv(seed, most_steps=20_000):
    """Run pooling requests of a model without KV: no block, and prompts as a whole."""
    rng = random.Random(seed)
    requests = with_pooling(rng, random_requests(rng, 40), 1.0)
    setup = random_setup(rng, requests, windows=())
    setup.blocks, setup.host, setup.prefix_caching = 0, 0, False
    setup.chunked, setup.chunk_cap = False, 0
    setup.budget = max(len(r.prompt) for r in requests) + rng.choice([0, 3, 50])
    setup.aborts = random_aborts(rng, requests) if rng.random() < 0.4 else {}
    if rng.random() < 0.4:
        setup.fails = frozenset(rng.sample(range(1, 12), 3))
        setup.errors = frozenset(rng.sample(range(1, 12), 2))
        setup.fault_isolation = rng.random() < 0.5
    run = Run(setup, [replace(one, read_prefix_cache=rng.random() < 0.5) for one in requests])
    out = run.run(most_steps)
    assert all(one.data == bytes(run.by_id[key].prompt) for (key, _), one in out.pooled.items())
    check_outcome(run, out)
    assert out.preemptions == out.hits == out.copies == 0
    return out


def with_drafts(rng, setup):
    """Add drafts to the setup; the output must not change."""
    setup.drafts = rng.choice([1, 2, 3, 7])
    setup.proposer = rng.choice([ngram, oracle(setup.windows, rng.choice([0.0, 0.2, 0.5]))])
    setup.model_proposes = rng.random() < 0.5
    setup.adaptive = rng.random() < 0.5
    setup.draft_rows = rng.choice([1, 3, 8, NO_BOUND])
    return setup


def ngram(seq, tokens, most=8):
    """Propose what followed the last occurrence of the last two tokens."""
    for at in range(len(tokens) - 3, -1, -1):
        if tokens[at : at + 2] == tokens[-2:]:
            return tokens[at + 2 : at + 2 + most]
    return ()


def oracle(windows, wrong):
    """Return a proposer of the model's own output; each token is wrong with this probability."""

    def propose(seq, tokens):
        rng = random.Random(f"{seq.request.id} {seq.index} {len(tokens)}")
        request = seq.request
        out = reference_output(
            request.prompt,
            len(tokens) - seq.prompt_len + rng.randrange(1, 9),
            windows=windows,
            seed=request.seed + seq.index,
            salt=request.salt,
        )
        future = out[len(tokens) - seq.prompt_len :]
        return [(t + 1) % VOCAB if rng.random() < wrong else t for t in future]

    return propose


def with_grammars(rng, requests, setup):
    """Return the requests, some with constraints; the output must not change."""
    if rng.random() < 0.6:
        return requests
    setup.grammars = FakeGrammars()
    kinds = [
        fake_constraint(rng.randrange(9), rng.choice([1, 1, 5]), fails=rng.random() < 0.2)
        for _ in "abc"
    ]
    return [replace(one, constraint=rng.choice([None, *kinds])) for one in requests]


def random_squeeze_of_ranks(seed, most_steps=20_000):
    """As random_squeeze(), on several data-parallel ranks."""
    return random_squeeze(seed, most_steps, ranks=2 + seed % 2)


def random_squeeze(seed, most_steps=20_000, *, ranks=1, recurrent=False):
    """Run with little memory, long outputs and rising priorities, so that all are preempted."""
    rng = random.Random(seed)
    heads = [tuple(rng.randrange(VOCAB) for _ in range(16)) for _ in range(2)]
    requests = [
        Request(
            f"s{i}",
            rng.choice(heads)[: rng.randrange(1, 17)],
            StopConditions(rng.randrange(10, 30)),
            n=rng.choice([1, 1, 2]),
            priority=rng.choice([0, -i]),
            arrived_at=float(i),
            read_prefix_cache=rng.random() < 0.6,
        )
        for i in range(rng.randrange(4, 9))
    ]
    setup = random_setup(rng, requests)
    setup.blocks = max(least_blocks(setup, r) for r in requests) + rng.randrange(3)
    setup.host = rng.choice([0, setup.blocks // 2, setup.blocks * 3])
    setup.budget, setup.max_rows, setup.slots = rng.choice([4, 6, 40]), 20, 20
    setup.chunked, setup.watermark, setup.priority = True, 0.0, rng.random() < 0.7
    setup.depth = rng.choice([1, 2, 2])
    setup.fails = frozenset(rng.sample(range(2, 90), rng.choice([0, 0, 4, 12])))
    setup.ranks = ranks
    rng2 = random.Random(f"drafts {seed}")
    if rng2.random() < 0.3:
        with_drafts(rng2, setup)
    if recurrent:
        with_states(rng2, setup, alone=0.0)
    run = Run(setup, with_tenants(random.Random(f"tenants {seed}"), requests))
    out = run.run(most_steps)
    check_outcome(run, out)
    return out


def random_beams(seed, most_steps=20_000, *, ranks=1, recurrent=False):
    """Run a beam search as a client does: held parents, children that continue them, releases."""
    rng = random.Random(seed)
    setup = random_setup(rng, [Request("x", (1,) * 40, StopConditions(8))])
    setup.ranks = ranks
    if recurrent:
        with_states(rng, setup)
    run = Run(setup, [])
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24)))
    roots = [
        Request(f"b{i}", prompt, StopConditions(rng.randrange(1, 4)), hold=True) for i in range(2)
    ]
    alive, num_children = [], 0
    for request in roots:
        run.add(request)
        alive.append(request)
    while alive:
        while not all((r.id, 0) in run.out.finish for r in alive):
            run.step()
            assert run.out.steps < most_steps, "no progress"
        run.requests += alive
        children = []
        for parent in alive:
            for _ in range(rng.randrange(3) if len(parent.prompt) < 36 else 0):
                num_children += 1
                children.append(
                    _child(rng, parent, run.out.tokens[parent.id, 0], f"c{num_children}")
                )
                run.add(children[-1])
        for parent in alive:
            run.scheduler.release(parent.id)
        alive = _cut(run, children)
    while run.in_flight or not run.scheduler.idle:
        run.step()
        assert run.out.steps < most_steps, "no progress"
    run.close()
    check_outcome(run, run.out)
    return run.out


def _child(rng, parent, output, id):
    """Return a child that continues a prefix of the parent's tokens."""
    tokens = parent.prompt + tuple(output)
    length = rng.choice([len(tokens), len(tokens) - 1, rng.randrange(1, len(tokens) + 1)])
    prompt = tokens[: max(length, 1)] + ((rng.randrange(VOCAB),) if rng.random() < 0.7 else ())
    return Request(
        id,
        prompt,
        StopConditions(rng.randrange(1, 4)),
        parent=parent.id,
        hold=True,
        salt=b"other" if rng.random() < 0.1 else b"",
    )


def _cut(run, children):
    """Keep the first few beams, and abort the others."""
    for child in children[4:]:
        run._record(run.scheduler.abort(child.id))
    run.requests += children[4:]
    return children[:4]
