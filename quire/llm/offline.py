"""LLM, the offline API: takes prompts and returns finished outputs in the same order.

All prompts and parameters are checked before anything runs, so a bad prompt among many leaves the
engine as it was. quire.llm.request_queue owns outputs that finished before they were collected.
Calls from several threads run one after another.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from quire.core.params import BeamSearchParams, SamplingParams
from quire.engine.core import sleep_mode
from quire.engine.core.profiler import TorchProfile
from quire.engine.startup.text_setup import structured_defaults
from quire.errors import RequestError, Unsupported
from quire.llm import metrics
from quire.llm.arguments import (
    SamplingParamsArg,
    check_tools,
    lora_per_prompt,
    params_per_prompt,
    priority_per_prompt,
)
from quire.llm.beam_search import FinishedBeamSearch, run_beam_searches
from quire.llm.chat_parsing import ChatContext, build_chat_parsing
from quire.llm.engine import LLMEngine
from quire.llm.legacy_guided import GuidedOptions, apply_guided, refuse_guided
from quire.llm.media import ChatPrompt, MediaFeed, render_chat
from quire.llm.pooling import PoolingMethods
from quire.llm.progress import UseTqdm, track_adding
from quire.llm.prompts import normalize_conversations, normalize_prompts
from quire.llm.request_queue import RequestQueue
from quire.llm.serialize import one_at_a_time
from quire.llm.text_feed import TextFeed
from quire.llm.worker import Worker
from quire.outputs import BeamSearchOutput, RequestOutput
from quire.text.output.answer_parser import ParserOptions
from quire.text.prompts import Prompt
from quire.text.templates.chat_template import load_chat_template
from quire.text.tokenizing.tokenizer import Tokenizer
from quire.tool_grammar.prompt_constraints import PromptConstraints

log = logging.getLogger(__name__)

T = TypeVar("T")
ConversationArg = Sequence[Any]
UNSUPPORTED_METHODS = {
    "release_kv_cache_memory": "returning KV memory alone",
    "init_weight_transfer_engine": "weight transfer",
    "start_weight_update": "weight transfer",
    "update_weights": "weight transfer",
    "finish_weight_update": "weight transfer",
    "get_weight_version": "weight transfer",
}
"""Methods of unsupported features, and the feature of each."""


class LLM(PoolingMethods):
    """A loaded model. `model` is a folder, a hub name, or "embedded".

    Keywords are the engine options (quire.config.options), under vLLM's names.
    """

    def __init__(self, model: str = "embedded", **options: Any) -> None:
        options.setdefault("disable_log_stats", True)
        self._start(LLMEngine.from_engine_args(options | {"model": model}))

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLM:
        """From EngineArgs, Options, or a dict of flat option names."""
        llm = cls.__new__(cls)
        llm._start(LLMEngine.from_engine_args(engine_args))
        return llm

    def _start(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        self.call_lock = threading.RLock()
        self._ids = itertools.count()
        self._queue = RequestQueue(engine)
        self._asleep: frozenset[str] = frozenset()
        self._profile: TorchProfile | None = None
        self._template = load_chat_template(engine.config.model.chat_template)

    def __getattr__(self, name: str) -> NoReturn:
        feature = UNSUPPORTED_METHODS.get(name)
        later = f": quire does not support {feature} yet" if feature else ""
        raise AttributeError(f"LLM has no {name!r}{later}", name=name, obj=self)

    # -- generating ---------------------------------------------------------------------------

    @one_at_a_time
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParamsArg | BeamSearchParams | None = None,
        *,
        prompt_token_ids: Sequence[Any] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: object | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
        guided_options_request: GuidedOptions | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt. One output per prompt, in order.

        sampling_params: one for all, or one each; None: get_default_sampling_params().
        BeamSearchParams give the beams as the outputs of each prompt. guided_options_request:
        the constraint of all outputs, as in older releases.
        """
        given = normalize_prompts(prompts, prompt_token_ids)
        if isinstance(sampling_params, BeamSearchParams):
            refuse_guided(guided_options_request)
            found = self._run_beam_search(
                given, sampling_params, lora_request, use_tqdm, None, priority
            )
            return [one.as_request_output() for one in found]
        if guided_options_request is not None:
            params = self._params_per_prompt(sampling_params, len(given))
            sampling_params = apply_guided(params, guided_options_request)
        ids = self._enqueue(
            given,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._queue.collect(ids, use_tqdm)

    @one_at_a_time
    def chat(
        self,
        messages: ConversationArg | Sequence[ConversationArg],
        sampling_params: SamplingParamsArg | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: object | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
        *,
        reasoning_parser: str | None = None,
        tool_parser: str | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        parallel_tool_calls: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several.

        reasoning_parser, tool_parser: names as for `quire serve`, or "auto"; outputs then
        have `reasoning` and `tool_calls`, and `text` is what is left. tool_choice: as over HTTP;
        "required" or a function forces calls, with a parser or without one.
        """
        self.check_generates()
        check_tools(tools)
        given = normalize_conversations(messages)
        parsers = ParserOptions(reasoning_parser, tool_parser)
        variables, goes_on = chat_template_kwargs, continue_final_message
        reading = build_chat_parsing(
            ChatContext(parsers, tools, tool_choice, parallel_tool_calls, variables, goes_on),
            self.get_tokenizer(),
            self._template if chat_template is None else load_chat_template(chat_template),
            structured_defaults(self.llm_engine.config),
            self.llm_engine.inputs.eos_ids,
        )
        each_params = (
            [] if reading is None else self._params_per_prompt(sampling_params, len(given))
        )
        chats = self._render_conversations(
            given,
            chat_template,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=chat_template_content_format,
            variables=chat_template_kwargs,
        )
        texts = [one.text for one in chats]
        ids = self._enqueue(
            texts,
            sampling_params if reading is None else reading.adjust_params(each_params),
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
            add_special_tokens=False,  # the template has them
            rules=None if reading is None else reading.build_constraints(texts, given, each_params),
            chats=chats,
        )
        outputs = self._queue.collect(ids, use_tqdm)
        if reading is not None:
            for output, conversation, params in zip(outputs, given, each_params):
                reading.parse_output(output, conversation, params)
        return outputs

    @one_at_a_time
    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParamsArg | None = None,
        *,
        prompt_token_ids: Sequence[Any] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: object | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
    ) -> list[str]:
        """Queue prompts without running them; return their request ids. See wait_for_completion."""
        given = normalize_prompts(prompts, prompt_token_ids)
        return self._enqueue(
            given,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
            runs=False,
        )

    @one_at_a_time
    def enqueue_chat(
        self,
        messages: ConversationArg | Sequence[ConversationArg],
        sampling_params: SamplingParamsArg | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: object | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
    ) -> list[str]:
        """Queue conversations without running them; return their request ids."""
        self.check_generates()
        check_tools(tools)
        chats = self._render_conversations(
            normalize_conversations(messages),
            chat_template,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=chat_template_content_format,
            variables=chat_template_kwargs,
        )
        return self._enqueue(
            [one.text for one in chats],
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
            add_special_tokens=False,  # the template has them
            chats=chats,
            runs=False,
        )

    @one_at_a_time
    def wait_for_completion(
        self, output_type: type[Any] | None = None, *, use_tqdm: UseTqdm = True
    ) -> list[Any]:
        """Run queued requests; return all outputs not yet collected, in the order of enqueueing."""
        if output_type not in (None, RequestOutput):
            raise Unsupported(f"output_type must be RequestOutput or None, got {output_type!r}")
        if not self._queue.all_done:
            self._check_awake()
        return self._queue.collect(self._queue.ids, use_tqdm)

    @one_at_a_time
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: object | None = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the beam_width likeliest continuations of each prompt, best first."""
        found = self._run_beam_search(
            normalize_prompts(prompts), params, lora_request, use_tqdm, concurrency_limit, priority
        )
        return [one.as_beams() for one in found]

    def _run_beam_search(
        self,
        given: Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: object | None,
        use_tqdm: UseTqdm,
        concurrency_limit: int | None,
        priority: int | Sequence[int] | None,
    ) -> list[FinishedBeamSearch]:
        self._check_awake()
        params.reject_unimplemented_features()
        return run_beam_searches(
            self.llm_engine,
            given,
            params,
            adapters=self.llm_engine.adapters.resolve(lora_request, len(given)),
            lora_requests=lora_per_prompt(lora_request, len(given)),
            priorities=self._priority_per_prompt(priority, len(given)),
            names=[f"beam-{next(self._ids)}" for _ in given],
            at_once=concurrency_limit or len(given) or 1,
            use_tqdm=use_tqdm,
        )

    def _render_conversations(
        self,
        given: Sequence[ConversationArg],
        chat_template: str | Path | None,
        tools: Sequence[Any] | None,
        **how: Any,
    ) -> list[ChatPrompt]:
        """Render each conversation to the text of a prompt. how: arguments of Template.render."""
        source = self._template if chat_template is None else load_chat_template(chat_template)
        template = self.get_tokenizer().template(source, tools)
        reader = self.llm_engine.inputs.media
        return [render_chat(reader, template, one, tools, **how) for one in given]

    def _enqueue(
        self,
        given: Sequence[Prompt],
        sampling_params: SamplingParamsArg | None,
        *,
        use_tqdm: UseTqdm,
        lora_request: object | None,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, object] | None,
        mm_processor_kwargs: Mapping[str, object] | None,
        add_special_tokens: bool = True,
        rules: Sequence[PromptConstraints] | None = None,
        chats: Sequence[ChatPrompt] | None = None,
        runs: bool = True,
    ) -> list[str]:
        """Check everything, then queue everything, or nothing. Prompts with media are checked and
        queued one by one: the engine runs the first while the next are prepared.

        rules: constraints of each prompt beyond its params. chats: of which the prompts are the
        texts. runs: the engine may run meanwhile.
        """
        self._check_awake()
        self.check_generates()
        step = self._queue.step if runs else lambda: False
        feed = MediaFeed(self.llm_engine.inputs.media, given, chats, mm_processor_kwargs, step)
        params = self._params_per_prompt(sampling_params, len(given))
        ranks = self._priority_per_prompt(priority, len(given))
        adapters = self.llm_engine.adapters.resolve(lora_request, len(given))
        inputs = self.llm_engine.inputs
        plain = () if tokenization_kwargs or feed.has_media else given
        texts = TextFeed(inputs, plain, params, add_special_tokens=add_special_tokens)
        now = time.monotonic()
        # Drawing ids from the counter last keeps them dense when a prompt is refused
        first = next(self._ids)
        prepared = (
            inputs.process(
                prompt,
                one,
                request_id=str(first + i),
                priority=rank,
                arrived_at=now,
                tokenization=tokenization_kwargs,
                add_special_tokens=add_special_tokens,
                text_ids=texts.ids(i),
                constraint=rule.constraint,
                thinking=rule.thinking,
                adapter=adapter,
                media=feed.inputs(i),
            )
            for i, (prompt, one, rank, rule, adapter) in enumerate(
                zip(
                    track_adding(given, use_tqdm),
                    params,
                    ranks,
                    rules or [PromptConstraints()] * len(given),
                    adapters,
                )
            )
        )
        ready = prepared if feed.has_media else list(prepared)
        self._ids = itertools.count(first + len(given))
        loras = lora_per_prompt(lora_request, len(given))
        config = self.llm_engine.config
        # several ranks or engines share out what waits, and priorities choose among it
        alone = config.parallel.engines == config.parallel.data == 1
        early = runs and alone and config.scheduler.policy == "fcfs" and not feed.has_media
        tokens = config.scheduler.max_num_batched_tokens
        return self._queue.submit(ready, loras, first_step=tokens if early else None)

    def _params_per_prompt(
        self, given: SamplingParamsArg | None, count: int
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        return params_per_prompt(given, count)

    def _priority_per_prompt(self, given: int | Sequence[int] | None, count: int) -> list[int]:
        return priority_per_prompt(given, count, self.llm_engine.config.scheduler.policy)

    # -- the engine's properties ----------------------------------------------------------------

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of sampling parameters: the model's generation config."""
        return self.llm_engine.inputs.defaults.clone()

    def get_tokenizer(self) -> Tokenizer:
        return self.llm_engine.get_tokenizer()

    @property
    def chat_template(self) -> str | None:
        """The template that was given for this engine. None: the tokenizer's own applies."""
        return self._template

    @property
    def model_config(self) -> object:
        return self.llm_engine.model_config

    def get_world_size(self, include_dp: bool = True) -> int:
        """Devices in use: of all engines, or of each."""
        parallel = self.llm_engine.config.parallel
        return parallel.ranks * (parallel.engines if include_dp else 1)

    def get_metrics(self) -> list[metrics.Metric]:
        """Return counters and gauges of this moment, under the names of dashboards."""
        return metrics.collect_metrics(self.llm_engine)

    @one_at_a_time
    def __repr__(self) -> str:
        config = self.llm_engine.config
        if config.parallel.engines > 1:
            return f"LLM({config.model.name!r}, data_parallel_size={config.parallel.engines})"
        return str(self.apply_model(repr)[0])

    # -- the engine between requests ----------------------------------------------------------

    @one_at_a_time
    def collective_rpc(
        self,
        method: str | Callable[..., T],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """Call a method of every worker, or a function with the worker first; one result each.

        timeout: unused: the call runs in this process.
        """
        return self.llm_engine.engine.apply_model(
            lambda model: Worker(0, model).call(method, args, kwargs or {})
        )

    @one_at_a_time
    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """Call a function with the model of every worker."""
        return self.llm_engine.engine.apply_model(func)

    @one_at_a_time
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache. False while requests use it."""
        if reset_running_requests:
            self._queue.abort(self._queue.ids)
        return self.llm_engine.reset_prefix_cache()

    def reset_mm_cache(self) -> None:
        """Forget processed images, video and audio. Rows of the encoder stay on the device."""
        if self.llm_engine.inputs.media is not None:
            self.llm_engine.inputs.media.reset_cache()

    @one_at_a_time
    def reset_encoder_cache(self) -> None:
        """Forget what the encoder made of images, video and audio."""
        self.llm_engine.engine.reset_encoder_cache()

    @one_at_a_time
    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Stop generating. 0: pause; 1: also drop and free the KV cache. See wake_up."""
        sleep_mode.check_sleep_args(level, mode)
        if mode == "abort":
            self._queue.abort(self._queue.ids)
        elif mode == "wait":
            self._queue.run_all()
        elif level and self._queue.ids:
            raise RequestError(
                "mode='keep' keeps requests, whose KV level 1 would drop: use level 0"
            )
        self._asleep = sleep_mode.tags_at_level(level)
        if level:
            self.llm_engine.engine.release_kv_memory()

    @one_at_a_time
    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Undo sleep, for some tags (weights, kv_cache, scheduling) or all. True: fully awake."""
        self._asleep = sleep_mode.tags_after_wake_up(self._asleep, tags)
        return not self._asleep

    @one_at_a_time
    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a trace until stop_profile, which writes it into ./quire_profile."""
        if self.llm_engine.config.parallel.engines > 1:
            message = "start_profile records this process, and data_parallel_size > 1 has others"
            raise Unsupported(f"{message}: use AsyncLLM or a server")
        if delay_iterations or max_iterations:
            raise Unsupported(
                "delay_iterations and max_iterations are not supported: leave them out"
            )
        if self._profile is not None:
            raise RequestError("a profile is already being recorded: call stop_profile first")
        self._profile = TorchProfile.start(profile_prefix, profiler_kwargs or {})

    @one_at_a_time
    def stop_profile(self) -> None:
        """Write the trace."""
        if self._profile is None:
            raise RequestError("no profile is being recorded: call start_profile first")
        profile, self._profile = self._profile, None
        log.info("wrote %s", profile.stop())

    def check_generates(self) -> None:
        """Raise Unsupported, with what to call, for a model that generates no text."""
        config = self.llm_engine.config
        if not config.generates:
            tasks = ", ".join(config.pooling.tasks if config.pooling is not None else ())
            raise Unsupported(
                f"this model generates no text, its tasks are {tasks}: use embed(), classify(), "
                "score(), reward() or encode()"
            )

    def _check_awake(self) -> None:
        if self._asleep:
            message = "the engine sleeps: call wake_up() first"
            raise RequestError(f"{message} (asleep: {', '.join(sorted(self._asleep))})")
