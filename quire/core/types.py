"""Types of the core: requests, sequences, plans, results, updates. Plain data, no torch, no I/O.

Writers
    Request         frozen
    Sequence        the scheduler and its private helpers (kv_cache, plan_builder, registry)
    StepPlan, Row   frozen; made by the scheduler
    StepResult      frozen; made by the runner
    Update          frozen; made by the scheduler
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Literal, NamedTuple

from quire.config.engine_config import PoolingTask
from quire.core.constraint import Constraint
from quire.core.params import SamplingParams
from quire.core.sequence_timing import SequenceTiming
from quire.core.tenant_limits import UNRESTRICTED, TenantLimits
from quire.errors import EngineError, NotFinite, RequestError, StepFailed

UNKNOWN = -1
"""A token that a step in flight will produce: known to the runner, not yet to the core."""

ALIGN: Final = "align"
"""A task of the engine's own clients: which positions of a source each token of a prompt looks at,
[tokens, positions]. `skip_tokens` and `dimensions` of its Pooling bound both."""

NO_BLOCK = -1
"""A block table entry whose block was freed because it is outside of the window."""


class SequenceState(Enum):
    """State of a sequence, which is in exactly one place of the scheduler."""

    WAITING = auto()  # holds no blocks (or shared ones of another sequence, before its first step)
    RUNNING = auto()  # holds blocks and a slot
    FINISHED = auto()  # its terminal update was made


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a sequence ends by tokens. quire.text handles stop strings."""

    max_tokens: int
    min_tokens: int = 0
    eos_ids: frozenset[int] = frozenset()  # finish "stop", no stop_reason
    token_ids: frozenset[int] = frozenset()  # finish "stop", stop_reason is the id


@dataclass(frozen=True, slots=True)
class CallOpener:
    """Tokens that end reasoning if a tool call follows them."""

    token_ids: tuple[int, ...]
    next_token_ids: tuple[int, ...]  # tokens with which a call can continue, after whitespace


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Bound of the reasoning tokens of a sequence, and the tokens that delimit reasoning."""

    max_tokens: int  # reasoning tokens, delimiters not counted
    end_token_ids: tuple[int, ...]  # delimiter after the reasoning, which is forced
    start_token_ids: tuple[int, ...] | None = (
        None  # delimiter before it; None: the prompt ends within the reasoning
    )
    other_end_token_ids: tuple[tuple[int, ...], ...] = ()  # delimiters that end it too
    call_openers: tuple[CallOpener, ...] = ()
    whitespace_ids: tuple[int, ...] = ()  # tokens that may stand between an opener and its call


@dataclass(frozen=True, slots=True)
class TimeRules:
    """Rules of time stamps, which are the tokens from `first_time` on (Whisper).

    An answer begins with one. They come in pairs, never decrease, and one comes wherever all of
    them together are likelier than any other token.
    """

    first_time: int
    no_times: int  # the token that turns time stamps off: banned
    end: int  # end of text; ids below are words
    last_first: int  # the latest one to begin with, counted from first_time


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """Tokens that a model's generation config forces or forbids, by index in `Sequence.tokens`."""

    start: int  # index of the first generated token
    first: int | None = None  # the token at `start`
    end: int = 0  # index of the last token that may be generated
    last: frozenset[int] = frozenset()  # one of these is the token at `end`; (): any
    banned: tuple[int, ...] = ()  # at every index
    banned_first: tuple[int, ...] = ()  # at the first index that no other rule determines
    times: TimeRules | None = None  # None: time stamps are tokens like any other

    def allowed_at(self, index: int) -> frozenset[int] | None:
        """The tokens that are allowed at an index by force. None: all that are not banned."""
        if index == self.end and self.last:
            return self.last
        return None if index != self.start or self.first is None else frozenset({self.first})

    def banned_at(self, index: int) -> tuple[int, ...]:
        """The tokens that are banned at an index where none is forced."""
        at_first = index == self.start + (self.first is not None)
        return self.banned + self.banned_first if at_first else self.banned


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a request wants of the hidden states of its prompt. Every value is resolved."""

    task: PoolingTask | Literal["align"]
    use_activation: bool = True  # embed: L2 norm of 1; classify: probabilities instead of logits
    dimensions: int | None = None  # leading numbers of an embedding that are kept; None: all
    skip_tokens: int = 0  # leading tokens that do not count in means: an instruction
    step_tag_id: int | None = None  # token tasks: only rows of this token; None: of every token
    returned_token_ids: tuple[int, ...] = ()  # token_classify: only these columns; (): all
    unattended_tokens: int = 0  # trailing tokens that no token attends to (ColBERT's expansion)


class Pooled(NamedTuple):
    """Result of a pooling request: float32 numbers, little-endian, row by row."""

    shape: tuple[int, ...]  # (numbers,), or (tokens, numbers) of a token task
    data: bytes


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Vectors that the model reads in place of the embeddings of prompt[start : start + length].

    Ids at these positions of the prompt are not read: they only count, and may be shown.
    """

    start: int
    length: int
    dtype: str  # "bfloat16" | "float16" | "float32"
    data: bytes = field(repr=False)  # [length, width], row by row, little-endian

    def rows(self, start: int, end: int) -> bytes:
        """Return the vectors of positions [start, end) of the prompt."""
        size = len(self.data) // self.length
        return self.data[(start - self.start) * size : (end - self.start) * size]


