"""Worker processes that write documents, tokenize and pack them into rows for the trainer.

A row is ROW tokens of whole documents:

    tokens   [doc 0 ........][doc 1 ....][doc 2 .............][pad]
    weights   what predicting the NEXT token counts: prompt little, answer 1, across a border 0
    starts    [0, end of doc 0, end of doc 1, ..., ROW, ROW, ROW]   (DOCS + 1 entries)
"""

import multiprocessing as mp
import os
from pathlib import Path
from queue import Full

import numpy as np
from draw import Draw
from mixture import document

ROW = 8192
DOCS = 96
CHUNK = 16  # rows that travel together; all short or all long
SHORT, LONG = 1024, 4096  # longest context of the two sorts
LONG_SHARE = (
    0.12  # chunks whose documents run on in one context, so that late positions are trained
)
PROMPT_WEIGHT = 0.1
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, int]  # tokens, weights, starts, longest


class Packer:
    """Turns a stream of documents into rows."""

    def __init__(self, tokenizer_file: Path, seed: int) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.draw = Draw(seed)
        self.waiting: list[tuple[list[int], int]] = []
        self.wide: list[tuple[list[int], int]] = []  # documents only a long row takes

    def refill(self, count: int = 1500) -> None:
        docs = [document(self.draw) for _ in range(count)]
        flat = [part for doc in docs for part in doc]
        ids = [e.ids for e in self.tokenizer.encode_batch(flat, add_special_tokens=False)]
        for i in range(0, len(ids), 2):
            doc = (ids[i] + ids[i + 1], len(ids[i]))
            if len(doc[0]) <= LONG:
                (self.waiting if len(doc[0]) <= SHORT else self.wide).append(doc)

    def row(self, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = np.zeros(ROW, np.int16)
        weights = np.zeros(ROW, np.float16)
        starts = np.full(DOCS + 1, ROW, np.int32)
        at = n = 0
        while n < DOCS - 1:
            if not self.waiting:
                self.refill()
            source = self.wide if longest == LONG and self.wide else self.waiting
            ids, prompt = source[-1]
            if at + len(ids) > ROW:
                break
            source.pop()
            tokens[at : at + len(ids)] = ids
            weights[at : at + len(ids) - 1] = 1.0
            weights[at : at + max(prompt - 1, 0)] = PROMPT_WEIGHT
            starts[n] = at
            at, n = at + len(ids), n + 1
        starts[n] = at  # the padding is a document of its own
        return tokens, weights, self.merge(starts) if longest == LONG else starts

    def merge(self, starts: np.ndarray) -> np.ndarray:
        """Let neighbouring documents share one context of up to LONG tokens."""
        out = np.full(DOCS + 1, ROW, np.int32)
        out[0] = last = previous = n = 0
        for end in starts[1:]:
            if end - last > LONG:
                n += 1
                out[n] = last = previous
        return out


def rows_of(packer: Packer) -> Rows:
    longest = LONG if packer.draw.chance(LONG_SHARE) else SHORT
    tokens, weights, starts = zip(*(packer.row(longest) for _ in range(CHUNK)), strict=True)
    return np.stack(tokens), np.stack(weights), np.stack(starts), longest


def work(
    queue: "mp.Queue[Rows]", stop: "mp.synchronize.Event", tokenizer_file: Path, seed: int
) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    packer = Packer(tokenizer_file, seed)
    while not stop.is_set():
        rows = rows_of(packer)
        while not stop.is_set():
            try:
                queue.put(rows, timeout=0.5)
                break
            except Full:
                continue


class Feed:
    """The running workers and the queue that they fill."""

    def __init__(self, tokenizer_file: Path, seed: int, workers: int) -> None:
        context = mp.get_context("fork")
        self.queue: mp.Queue[Rows] = context.Queue(maxsize=256)
        self.stop = context.Event()
        self.workers = [
            context.Process(
                target=work,
                args=(self.queue, self.stop, tokenizer_file, seed * 1000 + i),
                daemon=True,
            )
            for i in range(workers)
        ]
        for worker in self.workers:
            worker.start()

    def close(self) -> None:
        self.stop.set()
        for worker in self.workers:
            worker.terminate()
