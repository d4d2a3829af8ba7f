"""Where a fault can be put: hooks of one step and of one request, by name.

Each is a function of quire that a test has wrapped, in a process that a test has started: quire
itself has no such hook, so nothing costs anything and nobody can reach it. A point knows whose
call it is, where that can be known: requests, as (id, seed).
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Who = Iterable[tuple[str, int | None]]

SEATED: dict[int, Any] = {}
"""slot -> SlotJoin, as the sampler has it."""
BOUND: dict[int, Any] = {}
"""id of a ConstrainedSequence -> its SlotJoin."""
_making: list[Any] = []  # the SlotJoin whose ConstrainedSequence is being made


class Point(NamedTuple):
    place: str  # module:name
    who: Callable[..., Who] = lambda *args, **named: ()


def of(*requests) -> Who:
    return [(one.id, getattr(one, "seed", None)) for one in requests]


def of_seq(owner, seq, *rest, **named) -> Who:
    return of(seq.request)


def of_join(owner, joined, *rest) -> Who:
    return [(joined.request_id, joined.seed - joined.index)]


def of_slots(slots) -> Who:
    return [
        one for slot in map(int, slots) if slot in SEATED for one in of_join(None, SEATED[slot])
    ]


def of_bound(bound, *rest) -> Who:
    joined = _making[-1] if _making else BOUND.get(id(bound))
    return () if joined is None else of_join(None, joined)


def of_plan(owner, plan, *rest) -> Who:
    return of(*(row.seq.request for row in plan.rows))


def of_updates(owner, updates, *rest) -> Who:
    return [(one.request_id, None) for one in updates]


def of_update(owner, update, *rest) -> Who:
    return [(update.request_id, None)]


ENGINE = {
    # asked
    "obey": Point("quire.engine.core.engine_rpc:EngineRpc.handle"),
    "accept": Point("quire.engine.core.engine_core:EngineCore.add", lambda engine, one: of(one)),
    # planned
    "plan": Point("quire.core.scheduling.scheduler:Scheduler.plan"),
    "match": Point("quire.core.kv.kv_cache:KVCache.match_prefix", of_seq),
    "grow": Point("quire.core.kv.kv_cache:KVCache.allocate", of_seq),
    "keys": Point("quire.core.kv.block_keys:BlockKeys.first", of_seq),
    "planned": Point("quire.core.accounting.time_accounting:TimeAccounting.record_plan", of_plan),
    # made ready
    "submit": Point("quire.executors.inline:Executor.submit", of_plan),
    "inputs": Point("quire.runner.model_input:ModelInputBuilder.build", of_plan),
    "gather": Point(
        "quire.runner.model_input:build_step_batch", lambda plan, **how: of_plan(None, plan)
    ),
    # on the device
    "launch": Point("quire.runner.model_runner:ModelRunner.launch"),
    "leave": Point("quire.sampling.sampler:Sampler.leave"),
    "join": Point("quire.sampling.sampler:Sampler.join", of_join),
    "join.penalties": Point("quire.sampling.steps.cpu_penalties:CpuPenalties.join", of_join),
    "join.masks": Point("quire.sampling.steps.masks:BadWords.join", of_join),
    "join.grammar": Point("quire.sampling.steps.grammar_masks:ConstrainedSlots.join", of_join),
    "tables": Point("quire.runner.cpu.cpu_worker:CpuWorker.write_tables"),
    "compute": Point(
        "quire.runner.cpu.cpu_worker:CpuWorker.compute", lambda lane, i, *p: of_slots(i.slots)
    ),
    "forward": Point(
        "quire.runner.cpu.cpu_worker:CpuWorker.attention_metadata",
        lambda lane, i: of_slots(i.slots),
    ),
    "recipe": Point(
        "quire.sampling.sampler:Sampler._build_plan", lambda sampler, slots: of_slots(slots)
    ),
    "sample": Point(
        "quire.sampling.sampler:Sampler.sample", lambda s, logits, slots, *r: of_slots(slots)
    ),
    "grammar.accept": Point(
        "quire.sampling.constrained_sequence:ConstrainedSequence.accept", of_bound
    ),
    "grammar.fill": Point(
        "quire.sampling.constrained_sequence:ConstrainedSequence.narrow_mask", of_bound
    ),
    "prompt_logprobs": Point("quire.runner.parts.prompt_logprobs:PromptLogprobsPart.apply"),
    "result": Point(
        "quire.runner.cpu.cpu_worker:build_step_result", lambda i, *rest: of_slots(i.slots)
    ),
    # applied
    "apply": Point("quire.core.scheduling.scheduler:Scheduler.apply", of_plan),
    "publish": Point("quire.core.kv.kv_cache:KVCache.cache_full_blocks", of_seq),
    "confirm": Point(
        "quire.core.scheduling.scheduler:Scheduler._apply_row",
        lambda s, i, row, *rest: of(row.seq.request),
    ),
    "landed": Point(
        "quire.core.accounting.time_accounting:TimeAccounting.record_result", of_updates
    ),
    # told
    "turn": Point("quire.engine.core.engine_rpc:EngineRpc.run_step"),
    "route": Point("quire.engine.core.engine_rpc:EngineRpc._route_updates", of_updates),
    "send": Point("quire.engine.core.process:EngineCoreProcess._send"),
    # the engine's process as a whole
    "start": Point("quire.engine.core.process:build_engine_core"),
}

API = {
    "prepare": Point("quire.server.generation.generation_stream:build_requests"),
    "generate": Point(
        "quire.engine.client.engine_client:EngineClient.generate",
        lambda client, requests: of(*requests),
    ),
    "deliver": Point("quire.engine.client.engine_client:EngineClient._deliver"),
    "read": Point(
        "quire.server.generation.generation_stream:GenerationStream.process_updates", of_updates
    ),
    "assemble": Point(
        "quire.text.output.output_processor:RequestOutputProcessor.process", of_update
    ),
}


def find(place: str) -> tuple[Any, str]:
    """The object that has the function, and the name it has there."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for one in outer:
        owner = vars(owner)[one]
    return owner, name


def watch_slots() -> Callable[[], None]:
    """Follow who has which slot, so that points of whole batches know whose they are. Undo it."""
    from quire.sampling.constrained_sequence import ConstrainedSequence
    from quire.sampling.sampler import Sampler

    join, made = Sampler.join, vars(ConstrainedSequence)["from_join"].__func__

    def seat(self, joined):
        SEATED[joined.slot] = joined
        return join(self, joined)

    def bind(cls, joined, *rest):
        _making.append(joined)
        try:
            bound = made(cls, joined, *rest)
        finally:
            _making.pop()
        BOUND[id(bound)] = joined
        return bound

    Sampler.join, ConstrainedSequence.from_join = seat, classmethod(bind)

    def undo():
        Sampler.join, ConstrainedSequence.from_join = join, classmethod(made)

    return undo
