"""quire replay FILE: repeats a flight recording and reports the first plan that differs from the
recorded one. An engine that dies or hangs writes such a file; its name is in the log.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.engine.recording import recording_file
from quire.engine.recording.recording_file import Recording
from quire.errors import ConfigError

PLANS_MATCH, PLANS_DIFFER = 0, 1
COLUMNS = ("step", "ms", "took", "rows", "prompt", "waiting", "free", "why not more", "events")


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    recording = recording_file.read_recording(Path(args.file))
    if not args.show:
        return replay_recording(recording)
    print(format_header(recording))
    for line in format_steps(recording, args.last):
        print(line)
    return PLANS_MATCH


def parser() -> argparse.ArgumentParser:
    """Return the parser of `quire replay`."""
    parser = argparse.ArgumentParser(prog="quire replay", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="recording: flight-....jsonl.gz")
    parser.add_argument(
        "--show", action="store_true", help="print the steps as a table, without repeating them"
    )
    parser.add_argument(
        "--last", type=int, default=0, metavar="N", help="with --show: only the last N steps"
    )
    return parser


def replay_recording(recording: Recording) -> int:
    """Replay it. Returns PLANS_DIFFER if a plan differs."""
    from quire.engine.build import build_scheduler  # imports torch, which --show does not need
    from quire.engine.recording.replay import RecordingReplay

    try:
        found = RecordingReplay(recording, build_scheduler).run()
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"the recording is broken: {type(error).__name__}: {error}") from None
    for note in found.notes:
        print(f"note: {note}")
    for one in found.differences:
        print(f"step {one.step}: {one.what}")
    if not found.differences:
        print(f"all plans up to step {found.steps} are the same as recorded")
    return PLANS_DIFFER if found.differences else PLANS_MATCH


# -- as a table ---------------------------------------------------------------------------------


def format_header(recording: Recording) -> str:
    """Describe the recorded engine and its state at the end."""
    header, config = recording.header, recording.config
    versions = " ".join(f"{name} {number}" for name, number in header["versions"].items())
    beat, cache, scheduler = header["beat"], config.cache, config.scheduler
    lines = [
        f"{header['why']}, {header['written']}",
        f"{versions}; Python {header['python']}, {header['system']}",
        f"{config.model.name} ({config.model.model_type}, {config.model.dtype}) on "
        f"{config.device.kind}: {cache.num_blocks} blocks of {cache.block_size}, at most "
        f"{scheduler.max_num_seqs} sequences and {scheduler.max_num_batched_tokens} tokens per "
        f"step, {scheduler.steps_in_flight} steps in flight",
        f"at the end: {beat['requests']} requests, {beat['rows']} rows in the last plan, "
        f"{beat['steps']} steps and {beat['tokens']} tokens since the start; "
        f"last step submitted to the device: {header['submitted']}",
    ]
    if header["stacks"]:
        lines.append(header["stacks"].rstrip())
    return "\n".join([*lines, ""])


class _StepRow:
    """A row of the table: one step."""

    def __init__(self, record: list[Any], waiting: int, events: list[str]) -> None:
        _, self.step, self.started_at, self.free, *_ = record
        starts, _, counts, _, left, preempted, moved, *rest = record[5:]
        counts = counts or [1] * len(starts)
        drafts = (rest[0] if rest else None) or [0] * len(starts)
        self.rows, self.tokens, self.waiting = len(starts), sum(counts), waiting
        self.prompt_tokens = sum(
            count for count, drafted in zip(counts, drafts) if count > 1 + drafted
        )
        self.event_labels = events
        self.preempted = len(preempted)
        self.duration_label = "in flight"
        if left:
            events.append(f"{len(left)} left")
        if preempted:
            events.append(f"{len(preempted)} preempted")
        if any(drafts):
            events.append(f"{sum(drafts)} drafts")
        if any(moved):
            events.append("blocks out, in, copied: " + ", ".join(map(str, moved)))

    def waiting_reason(self, most_rows: int, most_tokens: int) -> str:
        """Return why no more of the waiting sequences were planned."""
        if not self.waiting:
            return ""
        if self.preempted:
            return "blocks"
        if self.rows >= most_rows:
            return "max sequences"
        return "tokens" if self.tokens >= most_tokens else "blocks or limits"


def format_steps(recording: Recording, last: int = 0) -> Iterator[str]:
    """Yield the table: one line per step, after the column names."""
    limits = recording.config.scheduler
    shown = list(_read_steps(recording.records))[-last:]
    rows: list[tuple[str, ...]] = [COLUMNS]
    began = shown[0].started_at if shown else 0.0
    for one in shown:
        why = one.waiting_reason(limits.max_num_seqs, limits.max_num_batched_tokens)
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
    in_flight: dict[int, _StepRow] = {}
    steps: list[_StepRow] = []
    waiting, events = 0, []
    seen: set[int] = set()
    for record in records:
        kind = record[0]
        if kind == "b" and record[4] and not steps:
            sequences = [one for facts in record[4] for one in facts["sequences"]]
            seen = {one[0] for one in sequences if one[4]}  # they run
            waiting = sum(len(facts["live"]) for facts in record[4]) - len(seen)
        elif kind == "a":
            facts = record[2]
            waiting += facts.get("n", 1)
            events.append(f"+{facts['digest']} ({facts['prompt']} tokens)")
        elif kind == "p":
            for number, request, index, computed, _ in record[4]:
                waiting -= number not in seen
                seen.add(number)
                events.append(f"{request}.{index} joins" + (f" at {computed}" if computed else ""))
            in_flight[record[1]] = one = _StepRow(record, max(waiting, 0), events)
            steps.append(one)
            events = []
        elif kind in "lf" and record[1] in in_flight:
            one = in_flight.pop(record[1])
            one.duration_label = f"{(record[2] - one.started_at) * 1e3:.1f}"
            if kind == "f":
                one.event_labels.append("raised")
            for number, index, finish, *_ in record[5] if kind == "l" else ():
                one.event_labels.append(f"{number}.{index} ends: {finish}")
        elif kind in _EVENT_LABELS:
            request = record[2] if len(record) > 2 else ""
            events.append(f"{request} {_EVENT_LABELS[kind]}".strip())
    yield from steps


_EVENT_LABELS = {
    "x": "aborted",
    "e": "ended",
    "r": "released",
    "c": "prefix cache reset",
    "m": "failed alone",
}
