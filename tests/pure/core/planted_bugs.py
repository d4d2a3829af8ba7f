"""Single-line bugs of the core, and the tests that must find them.

Each runs in its own process, which imports one module of quire.core with the bug:

python -m tests.pure.core.planted_bugs SEEDS NUMBER...    one line each: CAUGHT or MISSED, and why
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

CAUGHT, MISSED = "caught", "missed"
CORE = Path(__file__).resolve().parents[3] / "quire" / "core"


class Bug(NamedTuple):
    """A replacement of `old`, which the file has exactly once, by `new`."""

    description: str
    file: str
    old: str
    new: str


BUGS = (
    Bug(
        "a fork starts on another rank than its parent",
        "scheduling/sequence_registry.py",
        "            child.dp_rank = parent.dp_rank\n",
        "            child.dp_rank = 0\n",
    ),
    Bug(
        "a rank's blocks are copied on another",
        "scheduling/sequence_starter.py",
        "draft.copies[seq.dp_rank] += copies",
        "draft.copies[0] += copies",
    ),
    Bug(
        "the whole prompt may be taken from the cache",
        "kv/kv_cache.py",
        "return self.keys.first(seq, (len(seq.tokens) - 1) // self.block_size)",
        "return self.keys.first(seq, len(seq.tokens) // self.block_size)",
    ),
    Bug(
        "a block's key leaves out the blocks before it",
        "kv/block_keys.py",
        "span.append(parent := sha256(parent + ids[block : block + width]).digest())",
        "span.append(sha256(ids[block : block + width]).digest())",
    ),
    Bug(
        "the salt is ignored",
        "kv/cross_blocks.py",
        "digest = sha256(request.cache_root).digest()",
        'digest = sha256(b"").digest()',
    ),
    Bug(
        "a prefix is hit without its state",
        "kv/kv_cache.py",
        "self.states.hold_start(seq, self.states.key(seq, keys[hit - 1]))",
        "pass",
    ),
    Bug(
        "a state takes a token a second time",
        "scheduling/sequence_registry.py",
        "if self._kvs[seq.dp_rank].states is not None:",
        "if not self._kvs:",
    ),
    Bug(
        "a fork starts from zeros",
        "kv/kv_cache.py",
        "self.states.hold_start(child, self.states.key(parent, keys[blocks - 1]))",
        "pass",
    ),
    Bug(
        "groups share their block keys",
        "kv/kv_cache.py",
        'tuple(bytes([g]) if g else b"" for g in',
        'tuple(b"" for g in',
    ),
    Bug(
        "a block is cached before it is full",
        "kv/kv_cache.py",
        "first, last = since // self.block_size, seq.computed // self.block_size",
        "first, last = since // self.block_size, -(-seq.computed // self.block_size)",
    ),
    Bug(
        "acquiring a cached block does not hold it",
        "kv/block_pool.py",
        "                self._eviction_queue.discard(block)\n            self._refs[block] += 1",
        "                self._eviction_queue.discard(block)",
    ),
    Bug(
        "an evicted block keeps its old content in the map",
        "kv/block_pool.py",
        "key = self._key_of.pop(block)\n            del self._block_of[key]\n",
        "key = self._key_of.pop(block)\n",
    ),
    Bug(
        "the head of a sequence is evicted before its tail",
        "kv/block_pool.py",
        "for block in reversed(blocks):",
        "for block in blocks:",
    ),
    Bug(
        "freeing one hold of a shared block frees it",
        "kv/block_pool.py",
        "            if self._refs[block] == 0:\n",
        "            if self._refs[block] <= 1:\n",
    ),
    Bug(
        "a fork writes into the block it shares",
        "kv/kv_cache.py",
        "        if not self._is_shared(seq):\n            return []\n",
        "        return []\n",
    ),
    Bug(
        "a window frees one block too many",
        "kv/kv_cache.py",
        "for i in range(self.specs[g].first_needed(seq.computed) // self.block_size - 1, -1, -1):",
        "for i in range(self.specs[g].first_needed(seq.computed) // self.block_size, -1, -1):",
    ),
    Bug(
        "a window moves by planned tokens, not by computed ones",
        "kv/kv_cache.py",
        "self.specs[g].first_needed(seq.computed) // self.block_size - 1",
        "self.specs[g].first_needed(seq.planned) // self.block_size - 1",
    ),
    Bug(
        "deferred frees happen a step early",
        "kv/deferred_free.py",
        "if after <= self._last_finished:",
        "if after <= self._last_finished + 1:",
    ),
    Bug(
        "a host block that is loaded may be replaced in the same plan",
        "kv/tiers/host.py",
        "            self._held.append(host)\n",
        "            self.pool.free([host])\n",
    ),
    Bug(
        "host blocks may be replaced before the plan is over",
        "kv/tiers/host.py",
        "self.deferred_free.free_after(held, step)",
        "self.deferred_free.free_after(held, 0)",
    ),
    Bug(
        "contents in the host tier are stored again",
        "kv/tiers/host.py",
        "            if held_block is None:\n",
        "            if held_block is None or not pool.free([held_block]):\n",
    ),
    Bug(
        "a block loaded twice in a plan gets the first content",
        "kv/tiers/host.py",
        "            self._loads[block] = host  #",
        "            self._loads.setdefault(block, host)  #",
    ),
    Bug(
        "contents that a failed step did not store are found",
        "kv/tiers/host.py",
        "            self.pool.uncache([copy.dst for copy in copies.stores])\n",
        "",
    ),
    Bug(
        "the host tier keeps forgotten contents",
        "kv/block_pool.py",
        "            tier.forget(keys)\n",
        "            pass\n",
    ),
    Bug(
        "the host tier keeps its contents when the cache is reset",
        "kv/block_pool.py",
        "            tier.forget()\n",
        "            pass\n",
    ),
    Bug(
        "the host tier may replace contents before their load",
        "kv/block_pool.py",
        """        if load is not None:
            load(taken)
        if self._evicted:
            for tier in self._tiers if offer else ():
                tier.offer([*self._evicted], [*self._evicted.values()])
            self._evicted.clear()
