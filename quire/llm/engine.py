"""LLMEngine: takes requests and returns outputs, one step at a time, in the caller's thread.

With data_parallel_size it has several engines in other processes, and a step waits for outputs.

Joins the engine (tokens) and text processing for callers that drive the steps, such as LLM. Owns
the table of running requests; a request leaves it with its last output.
"""

from __future__ import annotations

import logging
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from quire.config import vllm_environment
from quire.config.engine_args import options_of
from quire.config.engine_config import EngineConfig
from quire.config.vllm_environment import start_process
from quire.core.params import SamplingParams
from quire.core.types import Request, Update
from quire.engine.core.gc_control import freeze_gc_heap
from quire.engine.startup.early_start import begin_startup, early_device, early_rank_count
from quire.engine.startup.text_setup import build_pooling_processor
from quire.errors import Unsupported
from quire.llm.adapters import AdapterRequests
from quire.llm.compat import ModelConfigView, check_priority
from quire.llm.progress import InterruptHandler
from quire.outputs import RequestOutput
from quire.platform import bytecode_cache
from quire.text.input_processor import PreparedRequest
from quire.text.output.output_processor import RequestOutputProcessor
from quire.text.prompts import Prompt
from quire.text.tokenizing.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.engine.build import EngineBundle
    from quire.engine.core.engine_core import EngineCore
    from quire.llm.engine_processes import PooledBundle, PooledEngines

FIRST_STEP_SHARE = 8
"""A call's first step has an eighth of the tokens of a full one: the device begins early."""
IDLE_SLEEP_S = 0.05
"""A step without work ends after so many seconds, so that Ctrl-C is noticed."""


