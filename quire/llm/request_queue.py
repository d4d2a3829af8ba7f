"""Queue of LLM: requests that were submitted, and outputs that finished before they were collected.

One thread calls it: the caller of LLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from quire.llm.engine import LLMEngine
from quire.llm.progress import InterruptHandler, ProcessedBar, UseTqdm
from quire.outputs import RequestOutput
from quire.text.input_processor import PreparedRequest

log = logging.getLogger(__name__)


class RequestQueue:
    """Requests that are not yet collected, in the order in which they were submitted."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._ids: list[str] = []
        self._done: dict[str, RequestOutput] = {}

    @property
    def ids(self) -> list[str]:
        """The ids of all requests that are not yet collected."""
        return list(self._ids)

    @property
    def all_done(self) -> bool:
        """Whether the outputs of all of them are there."""
        return self._done.keys() >= set(self._ids)

    def submit(
        self,
        prepared: Iterable[PreparedRequest],
        lora_requests: Sequence[object],
        *,
        first_step: int | None = None,
    ) -> list[str]:
        """Queue requests in the engine as they come, all or none. Returns their ids.

        first_step: tokens of prompts behind which a step runs: the device computes them while the
        others are queued. None: no step runs.
        """
        ids: list[str] = []
        try:
            for one, lora_request in zip(prepared, lora_requests):
                self._engine.submit(one, lora_request)
                ids.append(one.request.id)
                if first_step is not None:
                    first_step -= len(one.request.prompt)
                    if first_step <= 0:
                        self.step()
                        first_step = None
        except BaseException:  # Ctrl-C too: the outputs would never be collected
            self.abort(ids)
            raise
        self._ids += ids
        return ids

    def step(self) -> bool:
        """Run a step; keep the outputs. Returns whether there was one to run."""
        if not self._engine.has_unfinished_requests():
            return False
        for output in self._engine.step():
            self._done[output.request_id] = output
        return True

    def collect(self, ids: Sequence[str], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Step until these are done; return their outputs. Ctrl-C between two steps aborts them.

        Raises the engine's error of a request, as if it had been refused at once.
        """
        bar = ProcessedBar(len(ids), use_tqdm)
        missing = {one for one in ids if one not in self._done}
        try:
            with InterruptHandler() as interrupt:
                for output in [self._done[one] for one in ids if one in self._done]:
                    _raise_fault(output)
                    bar.count_finished(output)
                while missing:
                    interrupt.check()
                    for output in self._engine.step():
                        self._done[output.request_id] = output
                        if output.request_id in missing:
                            _raise_fault(output)
                            missing.remove(output.request_id)
                            bar.count_finished(output)
        except BaseException:
            self.abort(ids)
            raise
        finally:
            bar.close()
        outputs = [self._done[one] for one in ids]
        self._remove(ids)
        for output in outputs:
            if output.error is not None:
                log.error("request %s ended with an error: %s", output.request_id, output.error)
        return outputs

    def run_all(self) -> None:
        """Step until all are done. Their outputs stay here."""
        while self.step():
            pass

    def abort(self, ids: Sequence[str]) -> None:
        """End requests, and drop their outputs."""
        self._engine.abort_request(ids)
        self._remove(ids)

    def _remove(self, ids: Sequence[str]) -> None:
        removed = set(ids)
        self._ids = [one for one in self._ids if one not in removed]
        for one in ids:
            self._done.pop(one, None)


def _raise_fault(output: RequestOutput) -> None:
    if output.fault is not None:
        raise output.fault
