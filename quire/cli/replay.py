"""quire replay FILE: run a flight recording again, and say where the plans that are made now are
not those that were recorded. An engine that dies or hangs leaves such a file; the log names it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.engine.recording import recording_file
from quire.engine.recording.recording_file import Recording
from quire.errors import ConfigError

PLANS_MATCH, PLANS_DIFFER = 0, 1
COLUMNS = ("step", "ms", "took", "rows", "prompt", "waiting", "free", "why not more", "news")


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    recording = recording_file.read_recording(Path(args.file))
    if args.show:
        print(format_header(recording))
        for line in format_steps(recording, args.last):
            print(line)
        return PLANS_MATCH
    return replay_recording(recording, args.model, as_json=args.json)


def parser() -> argparse.ArgumentParser:
    """The flags of `quire replay`."""
    made = argparse.ArgumentParser(prog="quire replay", description=__doc__)
    made.add_argument("file", metavar="FILE", help="a recording: flight-....jsonl.gz")
    made.add_argument("--show", action="store_true", help="print it as a table; run nothing")
    made.add_argument(
        "--last", type=int, default=0, metavar="N", help="with --show: the last N steps only"
    )
    made.add_argument(
        "--model",
        metavar="MODEL",
        help="carry the plans out on this device, too, with this model (folder or name)",
    )
    made.add_argument("--json", action="store_true", help="what was found, as JSON")
    return made


def replay_recording(recording: Recording, model: str | None, *, as_json: bool) -> int:
    """Run it; 1 if a plan is another."""
    from quire.engine.build import build_scheduler  # torch's world, which --show does without
    from quire.engine.recording.replay import RecordingReplay

    executor = None if model is None else _build_executor(recording, model)
    try:
        found = RecordingReplay(recording, build_scheduler, executor).run()
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"the recording is broken: {type(error).__name__}: {error}") from None
    if as_json:
        differences = [one._asdict() for one in found.differences]
        print(json.dumps({"steps": found.steps, "differences": differences, "notes": found.notes}))
    else:
        for note in found.notes:
            print(f"note: {note}")
        for one in found.differences:
            print(f"step {one.step}: {one.what}")
        if not found.differences:
            print(f"all plans up to step {found.steps} are as they were recorded")
    return PLANS_DIFFER if found.differences else PLANS_MATCH


def _build_executor(recording: Recording, model: str) -> Any:
    """A device half as large as the recorded one, with a model of one's own."""
    from quire.config.options import Options
    from quire.engine.build import build_engine_core

    cache, said = recording.config.cache, recording.config.scheduler
    options = Options.from_flat(
        {
            "model": model,
            "block_size": cache.block_size,
            "num_gpu_blocks_override": cache.num_blocks,
            "max_num_seqs": said.max_num_seqs,
            "max_num_batched_tokens": said.max_num_batched_tokens,
            "max_model_len": said.max_model_len,
            "steps_in_flight": said.steps_in_flight,
        }
    )
    return build_engine_core(options, lambda config, folder: None, server=True).engine.executor


# -- as a table ---------------------------------------------------------------------------------


def format_header(recording: Recording) -> str:
    """What the file says of the engine and of its end."""
    header, config = recording.header, recording.config
    versions = " ".join(f"{name} {number}" for name, number in header["versions"].items())
    beat, cache, said = header["beat"], config.cache, config.scheduler
    lines = [
        f"{header['why']}, {header['written']}",
        f"{versions}; Python {header['python']}, {header['system']}",
        f"{config.model.name} ({config.model.model_type}, {config.model.dtype}) on "
        f"{config.device.kind}: {cache.num_blocks} blocks of {cache.block_size}, at most "
        f"{said.max_num_seqs} sequences and {said.max_num_batched_tokens} tokens a step, "
        f"{said.steps_in_flight} steps in flight",
        f"at the end: {beat['requests']} requests, {beat['rows']} rows in the latest plan, "
        f"{beat['steps']} steps and {beat['tokens']} tokens since it began; "
        f"the last step that the device was given is {header['submitted']}",
    ]
    if header["stacks"]:
        lines.append(header["stacks"].rstrip())
    return "\n".join([*lines, ""])