@dataclass(frozen=True, slots=True)
class MediaTensor:
    """One array that an encoder reads."""

    name: str  # of the argument of the encoder
    dtype: str  # "uint8" | "float32" | "float16" | "bfloat16" | "int32" | "int64"
    shape: tuple[int, ...]
    data: bytes = field(repr=False)  # C order, little-endian; or a memoryview of bytes


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, video or recording, and the positions of the prompt that stand for it.

    Its digest has entries in `Request.extra_content`.
    """

    modality: str  # "image" | "video" | "audio"
    digest: bytes  # of all that its rows depend on: equal digests have equal rows
    start: int  # its first position of the prompt
    length: int  # its positions
    runs: tuple[tuple[int, int], ...]
    """(offset from start, count): positions that take the encoder's rows, in their order. The
    others keep the embeddings of their tokens."""
    tensors: tuple[MediaTensor, ...]  # a single "embeds" [rows, width]: the rows themselves
    bidirectional: bool = False  # the tokens of one run attend to each other in both directions
    source_rows: int = 0
    """Rows that cross attention reads, of tokens from `start` on; no position takes a row then."""

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_rows(self) -> int:
        """Rows that the encoder returns for it."""
        return sum([count for _, count in self.runs])


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One generation of an adapter: weights that are added to the model's for a request's rows."""

    name: str
    digest: bytes  # of the weights; another content is another generation
    folder: str = ""  # where it is read again if its copy was dropped


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the scheduler needs it, with `n` sequences."""

    id: str
    prompt: tuple[int, ...]
    stop: StopConditions
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    seed: int = 0  # always resolved: sequence i draws with seed + i
    priority: int = 0  # lower goes first, under the priority order
    arrived_at: float = 0.0  # monotonic clock, seconds
    salt: bytes = b""  # digest that separates cache contents, of the cache salt
    read_prefix_cache: bool = True  # False when every prompt position must be computed
    parent: str | None = None  # id of a held request whose KV is shared as far as prompts agree
    hold: bool = False  # keep blocks after the end, until the scheduler's release(id)
    timed: bool = False  # every update has a timing, not only the first and the last
    constraint: Constraint | None = None  # what the output must match
    thinking: ThinkingBudget | None = None  # None: unlimited reasoning
    resumed_tokens: tuple[tuple[int, ...] | None, ...] = ()
    # output tokens that each sequence generated in an earlier engine; None: it has
    # ended. (): no tokens
    engine_crashes: int = 0  # engines that crashed while it ran: it may be the cause
    tenant: bytes = b""  # digest of its API key; b"": tenants are not distinguished
    tenant_limits: TenantLimits = UNRESTRICTED  # limits of its tenant
    deadline_at: float | None = None
    # by the clock of arrived_at: a first token after it is useless
    pooling: Pooling | None = None  # None: tokens are generated
    token_types: bytes = b""  # segment of each prompt token (BERT); b"": all 0
    extra_content: tuple[tuple[int, bytes], ...] = ()
    """(offset, digest): content other than token ids, such as media, which starts at an offset of
    the prompt, in the order of offsets. It separates cached blocks from there on; `salt` does from
    the start."""
    num_beams: int = 1  # sequences of the beam search that it begins
    prompt_embeds: tuple[PromptEmbeds, ...] = ()
    """In the order of positions, without overlap. Each has digests in `extra_content`."""
    encoder_prompt: tuple[int, ...] = ()  # what an encoder reads; `prompt` is then the decoder's
    encoder_media: MediaItem | None = None
    """A recording or an image that the encoder reads, at positions of `encoder_prompt`; the ids of
    those of a recording only count."""
    forced: ForcedTokens | None = None  # None: the model's configs force no token
    adapter: AdapterRef | None = None  # None: the model's own weights
    media: tuple[MediaItem, ...] = ()
    """In the order of positions, without overlap. Each has digests in `extra_content`."""
    rope_positions: bytes = b""
    """int32 [3, prompt tokens]: rotary positions of models with several axes; b"": 0, 1, 2, ..."""
    rope_delta: int = 0  # rotary position of generated token i is i + rope_delta
    bidirectional_tokens: int = 0
    """With media: so many tokens at the start of the prompt attend to each other."""
    speculates: bool = True  # False: its rows have no drafts
    prediction: tuple[int, ...] = ()  # tokens that the output probably repeats: drafts come from it

    @property
    def cache_root(self) -> bytes:
        """What separates its cached KV from that of all other requests, from the first token on."""
        root = self.salt
        if self.bidirectional_tokens:
            root = b"both directions %d" % self.bidirectional_tokens + root
        return root if self.adapter is None else b"adapter" + self.adapter.digest + root

    @property
    def source_tokens(self) -> tuple[int, ...]:
        """Token ids that an encoder reads; () if it reads a recording."""
        media = self.encoder_media
        return () if media is not None and media.modality == "audio" else self.encoder_prompt

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that were given: of the prompt, and of an encoder's."""
        return len(self.prompt) + len(self.encoder_prompt)

    @property
    def num_answers(self) -> int:
        """What it counts as against limits of requests."""
        return max(self.n, self.num_beams)


