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
"""slot -> sequence, as the sampler has it."""
BOUND: dict[int, Any] = {}
"""id of a Bound -> sequence."""
_making: list[Any] = []  # the sequence whose Bound is being made


class Point(NamedTuple):
    place: str  # module:name
    who: Callable[..., Who] = lambda *args, **named: ()


def of(*requests) -> Who:
    return [(one.id, getattr(one, "seed", None)) for one in requests]


def of_seq(owner, seq, *rest, **named) -> Who:
    return of(seq.request)


def of_slot_and_seq(owner, slot, seq, *rest) -> Who:
    return of(seq.request)


def of_slots(slots) -> Who:
    return of(*(SEATED[slot].request for slot in map(int, slots) if slot in SEATED))


def of_bound(bound, *rest) -> Who:
    seq = _making[-1] if _making else BOUND.get(id(bound))
    return () if seq is None else of(seq.request)


def of_plan(owner, plan, *rest) -> Who:
    return of(*(row.seq.request for row in plan.rows))


def of_updates(owner, updates, *rest) -> Who:
    return [(one.request_id, None) for one in updates]


def of_update(owner, update, *rest) -> Who:
    return [(update.request_id, None)]


ENGINE = {
    # asked
    "obey": Point("quire.engine.service:Service.obey"),
    "accept": Point("quire.engine.loop:Engine.add", lambda engine, one: of(one)),
    # planned
    "plan": Point("quire.core.scheduler:Scheduler.plan"),
    "match": Point("quire.core.kv_cache:KVCache.match", of_seq),
    "grow": Point("quire.core.kv_cache:KVCache.grow", of_seq),
    "keys": Point("quire.core.kv_cache:KVCache._keys", of_seq),
    "planned": Point("quire.core.ledger:Ledger.planned", of_plan),
    # made ready
    "submit": Point("quire.executors.inline:Executor.submit", of_plan),
    "inputs": Point("quire.runner.runner:Runner.prepare", of_plan),
    "gather": Point("quire.runner.runner:gather", lambda plan: of_plan(None, plan)),
    # on the device
    "launch": Point("quire.runner.runner:Runner.launch"),
    "leave": Point("quire.sampling.sampler:Sampler.leave"),
    "join": Point("quire.sampling.sampler:Sampler.join", of_slot_and_seq),
    "join.penalties": Point("quire.sampling.steps.penalties:Penalties.join", of_slot_and_seq),
    "join.masks": Point("quire.sampling.steps.masks:BadWords.join", of_slot_and_seq),
    "join.grammar": Point("quire.sampling.steps.grammar:Grammar.join", of_slot_and_seq),
    "tables": Point("quire.runner.host:Lane.write_tables"),
    "compute": Point("quire.runner.host:Lane.compute", lambda lane, i, *p: of_slots(i.slots)),
    "forward": Point("quire.runner.host:Lane.batch", lambda lane, i: of_slots(i.slots)),
    "recipe": Point(
        "quire.sampling.sampler:Sampler._make_recipe", lambda sampler, slots: of_slots(slots)
    ),
    "sample": Point(
        "quire.sampling.sampler:Sampler.sample", lambda s, logits, slots, *r: of_slots(slots)
    ),
    "grammar.accept": Point("quire.sampling.bound:Bound.accept", of_bound),
    "grammar.fill": Point("quire.sampling.bound:Bound.narrow", of_bound),
    "prompt_logprobs": Point("quire.runner.prompt_logprobs:PromptLogprobs.start"),
    "result": Point("quire.runner.host:result_of", lambda i, *rest: of_slots(i.slots)),
    # applied
    "apply": Point("quire.core.scheduler:Scheduler.apply", of_plan),
    "publish": Point("quire.core.kv_cache:KVCache.publish", of_seq),
    "confirm": Point(
        "quire.core.scheduler:Scheduler._confirm", lambda s, i, row, *rest: of(row.seq.request)
    ),
    "landed": Point("quire.core.ledger:Ledger.landed", of_updates),
    # told
    "turn": Point("quire.engine.service:Service.turn"),
    "route": Point("quire.engine.service:Service._route", of_updates),
    "send": Point("quire.engine.process:EngineServer._send"),
    # the engine's process as a whole
    "start": Point("quire.engine.process:build_bare"),
}

API = {
    "prepare": Point("quire.server.telling:prepare"),
    "generate": Point(
        "quire.engine.client:EngineClient.generate", lambda client, requests: of(*requests)
    ),
    "deliver": Point("quire.engine.client:EngineClient._deliver"),
    "read": Point("quire.server.telling:Events.read", of_updates),
    "assemble": Point("quire.text.assemble:Assembler.read", of_update),
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
    from quire.sampling.bound import Bound
    from quire.sampling.sampler import Sampler

    join, made = Sampler.join, vars(Bound)["of"].__func__

    def seat(self, slot, seq):
        SEATED[slot] = seq
        return join(self, slot, seq)

    def bind(cls, seq, *rest):
        _making.append(seq)
        try:
            bound = made(cls, seq, *rest)
        finally:
            _making.pop()
        BOUND[id(bound)] = seq
        return bound

    Sampler.join, Bound.of = seat, classmethod(bind)

    def undo():
        Sampler.join, Bound.of = join, classmethod(made)

    return undo