""",
        """        if self._evicted:
            for tier in self._tiers if offer else ():
                tier.offer([*self._evicted], [*self._evicted.values()])
            self._evicted.clear()
        if load is not None:
            load(taken)
""",
    ),
    Bug(
        "contents that a failed step did not load are found on the device",
        "kv/kv_cache.py",
        "        self.pool.uncache(lost)\n",
        "",
    ),
    Bug(
        "siblings keep blocks that a failed step did not load",
        "scheduling/scheduler.py",
        "            while lost and self._registry.reclaim(rank):\n",
        "            while False:\n",
    ),
    Bug(
        "a loaded block is not charged to the tenant",
        "kv/kv_cache.py",
        "len(keys), seq.request.tenant, load=lambda",
        'len(keys), b"", load=lambda',
    ),
    Bug(
        "the host tier is used for one group only",
        "kv/kv_cache.py",
        "(self.host is not None and key in self.host)",
        "(self.host is not None and key[:32] in self.host)",
    ),
    Bug(
        "a dummy step stores evicted blocks",
        "scheduling/dummy_step.py",
        "kv.pool.allocate(len(kv.specs), offer=False)",
        "kv.pool.allocate(len(kv.specs))",
    ),
    Bug(
        "a preempted sequence keeps its row",
        "scheduling/scheduler.py",
        "        draft.remove(seq)\n",
        "",
    ),
    Bug(
        "limits do not undo a preempted row",
        "scheduling/plan_builder.py",
        "                    budget.undo(seq, row.count)\n",
        "                    pass\n",
    ),
    Bug(
        "a preempted sequence keeps its unknown token",
        "scheduling/sequence_registry.py",
        "        while seq.tokens[-1] == UNKNOWN:\n            seq.tokens.pop()\n",
        "",
    ),
    Bug(
        "stale rows are applied",
        "scheduling/inflight_steps.py",
        "            step.stale.add(seq)\n",
        "            pass\n",
    ),
    Bug(
        "a sampled token is stored at the wrong index",
        "scheduling/scheduler.py",
        "                    seq.tokens[at] = token\n",
        "                    seq.tokens[at - 1] = token\n",
    ),
    Bug(
        "the fast path ignores stop ids",
        "scheduling/scheduler.py",
        " and token not in seq.stop_ids:",
        ":",
    ),
    Bug(
        "the fast path ignores the number of free decode rows",
        "scheduling/scheduler.py",
        "(ones < slack or (not ones and (slack := draft.free_decode_rows())))",
        "(ones or (slack := draft.free_decode_rows()))",
    ),
    Bug(
        "min_tokens is off by one",
        "scheduling/stop_check.py",
        ">= stop.min_tokens",
        "> stop.min_tokens",
    ),
    Bug(
        "a sequence may exceed max_tokens by one",
        "scheduling/stop_check.py",
        "if length >= seq.max_len else None",
        "if length > seq.max_len else None",
    ),
    Bug(
        "followers never start if their leader ends early",
        "scheduling/sequence_registry.py",
        "        if seq is group.leader and group.followers:\n",
        "        if False:\n",
    ),
    Bug(
        "a finished sequence keeps its slot",
        "scheduling/sequence_registry.py",
        "        self._leaves[seq.dp_rank].append(seq.slot)\n        seq.slot = -1\n",
        "        seq.slot = -1\n",
    ),
    Bug(
        "a sequence with a changed table is not in the plan",
        "scheduling/scheduler.py",
        "            draft.changed_tables.append(seq)\n",
        "            pass\n",
    ),
    Bug(
        "a fork shares a token that the parent has not computed",
        "scheduling/request_group.py",
        "most = min(parent.computed, child.prompt_len - 1, ",
        "most = min(len(parent.tokens), child.prompt_len - 1, ",
    ),
    Bug(
        "recomputed prompt logprobs are returned twice",
        "scheduling/prompt_logprobs_buffer.py",
        "known += logprobs[max(seq.cached + len(known) - row.start, 0) :]",
        "known += logprobs",
    ),
    Bug(
        "the last prompt logprobs are lost if the next step is in flight",
        "scheduling/prompt_logprobs_buffer.py",
        "if len(seq.tokens) > seq.prompt_len and seq.tokens[seq.prompt_len] != UNKNOWN:",
        "if len(seq.tokens) > seq.prompt_len + 1:",
    ),
)


ISOLATION_BUGS = (
    Bug(
        "one suspect is never tried",
        "scheduling/fault_isolation.py",
        "        self._push_group(ids[half:])\n",
        "        self._push_group(ids[half + 1 :])\n",
    ),
    Bug(
        "a request that raises together with others is blamed",
        "scheduling/fault_isolation.py",
        "        if tried and len(ids) == 1:\n",
        "        if tried or len(ids) == 1:\n",
    ),
    Bug(
        "the rest of a trial group is cleared without a trial",
        "scheduling/fault_isolation.py",
        "            self._push_group(_without(self.trial_groups.popleft(), ids))\n",
        "            self.trial_groups.popleft()\n",
    ),
    Bug(
        "other requests have rows in a trial",
        "scheduling/limits/isolation_limit.py",
        "            return want if name in self._bisection.current_group else 0\n",
        "            return want\n",
    ),
    Bug(
        "a trial ends before it reaches the step that raised",
        "scheduling/limits/isolation_limit.py",
        "            self._goal_lengths[seq] = max(seq.planned, self._goal_lengths.get(seq, 0))\n",
        "            self._goal_lengths[seq] = min(1, self._goal_lengths.get(seq, 1))\n",
    ),
    Bug(
        "a crash suspect runs alone for one step only",
        "scheduling/limits/isolation_limit.py",
        "            self._goal_lengths[seq] = seq.generation_start + TRIAL_STEPS - 1\n",
        "            self._goal_lengths[seq] = seq.generation_start\n",
    ),
    Bug(
        "steps are not serialized during a trial of crash suspects",
        "scheduling/limits/isolation_limit.py",
        "        return bool(self._crash_suspects) or self._bisection.current_group is not None\n",
        "        return self._bisection.current_group is not None\n",
    ),
    Bug(
        "blocks of a sequence with non-finite logits are hit",
        "kv/kv_cache.py",
        "self.pool.forget([*computed, *(key for",
        "self.pool.forget([*(key for",
    ),
)
"""Bugs that the tests of fault isolation find."""


def insert_bug(bug: Bug, source: str) -> str:
    assert source.count(bug.old) == 1, f"{bug.file} has {source.count(bug.old)} of {bug.old!r}"
    return source.replace(bug.old, bug.new)


class BugImporter:
    """Import hook: loads one module of quire.core with the bug."""

    def __init__(self, bug: Bug) -> None:
        self.path = CORE / bug.file
        self.source = insert_bug(bug, self.path.read_text(encoding="utf-8"))

    def find_spec(self, name, path=None, target=None):
        parts = self.path.relative_to(CORE.parents[1]).with_suffix("").parts
        if name != ".".join(parts):
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)


def find_failure(seeds: int) -> str | None:
    """Run tests until one fails. Returns its name and error, or None."""
    from tests.pure.core import (
        test_block_pool,
        test_deferred_free,
        test_host_tier,
        test_invariance,
        test_kv_cache,
        test_limits,
        test_scheduler,
    )
    from tests.pure.core.workload import (
        random_beams,
        random_recurrent_run,
        random_run,
        random_squeeze,
        random_squeeze_of_ranks,
    )

    searches = [
        test_block_pool.test_the_tail_of_a_sequence_is_evicted_first,
        test_deferred_free.test_blocks_of_finished_steps_are_freed_at_once,
        test_block_pool.test_forget_applies_to_tiers_too,
        test_host_tier.test_a_block_evicted_before_its_load_is_not_stored,
        test_host_tier.test_a_block_loaded_twice_in_a_plan_gets_the_last_content,
        test_host_tier.test_a_host_block_used_by_a_plan_is_not_replaced_until_it_is_applied,
        test_kv_cache.test_a_loaded_block_is_charged_to_the_tenant,
        test_scheduler.test_a_dummy_step_stores_nothing,
        partial(
            test_invariance.test_siblings_do_not_read_blocks_that_a_failed_step_did_not_load,
            1,
            (None,),
        ),
        test_limits.test_adding_and_removing_a_row_leaves_the_plan_unchanged,
    ]
    for seed in range(seeds):
        searches += [
            partial(run, seed, most_steps=1500)
            for run in (
                random_run,
                random_squeeze,
                random_beams,
                random_squeeze_of_ranks,
                random_recurrent_run,
            )
        ]
    for search in searches:
        try:
            search()
        except Exception as error:  # noqa: BLE001 - a bug may raise any exception
            return f"{_name(search)}: {type(error).__name__}: {str(error)[:100]}"
    return None


def find_isolation_failure() -> str | None:
    """The same with the tests of fault isolation."""
    from tests.pure.core import test_fault_isolation, test_limits, test_scheduler
    from tests.pure.engine import test_engine_core

    contract = test_limits.test_allow_is_bounded_by_want_and_undo_reverts_take
    searches = [
        test_fault_isolation.test_exactly_the_culprits_are_found,
        test_fault_isolation.test_each_suspect_is_tried_alone_or_passes,
        test_scheduler.test_a_row_with_non_finite_logits_ends_and_its_blocks_are_not_hit,
        *(partial(contract, make=make) for name, make in _makers(test_limits, "fault isolation")),
    ]
    many = test_engine_core.test_each_faulty_request_is_ended_and_no_other
    searches.append(
        partial(test_engine_core.test_a_trial_goes_as_far_as_the_step_that_raised, None)
    )
    for depth in (1, 2):
        searches.append(partial(test_engine_core.test_a_suspect_runs_its_first_steps_alone, depth))
        searches += [partial(many, depth, "wait", seed, None) for seed in range(6)]
    for search in searches:
        try:
            search()
        except Exception as error:  # noqa: BLE001 - a bug may raise any exception
            name = search.func.__name__ if isinstance(search, partial) else search.__name__
            return f"{name}: {type(error).__name__}: {str(error)[:100]}"
    return None


def _makers(module, word):
    return [(name, make) for name, make in module.MAKERS.items() if word in name]


def _name(search: Callable[[], object]) -> str:
    if isinstance(search, partial):
        return f"{search.func.__name__}({search.args[0]})"
    return search.__name__


def search(number: int, seeds: int) -> None:
    """Import quire.core with a bug, run the tests, and print what failed."""
    sys.meta_path.insert(0, BugImporter((*BUGS, *ISOLATION_BUGS)[number]))
    failure = find_failure(seeds) if number < len(BUGS) else find_isolation_failure()
    print(number, CAUGHT if failure else MISSED, " ".join(str(failure).split()), flush=True)


def main() -> None:
    for name in ("pytest", "hypothesis.stateful", "numpy", "unittest.mock"):
        importlib.import_module(name)  # the forks have it, and nothing of quire.core
    logging.disable(logging.CRITICAL)
    seeds, *numbers = map(int, sys.argv[1:])
    for number in numbers:
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        try:
            search(number, seeds)
        except BaseException:  # noqa: BLE001 - the child must not go on with the loop
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