class DraftCounts(NamedTuple):
    """Drafts that steps verified: of one sequence, or of an engine since its start."""

    rows: int = 0  # with drafts
    tokens: int = 0  # drafts in them
    accepted: tuple[int, ...] = ()  # drafts accepted as first, second, ... of their row


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence of a request.

    0 <= computed <= planned <= len(tokens). `planned` also counts tokens of steps in flight;
    a token such a step will yield is UNKNOWN in `tokens` until the step is applied.
    """

    request: Request
    index: int  # which of the request's n
    tokens: list[int]  # prompt, then output
    tables: tuple[list[int], ...]  # one block table per layer group
    computed: int = 0  # leading tokens whose KV is in `tables`, confirmed
    planned: int = 0  # leading tokens whose KV will be, after the steps in flight
    keys: list[bytes] = field(default_factory=list)  # of full blocks; tokens only append
    state: SequenceState = SequenceState.WAITING
    slot: int = -1  # device row while RUNNING
    cached: int = 0  # tokens found in the prefix cache at first admission
    loaded: int = 0  # of those, tokens that a tier had
    preemptions: int = 0
    max_len: int = 0  # len(tokens) at which it finishes with "length"
    stop_ids: frozenset[int] = frozenset()  # every id that may end it: EOS and stop_token_ids
    plain_len: int = 0  # len(tokens) from which its rows may have drafts, at most max_len
    drafts: tuple[int, ...] = ()
    """Proposed next tokens: of its row in flight, or of its next row. Never part of `tokens`."""
    row_drafts: int = 0  # those of its last row in flight
    verified_drafts: int = 0  # in all rows so far
    accepted_drafts: int = 0  # of those
    cross_tables: list[list[int]] = field(default_factory=list)
    """Of each source, the blocks of the encoder's output; []: it has none yet."""
    encoder_step: int = -1  # step that writes some of these; -1: all were found, or there are none
    new_sources: tuple[int, ...] = ()  # those that it writes
    dp_rank: int = 0  # data-parallel rank that has its slot and its blocks
    state_start: int = NO_BLOCK  # checkpoint that its recurrent state starts from; NO_BLOCK: zeros

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def generation_start(self) -> int:
        """Index in `tokens` of the first one generated by this engine."""
        resumed = self.request.resumed_tokens
        return len(self.request.prompt) + (len(resumed[self.index] or ()) if resumed else 0)

    @property
    def pending(self) -> int:
        """Number of tokens that no step has planned. 1 while decoding, more in a prompt."""
        return len(self.tokens) - self.planned