class LLMEngine:
    """Requests and their outputs over a built engine."""

    def __init__(self, built: EngineBundle | PooledBundle) -> None:
        freeze_gc_heap()  # collections over the objects of start-up would take a sixth
        self.built = built
        self.engine: EngineCore | PooledEngines = built.engine
        self.inputs = built.input_processor
        self.adapters = AdapterRequests(built.adapters)
        if built.adapters is not None:
            self.inputs.media_adapters.find = built.adapters.find
        self.pooling_inputs = build_pooling_processor(
            built.config, built.tokenizer, self.inputs.media
        )
        self.finished: Tally[str] = Tally()
        self._running: dict[str, RequestOutputProcessor] = {}
        self._subscribers: dict[str, Callable[[Update], None]] = {}
        self._kept_outputs: list[
            RequestOutput
        ] = []  # of other requests, while pool() or a beam search ran
        self._clock = time.monotonic if built.config.observe.log_stats else None

    @classmethod
    def from_engine_args(cls, engine_args: Any, usage_context: object = None) -> LLMEngine:
        """Build the engine that the arguments describe."""
        start_process()  # first: parsing the options may log
        options = vllm_environment.apply_environment(options_of(engine_args))
        vllm_environment.log_notes(strict=options.observe.fail_on_environ_validation)
        if options.observe.log_level is not None:
            start_process(level=options.observe.log_level)
        if options.parallel.num_engines > 1:
            from quire.llm.engine_processes import EngineProcesses, PooledBundle

            level = logging.getLevelName(logging.getLogger("quire").level)
            return cls(PooledBundle(EngineProcesses.start(options, log_level=level)))
        timer = begin_startup(early_device(options), ranks=early_rank_count(options))
        with bytecode_cache.importing():
            from quire.engine.build import build_engine  # torch: it comes while the driver starts

            return cls(build_engine(options, timer=timer))

    @property
    def config(self) -> EngineConfig:
        return self.built.config

    @property
    def model_config(self) -> ModelConfigView:
        return ModelConfigView(self.config.model, self.config.scheduler)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.built.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises Unsupported when there is none."""
        if self.built.tokenizer is None:
            raise Unsupported("there is no tokenizer: skip_tokenizer_init was set")
        return self.built.tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: object | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request; outputs come from step(). Raises RequestError. Returns its id."""
        (adapter,) = self.adapters.resolve(lora_request, 1)
        prepared = self.inputs.process(
            prompt,
            params,
            request_id=str(request_id),
            priority=check_priority(priority, self.config.scheduler.policy),
            arrived_at=time.monotonic() if arrival_time is None else arrival_time,
            tokenization=tokenization_kwargs,
            adapter=adapter,
        )
        self.submit(prepared, lora_request)
        return prepared.request.id

    def submit(self, prepared: PreparedRequest, lora_request: object | None = None) -> None:
        """Queue a prepared request. Raises RequestError and changes nothing.

        lora_request: what its outputs show.
        """
        self.engine.add(prepared.request)
        assembler = RequestOutputProcessor(
            prepared, self.built.tokenizer, clock=self._clock, lora_request=lora_request
        )
        self._running[prepared.request.id] = assembler

    def subscribe(self, request_id: str, take: Callable[[Update], None] | None) -> None:
        """Pass the updates of a request that was added to the engine itself to `take`."""
        if take is None:
            self._subscribers.pop(request_id, None)
        else:
            self._subscribers[request_id] = take

    def pool(
        self, requests: Iterable[Request], on_result: Callable[[Update], None] | None = None
    ) -> list[Update]:
        """Run pooling requests to their ends; return the last update of each, in order.

        requests: are taken while the device computes those before, each step twice as many as the
        step before until steps are full. on_result: is called with each as it comes. Other requests
        run meanwhile; their outputs are kept for the next step(). If one request fails, or Ctrl-C
        is pressed between two steps, all are aborted and the error is raised.
        """
        updates: dict[str, Update] = {}
        added: list[str] = []

        def take(update: Update) -> None:
            if update.error is not None:
                raise update.to_exception()
            updates[update.request_id] = update
            if on_result is not None:
                on_result(update)

        budget = self.config.scheduler.max_num_batched_tokens * self.config.parallel.engines
        room = size = max(budget // FIRST_STEP_SHARE, 1)
        try:
            with InterruptHandler() as interrupt:
                for request in requests:
                    self.engine.add(request)
                    added.append(request.id)
                    self._subscribers[request.id] = take
                    room -= len(request.prompt)
                    if room <= 0:  # the device runs a full step while more are added
                        interrupt.check()
                        self._kept_outputs += self._step()
                        room = size = min(2 * size, budget)
                while len(updates) < len(added):
                    interrupt.check()
                    self._kept_outputs += self._step()
        except BaseException:
            for one in added:
                if one not in updates:
                    self.engine.abort(one)
            self.engine.drain()
            raise
        finally:
            for one in added:
                del self._subscribers[one]
        return [updates[one] for one in added]

    def step_keeping_outputs(self) -> bool:
        """Run a step, and keep its outputs for the next step(). Returns whether there was one."""
        if self.engine.empty:
            return False
        self._kept_outputs += self._step()
        return True

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs it yields, by each request's output_kind."""
        if self._kept_outputs:
            kept, self._kept_outputs = self._kept_outputs, []
            return kept
        return self._step()

    def _step(self) -> list[RequestOutput]:
        outputs = []
        if self.engine.idle and not self.engine.empty:
            self.engine.wait(IDLE_SLEEP_S)  # every request waits for a resource
        for update in self.engine.step():
            assembler = self._running.get(update.request_id)
            if assembler is None:
                take = self._subscribers.get(update.request_id)
                if take is not None:
                    take(update)
                continue
            output = assembler.push(update)
            for index in assembler.aborts:
                self.engine.abort_sequence(update.request_id, index)
            if output is not None:
                outputs.append(output)
                if output.finished:
                    del self._running[update.request_id]
                    self._count(output)
        if not self._running:
            self.engine.drain()
        return outputs

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests now, without a further output. Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            if self._running.pop(one, None) is not None:
                self.engine.abort(one)
                self.finished["abort"] += 1
        self.engine.drain()

    def has_unfinished_requests(self) -> bool:
        return bool(self._running) or bool(self._kept_outputs)

    def get_num_unfinished_requests(self) -> int:
        return len(self._running)

    def add_lora(self, lora_request: object) -> bool:
        """Load an adapter. Returns whether it was not loaded already. Raises RequestError."""
        return self.adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; running requests keep it. Returns whether it was loaded."""
        return self.adapters.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in host memory until it is removed. Raises RequestError."""
        return self.adapters.pin(lora_id)

    def list_loras(self) -> set[int]:
        """Return the numbers of loaded adapters."""
        return self.adapters.numbers()

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False while blocks are in use."""
        return self.engine.reset_prefix_cache()

    def _count(self, output: RequestOutput) -> None:
        for one in output.outputs:
            self.finished[one.finish_reason or "stop"] += 1
