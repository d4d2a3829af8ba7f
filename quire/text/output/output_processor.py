"""Turns engine updates into request outputs.

One `RequestOutputProcessor` per request, one `SequenceOutput` per sequence. A sequence output only
grows; an output holds a slice of it, chosen by the output kind. When no text is needed before the
end (FINAL_ONLY without stop strings), none is made before the end.

push() makes the outputs of LLM. process() is the first half of push(), and all that a server needs
which streams thousands of pieces a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.sequence_timing import SequenceTiming
from quire.core.types import DraftCounts, TokenLogprobs, Update
from quire.errors import RequestError
from quire.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    PromptLogprobs,
    RequestOutput,
    RequestStateStats,
    SampleLogprobs,
    SpecDecodeMetrics,
)
from quire.text.input_processor import PreparedRequest
from quire.text.output.output_text import (
    FinalText,
    NoText,
    OutputText,
    StopStringText,
    StreamingText,
)
from quire.text.tokenizing.tokenizer import Tokenizer

Clock = Callable[[], float]


class RequestOutputProcessor:
    """All answers to one request. push() every update of it, in order.

    aborts: sequences that the last push() ended by a stop string; the caller must
    pass them to the engine (abort_sequence); later updates of them are ignored.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        tokenizer: Tokenizer | None,
        *,
        clock: Clock | None = None,
        stream_interval: int = 1,
        lora_request: object | None = None,
    ) -> None:
        self._prepared = prepared
        self._params = prepared.params
        self._tokenizer = tokenizer if prepared.params.detokenize else None
        self._clock = clock
        self._lora_request = lora_request
        self._interval = prepared.params.stream_interval or stream_interval
        # Only at the end is it known which sequences of best_of are returned
        ranks = prepared.request.n > prepared.params.n
        self._kind = RequestOutputKind.FINAL_ONLY if ranks else prepared.params.output_kind
        self._is_best_of = ranks
        self._outputs = [self._new_sequence_output(i) for i in range(prepared.request.n)]
        self._running = prepared.request.n
        self._prompt_ids = list(prepared.request.prompt)
        self._prompt_logprobs = _prompt_logprobs(prepared.params)
        self._media_positions = _media_positions(prepared)
        self._prompt_sent = False
        self._num_cached_tokens: int | None = None
        self._needs_metadata = True
        self._error: str | None = None
        self._request_error: RequestError | None = None
        self.aborts: list[int] = []
        self.stats = RequestStateStats(arrival_time=prepared.request.arrived_at) if clock else None

    @property
    def finished(self) -> bool:
        return self._running == 0

    def push(self, update: Update) -> RequestOutput | None:
        """Take an update in; an output, if there is one to give out now."""
        answer = self.process(update)
        if answer is None:
            return None
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return self._request_output(self.final_outputs())
        delta = self._kind is RequestOutputKind.DELTA
        return self._request_output([answer.output(delta, self._lora_request)])

    def process(self, update: Update) -> SequenceOutput | None:
        """Take an update in; the answer that has news to give out now.

        FINAL_ONLY: the last one to end, when all have; best() has them.
        """
        if self.aborts:
            self.aborts = []
        answer = self._outputs[update.index]
        if answer.finish_reason is not None:
            return None
        if self._needs_metadata or update.prompt_logprobs or update.error is not None:
            self._record_metadata(update)
        answer.add(update)
        if answer.finish_reason is not None:
            self._running -= 1
            if update.finish is None:
                self.aborts.append(update.index)
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return None if self._running else answer
        return answer if answer.has_output(self._interval) else None

    def direct_decoders(self) -> list[Callable[[Sequence[int]], str]] | None:
        """For each sequence the function that makes text of tokens, where that is all there is.

        Then, once a sequence has begun and until its update has `finish`, calling that does all
        that read() and take() would do. None: stop strings, logprobs or an interval need more.
        """
        if self._kind is not RequestOutputKind.DELTA or self._interval > 1 or self._clock:
            return None
        direct_decoders = [answer.direct_decoder for answer in self._outputs]
        return None if None in direct_decoders else direct_decoders  # type: ignore[return-value]  # none of them is

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that came out of the prefix cache."""
        return self._num_cached_tokens or 0

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """As far as they are known: all of them when the first token is there."""
        return self._prompt_logprobs

    def _new_sequence_output(self, index: int) -> SequenceOutput:
        request, params = self._prepared.request, self._params
        late = self._kind is RequestOutputKind.FINAL_ONLY
        text: OutputText
        if self._tokenizer is None:
            text = NoText()
        elif params.stop_strings:
            text = StopStringText(self._tokenizer, request.prompt, params)
        else:
            text = (FinalText if late else StreamingText)(self._tokenizer, request.prompt, params)
        return SequenceOutput(index, params, text, self._tokenizer, self._is_best_of)

    def _record_metadata(self, update: Update) -> None:
        if self._num_cached_tokens is None:
            self._num_cached_tokens = update.cached_tokens
            self._needs_metadata = (
                self._clock is not None
            )  # nothing else changes from update to update
        if update.prompt_logprobs and self._prompt_logprobs is not None:
            # positions that came out of the prefix cache were not computed: nothing is known
            while len(self._prompt_logprobs) < update.cached_tokens + 1:
                self._prompt_logprobs.append(None)
            for one in update.prompt_logprobs:
                if len(self._prompt_logprobs) in self._media_positions:
                    self._prompt_logprobs.append(None)
                else:
                    _append_logprobs(self._prompt_logprobs, one, self._tokenizer)
        if update.error is not None:
            self._error = update.error
            error = update.to_exception()
            self._request_error = error if isinstance(error, RequestError) else None
            if self._request_error is not None and self._request_error.param is None:
                self._request_error.param = _constraint_param(self._prepared.params)
        if self._clock is not None and self.stats is not None and update.token_ids:
            _record_tokens(self.stats, len(update.token_ids), self._clock())
        if self.stats is not None and update.timing is not None:
            _record_timing(self.stats, update.timing)

    def final_outputs(self) -> list[CompletionOutput]:
        """Return the answers to send at the end: all, or the n likeliest of best_of."""
        outputs = [answer.output(False, self._lora_request) for answer in self._outputs]
        if self._is_best_of:
            outputs.sort(key=lambda output: -(output.cumulative_logprob or 0.0))
            outputs = outputs[: self._params.n]
            for i, output in enumerate(outputs):
                output.index = i
        return outputs

    def _request_output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        prompt_logprobs = self._prompt_logprobs
        if self._kind is RequestOutputKind.DELTA:
            prompt_logprobs = None if self._prompt_sent else prompt_logprobs
            self._prompt_sent = True
        return RequestOutput(
            request_id=self._prepared.request.id,
            prompt=self._prepared.prompt_text,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=self._running == 0,
            metrics=self.stats,
            lora_request=self._lora_request,
            encoder_prompt=self._prepared.encoder_prompt_text,
            encoder_prompt_token_ids=list(self._prepared.request.source_tokens) or None,
            num_cached_tokens=self._num_cached_tokens,
            error=self._error,
            fault=self._request_error,
        )


class SequenceOutput:
    """One sequence's output so far: tokens, logprobs, text, and how much of each was given out."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        text: OutputText,
        tokenizer: Tokenizer | None,
        ranks: bool,
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.draft_counts: DraftCounts | None = None
        self._text = text
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._logprobs = _sample_logprobs(params)
        self._tracks_logprob_sum = ranks or self._logprobs is not None
        self._cumulative_logprob = 0.0
        self._num_sent = 0  # tokens given out
        self._has_sent = False

    @property
    def direct_decoder(self) -> Callable[[Sequence[int]], str] | None:
        """Tokens -> text, if nothing else is made of them; see Assembler.flows."""
        text = self._text
        return text.decode if type(text) is StreamingText and not self._tracks_logprob_sum else None

    def add(self, update: Update) -> None:
        ids, finish = update.token_ids, update.finish
        if update.draft_counts is not None:
            self.draft_counts = update.draft_counts
        ended = finish == "stop" and not update.last_token_is_text
        kept = self._text.push(ids, last=finish is not None, ended=ended)
        self._token_ids.extend(ids if kept == len(ids) else ids[:kept])
        if self._tracks_logprob_sum and update.logprobs is not None:
            self._add_logprobs(update.logprobs[:kept])
        if finish is None and self._text.stop is None:
            return
        if self._text.stop is not None:
            self.finish_reason, self.stop_reason = "stop", self._text.stop
        elif update.finish is not None:
            self.finish_reason, self.stop_reason = update.finish, update.stop_reason

    def _add_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        for one in logprobs:
            self._cumulative_logprob += one.values[0]
            if self._logprobs is not None:
                _append_logprobs(self._logprobs, one, self._tokenizer)

    def has_output(self, interval: int) -> bool:
        """There is news to stream: the first token, `interval` more, or the end."""
        new = len(self._token_ids) - self._num_sent
        if new >= interval or self.finish_reason is not None:
            return True
        return new > 0 and not self._has_sent

    def take(self) -> tuple[str, list[int], SampleLogprobs | None]:
        """Text, tokens and logprobs since the last take; what was taken is forgotten."""
        ids = self._token_ids
        self._token_ids, self._has_sent = [], True
        logprobs = self._logprobs
        if logprobs is not None:
            self._logprobs = [] if isinstance(logprobs, list) else FlatLogprobs()
        return self._text.take(), ids, logprobs

    def output(self, delta: bool, lora_request: object | None) -> CompletionOutput:
        since = self._num_sent if delta else 0
        self._num_sent, self._has_sent = len(self._token_ids), True
        return CompletionOutput(
            index=self.index,
            text=self._text.take() if delta else self._text.full_text(),
            token_ids=self._token_ids[since:],
            cumulative_logprob=self._cumulative_logprob if self._tracks_logprob_sum else None,
            logprobs=None if self._logprobs is None else self._logprobs[since:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            lora_request=lora_request,
            spec_decode_metrics=draft_metrics(self.draft_counts),
        )


def draft_metrics(counts: DraftCounts | None) -> SpecDecodeMetrics | None:
    """Return the figures of a sequence's drafts; None: it had none."""
    return None if counts is None else SpecDecodeMetrics.from_counts(*counts)


def _sample_logprobs(params: SamplingParams) -> SampleLogprobs | None:
    if params.logprobs is None and not params.logprob_token_ids:
        return None
    return FlatLogprobs() if params.flat_logprobs else []


def _constraint_param(params: SamplingParams) -> str:
    """The field whose grammar could not be compiled."""
    constraint = params.structured_outputs
    return "tools" if constraint is None else f"structured_outputs.{constraint.kind.value}"


def _prompt_logprobs(params: SamplingParams) -> PromptLogprobs | None:
    """The first token of a prompt has none."""
    if params.prompt_logprobs is None:
        return None
    if not params.flat_logprobs:
        return [None]
    flat = FlatLogprobs()
    flat.append(None)
    return flat


def _media_positions(prepared: PreparedRequest) -> frozenset[int]:
    """Positions of the prompt that take rows of an encoder: a probability of a token means nothing
    there. Empty unless logprobs of the prompt are wanted."""
    if prepared.params.prompt_logprobs is None:
        return frozenset()
    return frozenset(
        item.start + offset + i
        for item in prepared.request.media
        for offset, count in item.runs or ((0, item.length),)
        for i in range(count)
    )


def _append_logprobs(
    to: SampleLogprobs | PromptLogprobs, one: TokenLogprobs, tokenizer: Tokenizer | None
) -> None:
    """One position: the chosen token first, then the best ones; a token appears once."""
    decoded = tokenizer.decode_token if tokenizer is not None else None
    entry = {
        token_id: Logprob(value, rank, None if decoded is None else decoded(token_id))
        for token_id, value, rank in zip(one.ids, one.values, one.ranks)
    }
    to.append(entry)


def _record_tokens(stats: RequestStateStats, tokens: int, now: float) -> None:
    if stats.num_generation_tokens == 0:
        stats.first_token_ts = now
        stats.first_token_latency = now - stats.arrival_time
    stats.num_generation_tokens += tokens
    stats.last_token_ts = now


def _record_timing(stats: RequestStateStats, timing: SequenceTiming) -> None:
    """Values from the engine; of several sequences, those of the latest update."""
    stats.queued_ts = timing.accepted_at
    stats.scheduled_ts = timing.scheduled_at
    stats.num_preemptions = timing.preemptions