def num_known_tokens(seq: Sequence) -> int:
    """Return the number of leading tokens that no step in flight has yet to yield."""
    known = len(seq.tokens)
    while seq.tokens[known - 1] == UNKNOWN:
        known -= 1
    return known


class Wants(Enum):
    """Result that a row of a step must yield."""

    NOTHING = auto()  # a chunk: more of the sequence is left to compute
    TOKEN = auto()  # the next tokens: up to one more than the row has drafts
    POOLED = auto()  # one pooled result of the whole sequence


class Row(NamedTuple):
    """One sequence's share of a step: compute tokens[start : start + count - drafts], then drafts.

    A row with drafts computes one token and seq.drafts[:drafts], so count == 1 + drafts. That token
    may be UNKNOWN, as that of any row; the drafts are then proposed behind a likely one.
    """

    seq: Sequence
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    wants: Wants
    drafts: int = 0


class BlockCopy(NamedTuple):
    """Copy one whole block (all layers of the pool) from src to dst."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step. The runner executes in this order:

    leaves, joins   device rows emptied, filled
    swap_out        device block -> host block: stores of the host tier
    swap_in         host block -> device block: loads of the host tier
    copies          device block -> device block (copy on write)
    rows            one forward pass, one sampling
    """

    step: int
    rows: tuple[Row, ...]
    joins: tuple[
        Sequence, ...
    ] = ()  # get a slot in this plan; seq.tokens/tables are their whole state
    leaves: tuple[
        int, ...
    ] = ()  # slots emptied since the plan before (finished, aborted, preempted)
    changed_tables: tuple[
        Sequence, ...
    ] = ()  # running sequences whose tables changed other than by append
    swap_out: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[str, ...] = ()
    num_drafts: int = 0  # draft tokens of all rows
    proposals: int = 0  # drafts that a model should propose for each row of the next step, at most
    continues: tuple[int, ...] = ()
    """Of the first rows, the places of the sequences' rows in the step before, which is in flight.
    Such a row starts behind what the row before yields; `start` is where that is if it yields one
    token. Drafts are what a model proposes there: the worker has them, and `seq.drafts` has not.
    Other rows do not depend on that step."""
    parts: tuple[object, ...] = ()
    """What step budgets add for parts of the worker (quire.runner.parts), each of its own type."""
    dp_plans: tuple[StepPlan, ...] = ()
    """Of several data-parallel ranks: what each does. Slots and blocks are numbered by rank, and
    `rows` has the rows of all, in rank order."""


class DataParallelTokens(NamedTuple):
    """A part of each rank's plan: how many tokens every data-parallel rank computes in the step.

    A rank without any runs the step too: it has experts that the tokens of the others go to.
    """

    counts: tuple[int, ...]
    decodes: bool = False  # every row of every rank computes one token, and yields one
    rows: tuple[RankRows, ...] = ()  # of each rank; (): some have drafts


class RankRows(NamedTuple):
    """Rows of a data-parallel rank in a step."""

    ones: int  # that compute one token
    others: int


