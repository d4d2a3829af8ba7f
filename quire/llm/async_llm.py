"""AsyncLLM: the API for programs with an event loop. Takes requests and streams their outputs.

The engines (one; several with data_parallel_size) run in processes of their own, which end with
this object, or with this process. This process converts prompts to tokens and tokens to text. An
object belongs to one event loop at a time; another loop may use it after the first is closed
(asyncio.run twice).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from quire.config import vllm_environment
from quire.config.engine_args import options_of
from quire.config.engine_config import EngineConfig
from quire.config.vllm_environment import start_process
from quire.core.params import SamplingParams
from quire.core.pooling_params import PoolingParams
from quire.core.types import AdapterRef
from quire.engine.client.engine_pool import EnginePool
from quire.engine.client.generation import OutputGeneration, start_output_generation
from quire.engine.client.pooling import pool
from quire.engine.startup.text_setup import build_input_processor, build_pooling_processor
from quire.engine.supervise.engine_group_thread import EngineGroupThread
from quire.errors import EngineDead, EngineError, Unsupported
from quire.llm.adapters import AsyncAdapterRequests
from quire.llm.compat import ModelConfigView, check_priority
from quire.llm.engine_processes import EngineProcesses
from quire.llm.pooling import make_outputs, read_settings, require_processor
from quire.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.text.input_processor import PreparedRequest
from quire.text.pooling_input import PoolingInput
from quire.text.prompts import Prompt, read_prompt_media
from quire.text.tokenizing.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LONG_CHARS = 20_000
"""Longer prompts are tokenized in another thread."""
DRAIN_POLL_S = 0.05
UNSUPPORTED_METHODS = {
    "collective_rpc": "calling workers in another process (LLM has it)",
    "release_kv_cache_memory": "returning KV memory alone (sleep(level=1) does it)",
    "scale_elastic_ep": "elastic expert parallelism",
    "init_weight_transfer_engine": "weight transfer",
    "start_weight_update": "weight transfer",
    "update_weights": "weight transfer",
    "finish_weight_update": "weight transfer",
    "get_weight_version": "weight transfer",
}
"""Methods of unsupported features, and the feature of each."""


class AsyncLLM:
    """A ready engine. Make one with from_engine_args(); end it with shutdown()."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        connect: Callable[[], EnginePool],
        *,
        engines: EngineGroupThread | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.inputs = build_input_processor(config, tokenizer)
        self._connect = connect
        self._request_numbers = itertools.count()
        self._pooling_inputs = build_pooling_processor(config, tokenizer, self.inputs.media)
        self._adapters = AsyncAdapterRequests(enabled=config.adapters is not None)
        self.inputs.media_adapters.find = self._adapters.of_start
        self._running: dict[str, list[OutputGeneration | RunningPool]] = {}  # by the user's id
        self._client: EnginePool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._end = weakref.finalize(self, engines.stop) if engines is not None else None

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: object = None,
    ) -> AsyncLLM:
        """Start the engine that the arguments describe, and wait until it is ready.

        engine_args: AsyncEngineArgs, Options, or a dict of flat option names. The last two
        arguments are for scripts that give them; the loop runs in the engine's process.
        """
        if stat_loggers:
            raise Unsupported("stat_loggers: read the engine with snapshot() or stats()")
        start_process()
        options = vllm_environment.apply_environment(options_of(engine_args))
        vllm_environment.log_notes(strict=options.observe.fail_on_environ_validation)
        level = options.observe.log_level or logging.getLevelName(logging.getLogger("quire").level)
        start_process(level=level)
        started = EngineProcesses.start(options, log_level=level)
        return cls(started.config, started.tokenizer, started.connect, engines=started.engines)

    def __getattr__(self, name: str) -> NoReturn:
        feature = UNSUPPORTED_METHODS.get(name)
        later = f": quire does not support {feature} yet" if feature else ""
        raise AttributeError(f"AsyncLLM has no {name!r}{later}", name=name, obj=self)

    # -- generating ---------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_text: str | None = None,
        lora_request: object | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one prompt as they arrive, by the output_kind of its params.

        Raises RequestError before anything runs, EngineError if the request fails, EngineDead.
        Leaving the loop early aborts the request. request_id: may be in use; None: generated.
        data_parallel_rank: of the engine that runs it; None: where it is soonest.
        """
        number = next(self._request_numbers)
        name = f"request-{number}" if request_id is None else str(request_id)
        client = self._on_this_loop()
        adapter = await self._adapters.resolve(client, lora_request)
        if self.inputs.media_adapters.kinds:
            await self._adapters.read_start(client)
        prepared = await self._prepared(
            prompt, sampling_params, f"{name}-{number}", tokenization_kwargs, priority, adapter
        )
        generation = await start_output_generation(
            client,
            [prepared],
            self.tokenizer,
            clock=self._clock,
            lora_request=lora_request,
            rank=data_parallel_rank,
        )
        self._running.setdefault(name, []).append(generation)
        try:
            async for batch in generation:
                for _, output in batch:
                    output.request_id = name
                    yield output
        finally:
            generation.close()
            self._forget(name, generation)

    async def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        **named: Any,
    ) -> AsyncIterator[RequestOutput]:
        """As generate(), in the form of older releases: `async for x in await add_request(...)`."""
        return self.generate(prompt, params, request_id, **named)

    async def _prepared(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str,
        tokenization: Mapping[str, object] | None,
        priority: int,
        adapter: AdapterRef | None,
    ) -> PreparedRequest:
        if hasattr(prompt, "__aiter__"):
            raise Unsupported("a prompt in several pieces is not supported", param="prompt")
        arrived_at = time.monotonic()

        def work() -> PreparedRequest:
            return self.inputs.process(
                prompt,
                params,
                request_id=request_id,
                priority=check_priority(priority, self.config.scheduler.policy),
                arrived_at=arrived_at,
                tokenization=tokenization,
                adapter=adapter,
            )

        return await asyncio.to_thread(work) if _is_long(prompt) else work()

    def _forget(self, name: str, generation: OutputGeneration | RunningPool) -> None:
        left = [one for one in self._running.get(name, ()) if one is not generation]
        if left:
            self._running[name] = left
        else:
            self._running.pop(name, None)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests now: their iterators give a last output. Unknown ids are ignored."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        found = [one for name in names for one in self._running.get(name, ())]
        if found:
            await self._on_this_loop().abort(x for one in found for x in one.request_ids)

    async def add_lora(self, lora_request: object) -> bool:
        """Load an adapter. Returns whether it was not loaded already. Raises RequestError."""
        known = self._adapters.has(lora_request)
        await self._adapters.resolve(self._on_this_loop(), lora_request)
        return not known

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; running requests keep it. Returns whether it was loaded."""
        return await self._adapters.remove(self._on_this_loop(), lora_id)

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in host memory until it is removed. Raises RequestError."""
        return await self._adapters.pin(self._on_this_loop(), lora_id)

    async def list_loras(self) -> set[int]:
        """Return the numbers of loaded adapters."""
        return self._adapters.numbers()

    async def wait_for_requests_to_drain(self, drain_timeout: int = 300) -> None:
        """Wait until no request runs. Raises TimeoutError."""
        deadline = time.monotonic() + drain_timeout
        while self._running:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{len(self._running)} requests ran for {drain_timeout} s more")
            await asyncio.sleep(DRAIN_POLL_S)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: object | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, object] | None = None,
        *,
        data_parallel_rank: int | None = None,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """Give one output: the vector, labels or rows of a prompt, as the task of the params is.

        Raises RequestError before anything runs, EngineError if the request fails, EngineDead.
        """
        processor = require_processor(self._pooling_inputs, "encode")
        number = next(self._request_numbers)
        name = f"request-{number}" if request_id is None else str(request_id)
        client = self._on_this_loop()
        adapter = await self._adapters.resolve(client, lora_request)
        params, options = read_settings(pooling_params, None, tokenization_kwargs)
        rank = check_priority(priority, self.config.scheduler.policy)
        common = {"priority": rank, "arrived_at": time.monotonic(), "adapter": adapter}

        def work() -> list[PoolingInput]:
            lazily = processor.iter_prompts(
                [prompt], params, name=f"{name}-{number}", options=options, common=common
            )
            return list(lazily)

        inputs = await asyncio.to_thread(work) if _is_long(prompt) else work()
        running = RunningPool([request.id for request in inputs[0].requests])
        self._running.setdefault(name, []).append(running)
        try:
            updates = await pool(client, inputs[0].requests, data_parallel_rank)
        finally:
            self._forget(name, running)
        arrays, cached = make_outputs(inputs, updates)
        yield PoolingRequestOutput(name, PoolingOutput(arrays[0]), inputs[0].token_ids, cached[0])

    # -- the engine's properties ----------------------------------------------------------------

    async def get_tokenizer(self, lora_request: object | None = None) -> Tokenizer:
        """The tokenizer, of adapters too. Raises Unsupported when there is none."""
        if self.tokenizer is None:
            raise Unsupported("there is no tokenizer: skip_tokenizer_init was set")
        return self.tokenizer

    @property
    def model_config(self) -> ModelConfigView:
        return ModelConfigView(self.config.model, self.config.scheduler)

    async def get_model_config(self) -> ModelConfigView:
        return self.model_config

    async def get_supported_tasks(self) -> tuple[str, ...]:
        section = self.config.pooling
        tasks = () if section is None else section.tasks
        return ("generate", *tasks) if self.config.generates else tasks

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of sampling parameters: the model's generation config."""
        return self.inputs.defaults.clone()

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Log the engine's statistics now."""
        log.info("%s", await self._on_this_loop().stats())

    # -- start and end ------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Check that the engine answers. Raises EngineDead."""
        await self._on_this_loop().stats()

    @property
    def is_running(self) -> bool:
        return not self._stopped and not self.errored

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        return (
            self._client is not None and not self._stopped and self._client.dead_error is not None
        )

    @property
    def dead_error(self) -> EngineDead:
        dead = self._client.dead_error if self._client is not None else None
        return dead or EngineDead("the engine was shut down")

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engines and their processes; requests fail with EngineDead. timeout: unused."""
        if self._stopped:
            return
        self._stopped = True
        if self._client is not None and self._loop is not None and not self._loop.is_closed():
            self._client.fail_streams(EngineDead("the engine was shut down"))
            self._client.close()
        if self._end is not None:
            self._end()

    # -- the engine between requests ------------------------------------------------------------

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache. False while requests use it."""
        client = self._on_this_loop()
        return await client.reset_prefix_cache(reset_running=reset_running_requests)

    async def reset_mm_cache(self) -> None:
        """Forget processed images, video and audio. Rows of the encoder stay on the device."""
        if self.inputs.media is not None:
            self.inputs.media.reset_cache()

    async def reset_encoder_cache(self) -> None:
        """Forget what the encoder made of images, video and audio."""
        await self._on_this_loop().reset_encoder_cache()

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Stop generating. 0: pause; 1: also drop and free the KV cache."""
        await self._on_this_loop().sleep(level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo sleep, for some tags (weights, kv_cache, scheduling) or all."""
        await self._on_this_loop().wake_up(tags)

    async def is_sleeping(self) -> bool:
        return self._on_this_loop().is_sleeping

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Run no steps until resume_generation(); new requests wait."""
        keeps = mode == "keep"  # kept requests need their cache
        await self._on_this_loop().pause(mode, clear_cache=clear_cache and not keeps)

    async def resume_generation(self) -> None:
        await self._on_this_loop().resume()

    async def is_paused(self) -> bool:
        return self._on_this_loop().is_paused

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record a trace of the engine's process until stop_profile()."""
        if profile_prefix is not None:
            raise Unsupported("profile_prefix is not supported", param="profile_prefix")
        await self._on_this_loop().start_profile()

    async def stop_profile(self) -> None:
        """Write the trace."""
        log.info("wrote %s", await self._on_this_loop().stop_profile())

    # -- loops --------------------------------------------------------------------------------

    @property
    def _clock(self) -> Any:
        return time.monotonic if self.config.observe.log_stats else None

    def _on_this_loop(self) -> EnginePool:
        """The engines, begun on the running loop. Raises EngineDead, EngineError."""
        if self._stopped:
            raise EngineDead("the engine was shut down")
        loop = asyncio.get_running_loop()
        if self._client is not None and self._loop is loop:
            return self._client
        if self._client is not None:
            assert self._loop is not None
            if not self._loop.is_closed():
                raise EngineError("this engine is in use on another event loop, which is open")
            self._client.close()
            self._running.clear()
        self._client, self._loop = self._connect(), loop
        self._client.start()
        return self._client


@dataclass(frozen=True, slots=True, eq=False)
class RunningPool:
    """The requests of one call of encode()."""

    request_ids: list[str]


def _is_long(prompt: Prompt) -> bool:
    """Whether making a request of a prompt takes long."""
    fields = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
    text = fields.get("prompt")
    is_long = isinstance(text, str) and len(text) > LONG_CHARS
    is_large = fields.get("prompt_embeds") is not None
    return is_long or is_large or read_prompt_media(prompt) is not None


AsyncLLMEngine = AsyncLLM
"""The name in older releases."""