class _StepRow:
    """A step on its way into the table."""

    def __init__(self, record: list[Any], rows: int, waiting: int, news: list[str]) -> None:
        _, self.step, self.started_at, self.free, starts, _, counts, _, left, preempted, moved = (
            record
        )
        counts = counts or [1] * len(starts)
        self.rows, self.tokens, self.waiting = rows, sum(counts), waiting
        self.prompt_tokens = sum(count for count in counts if count > 1)
        self.event_labels = news
        self.preempted = len(preempted)
        self.duration_label = "under way"
        if left:
            news.append(f"{len(left)} left")
        if preempted:
            news.append(f"{len(preempted)} preempted")
        if any(moved):
            news.append("blocks out, in, copied: " + ", ".join(map(str, moved)))

    def waiting_reason(self, most_rows: int, most_tokens: int) -> str:
        """What kept those who wait from coming in."""
        if not self.waiting:
            return ""
        if self.preempted:
            return "blocks"
        if self.rows >= most_rows:
            return "seats"
        return "tokens" if self.tokens >= most_tokens else "blocks or limits"


def format_steps(recording: Recording, last: int = 0) -> Iterator[str]:
    """A line a step."""
    said = recording.config.scheduler
    shown = list(_read_steps(recording.records))[-last:]
    rows: list[tuple[str, ...]] = [COLUMNS]
    began = shown[0].started_at if shown else 0.0
    for one in shown:
        why = one.waiting_reason(said.max_num_seqs, said.max_num_batched_tokens)
        numbers = (one.rows, one.prompt_tokens, one.waiting, one.free)
        at = f"{(one.started_at - began) * 1e3:.1f}"
        rows.append(
            (
                str(one.step),
                at,
                one.duration_label,
                *map(str, numbers),
                why,
                "; ".join(one.event_labels),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:7], widths)]
        yield "  ".join([*cells, row[7].ljust(widths[7]), row[8]]).rstrip()


def _read_steps(records: list[list[Any]]) -> Iterator[_StepRow]:
    under_way: dict[int, _StepRow] = {}
    done: list[_StepRow] = []
    waiting, rows, news = 0, 0, []
    seen: set[int] = set()
    for record in records:
        kind = record[0]
        if kind == "b" and record[4] and not done:
            running = {s[0] for facts in record[4] for s in facts["sequences"] if s[4]}
            seen |= {s[0] for facts in record[4] for s in facts["sequences"]}
            waiting = sum(len(facts["alive"]) for facts in record[4]) - len(running)
        elif kind == "a":
            facts = record[2]
            waiting += facts.get("n", 1)
            news.append(f"+{facts['digest']} ({facts['prompt']} tokens)")
        elif kind == "j":
            waiting -= record[1] not in seen
            seen.add(record[1])
            news.append(
                f"{record[2]}.{record[3]} joins" + (f" at {record[4]}" if record[4] else "")
            )
        elif kind == "p":
            rows = len(record[4])
            one = _StepRow(record, rows, max(waiting, 0), news)
            news = []
            under_way[record[1]] = one
            done.append(one)
        elif kind in "lf" and record[1] in under_way:
            one = under_way.pop(record[1])
            one.duration_label = f"{(record[2] - one.started_at) * 1e3:.1f}"
            if kind == "f":
                one.event_labels.append("raised")
            for number, index, finish, *_ in record[5] if kind == "l" else ():
                one.event_labels.append(f"{number}.{index} ends: {finish}")
        elif kind in _EVENT_LABELS:
            news.append(f"{record[2] if len(record) > 2 else ''} {_EVENT_LABELS[kind]}".strip())
    yield from done


_EVENT_LABELS = {"x": "aborted", "e": "ended", "r": "released", "c": "cache emptied", "m": "blamed"}