class StateSave(NamedTuple):
    """Copy the recurrent state of a slot to a checkpoint, after the forward pass."""

    slot: int
    checkpoint: int


class DraftStates(NamedTuple):
    """The checkpoints that get the recurrent states of a slot, each after a draft of its row."""

    slot: int
    checkpoints: list[int]


class StateMoves(NamedTuple):
    """A part of the plans of models with recurrent layers. Joins start from their `state_start`."""

    saves: tuple[StateSave, ...] = ()
    accepted: tuple[StateSave, ...] = ()  # slots that take a checkpoint, before the forward pass
    drafts: tuple[DraftStates, ...] = ()


class TokenLogprobs(NamedTuple):
    """One position: the chosen token first, then the top k, best first (may repeat it)."""

    ids: list[int]
    values: list[float]
    ranks: list[int]  # 1 = best of the vocabulary


FaultOrigin = Literal["engine", "request", "step", "numbers"]
"""Origin of an error: the engine; the request; a step that raises with it; its logits."""


class RowError(NamedTuple):
    """Why a sequence ends with an error."""

    error: str
    fault: FaultOrigin


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the model computed, in the order of plan.rows."""

    token_ids: Seq[Seq[int]]
    """Per row its accepted tokens: 0 .. drafts + 1 if it wants TOKEN, else none.

    Without any, the last known token is computed once more.
    """
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # row -> one per token
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    # row -> positions start+1 .. start+count of the prompt (those that exist)
    errors: dict[int, str] = field(default_factory=dict)
    # row -> why this sequence must end: its last token here is not used, those before it are
    request_errors: dict[int, str] = field(default_factory=dict)  # the same, caused by the request
    non_finite: dict[int, str] = field(default_factory=dict)  # the same: non-finite logits
    finish_reasons: dict[int, Literal["stop", "length"]] = field(default_factory=dict)
    # row -> the sequence ends with its last token here: its text is complete, and only the end
    # could follow. Has priority over min_tokens, ignore_eos and the length
    pooled: dict[int, Pooled] = field(default_factory=dict)  # row that wants POOLED -> its result
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # row -> proposed tokens behind its accepted ones, for the next row of its sequence

    def rows_with_extras(self) -> set[int]:
        """Return the rows that have anything besides tokens."""
        more = {*self.logprobs, *self.prompt_logprobs, *self.errors, *self.finish_reasons}
        more |= self.pooled.keys() | self.drafts.keys()
        return more | self.request_errors.keys() | self.non_finite.keys()

    def row_error(self, row: int) -> RowError | None:
        """Return why the sequence of this row must end; None if it need not."""
        if row in self.errors:
            return RowError(self.errors[row], "engine")
        if row in self.request_errors:
            return RowError(self.request_errors[row], "request")
        if row in self.non_finite:
            return RowError(self.non_finite[row], "numbers")
        return None


class Update(NamedTuple):
    """Changes of one sequence. Exactly one update of each accepted sequence has `finish`."""

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index
    token_ids: Seq[int]
    finish: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | None = None  # the stop token id; None on EOS
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    error: str | None = None
    timing: SequenceTiming | None = None  # of the first and the last, and of each if request.timed
    fault: FaultOrigin = "engine"
    param: str | None = None  # the field that caused the error, by the caller's name
    last_token_is_text: bool = (
        False  # ended because its text is complete: the last token is text, no end token
    )
    pooled: Pooled | None = None  # result of a request with `pooling`, in its last update
    draft_counts: DraftCounts | None = None
    """Of all its rows so far: in the update of each row with drafts, and in the last one."""

    def to_exception(self) -> RequestError | EngineError:
        """Return the error of an update that has one, as an exception."""
        if self.fault == "request":
            return RequestError(str(self.error), param=self.param)
        if self.fault == "step":
            return StepFailed(f"the engine cannot compute this request: {self.error}")
        if self.fault == "numbers":
            return NotFinite(f"the engine failed on this request: {self.error}")
        return EngineError(f"the engine failed on this request: {self.error}")
