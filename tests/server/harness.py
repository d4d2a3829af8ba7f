"""The whole server over a model that recites: uvicorn on loopback, a real scheduler, a byte-level
tokenizer made here, and an executor whose "model" knows by heart what it will say.

What a prompt is answered is `speech(prompt ids, index)`, so a test can say exactly what must come.
"""

import asyncio
import json
import random
import threading
import time
from contextlib import contextmanager

import numpy as np
import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.config.engine_config import PoolingSection
from quire.core.admission.admission_control import AdmissionControl
from quire.core.kv.block_pool import BlockPool
from quire.core.kv.cache_spec import FullAttentionSpec
from quire.core.kv.kv_cache import KVCache
from quire.core.kv.tiers.host import HostTier
from quire.core.scheduling.grammar_wait import GrammarWait
from quire.core.scheduling.limits.base import by_contract
from quire.core.scheduling.limits.isolation_limit import FaultIsolationLimit
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.scheduling.limits.shortest_prompt_first import ShortestPromptFirst
from quire.core.scheduling.limits.tenant_kv_quota import TenantKVQuota
from quire.core.scheduling.limits.token_budget import TokenBudget
from quire.core.scheduling.order.fair import FairQueue
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.scheduler import Scheduler
from quire.core.snapshot import GrammarStats
from quire.core.types import UNKNOWN, Pooled, StepResult, TokenLogprobs, Wants
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_pool import EnginePool
from quire.engine.client.thread_transport import ThreadTransport
from quire.engine.core.engine_core import EngineCore
from quire.kernels.framework import late_work
from quire.server.app import create_app
from quire.server.app_state import AppState
from quire.server.options import ServerOptions
from quire.server.process import http_protocol
from quire.text.input_processor import InputProcessor
from quire.text.pooling_input import PoolingInputProcessor
from quire.text.tokenizing.tokenizer import load_tokenizer

EOS = "<|im_end|>"
SPECIALS = ["<|endoftext|>", "<|im_start|>", EOS]
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if shout %}!{% endif %}{% endif %}"
)
WORDS = [
    "the",
    "a",
    "cat",
    "naïve",
    "汉字",
    "🙂",
    "runs,",
    "stops.",
    "Zürich",
    "{json}",
    '"quoted"\n',
    "tab\t",
    "end",
    "ünïcödé",
    "中文",
]
MAX_LEN = 1536
VECTOR_SIZE = 16
LABELS = 3
EMBEDS = PoolingSection(
    tasks=("embed",), methods=("last",), size=VECTOR_SIZE, prompts={"query": "Query: "}
)
EMBEDS_TOKENS = PoolingSection(tasks=("token_embed",), methods=("last",), size=VECTOR_SIZE)
CLASSIFIES = PoolingSection(
    tasks=("classify",), methods=("last",), size=LABELS, labels=("bad", "fair", "good")
)
BLOCKS = 2000


def make_tokenizer(folder, marks=()):
    """Byte-level BPE without merges: one token per byte, so characters are spread over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = [*SPECIALS, *marks]
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in names])
    made.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


class Reciter:
    """The model: speech by prompt and index, then EOS; and logprobs that rank as they should."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.vocab = len(tokenizer)
        self.eos = tokenizer.eos_token_id
        self._known = {}
        self.bound = Bound()

    def speech(self, prompt, index=0):
        key = (tuple(prompt), index)
        if key not in self._known:
            draw = random.Random(f"{list(prompt)} {index}")
            text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 12)))
            self._known[key] = self.tokenizer.encode(text, add_special_tokens=False)
        return self._known[key]

    def text(self, prompt, index=0):
        return self.tokenizer.decode(self.speech(prompt, index))

    def next_token(self, seq, tokens):
        said = len(tokens) - seq.prompt_len
        if seq.request.constraint is not None:
            return self.whole(seq)[said]
        speech = self.speech(seq.request.prompt, seq.index)
        if seq.request.params.ignore_eos:
            return speech[said % len(speech)]
        return speech[said] if said < len(speech) else self.eos

    def whole(self, seq):
        """What a sequence says whose text has a form."""
        text = self.bound.text(seq.request.constraint, seq.index)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def ends(self, seq, tokens):
        """Whether the text is whole with its last token."""
        bound = seq.request.constraint is not None
        return bound and len(tokens) - seq.prompt_len == len(self.whole(seq))

    def logprobs(self, place, chosen, count, worst=False):
        draw = random.Random(place)
        others = [
            i for i in draw.sample(range(self.vocab), min(count + 4, self.vocab)) if i != chosen
        ][: count + 3]
        ids = [*others, chosen] if worst else [chosen, *others]
        values = [-0.25 * (rank + 1) for rank in range(len(ids))]
        ranks = list(range(1, len(ids) + 1))
        at = ids.index(chosen)
        return TokenLogprobs(
            [chosen, *ids[:count]], [values[at], *values[:count]], [ranks[at], *ranks[:count]]
        )

    def label_logprobs(self, chosen, ids):
        found = [chosen, *ids]
        return TokenLogprobs(found, [-0.25 * one % 7 - 8 for one in found], found)


class Bound:
    """Grammars, and what the model makes of them: whole texts of their own."""

    def __init__(self):
        self.has_outcomes = True
        self.ring = None
        self.texts = ['{"a": 1}', '{"a": "ünïcödé 汉字"}']
        self.end = "stop"
        self.outcome = 3
        self.asked = []
        self.held = 0

    def text(self, constraint, index):
        return self.texts[index % len(self.texts)]

    def check_constraint(self, constraint):
        pass

    def acquire(self, constraint):
        self.held += 1
        self.asked.append(constraint)

    def release(self, constraint):
        self.held -= 1

    def settle(self):
        """Tell how it turned out, where `has_outcomes` was false before."""
        self.has_outcomes = True
        self.ring()

    def outcomes(self):
        if not self.has_outcomes:
            return iter(())
        done, self.asked = self.asked, []
        return iter([(one, self.outcome) for one in dict.fromkeys(done)])

    def set_outcome_callback(self, ring):
        self.ring = ring

    def stats(self):
        return GrammarStats(waiting=len(self.asked))


class Executor:
    """Obeys plans as a runner does, with a Reciter for a model."""

    def __init__(self, model, step_s=0.0):
        self.model = model
        self.step_s = step_s
        self.fail_with = None
        self._tokens = {}
        self.said = 0
        self.pooled = 0
        self.labels = LABELS
        self.unpoolable = None  # tokens whose row fails
        self.late_work = late_work.counts

    def submit(self, plan):
        if self.step_s:
            time.sleep(self.step_s)
        if self.fail_with is not None and any(row.seq.request.id for row in plan.rows):
            raise self.fail_with  # but not at a step of nobody's: then the engine would be broken
        for seq in plan.joins:
            self._tokens[seq.slot] = list(seq.tokens)
        said, logprobs, prompts, ends = [], {}, {}, {}
        pooled, errors = {}, {}
        for place, row in enumerate(plan.rows):
            tokens, params = self._tokens[row.seq.slot], row.seq.request.params
            if params.prompt_logprobs is not None:
                stop = min(row.start + row.count + 1, row.seq.prompt_len)
                prompts[place] = [
                    self.model.logprobs(i, tokens[i], params.prompt_logprobs)
                    for i in range(row.start + 1, stop)
                ]
            if row.wants is not Wants.TOKEN:
                said.append(())
                if row.wants is Wants.POOLED:
                    self._pool(place, row.seq.request, pooled, errors)
                continue
            assert UNKNOWN not in tokens[: row.start + row.count]
            del tokens[row.start + row.count :]
            tokens.append(self.model.next_token(row.seq, tokens))
            said.append((tokens[-1],))
            if self.model.ends(row.seq, tokens):
                ends[place] = self.model.bound.end
            self.said += 1
            if params.logprob_token_ids:
                ids = params.logprob_token_ids
                logprobs[place] = [self.model.label_logprobs(tokens[-1], ids)]
            elif params.logprobs is not None:
                worst = row.seq.index % 2 == 0  # even ones are less likely: best_of must see it
                logprobs[place] = [
                    self.model.logprobs(len(tokens), tokens[-1], params.logprobs, worst)
                ]
        return Done(
            StepResult(said, logprobs, prompts, errors=errors, finish_reasons=ends, pooled=pooled)
        )

    def _pool(self, place, request, pooled, errors):
        self.pooled += 1
        if request.prompt == self.unpoolable:
            errors[place] = "no vector for this"
        else:
            pooled[place] = pool(request, self.labels)

    def apply_model(self, function):
        return [function(self.model)]

    def release_kv_memory(self):
        """Nothing to give back: the model knows its speech by heart."""

    def recover(self):
        """Nothing is half done."""

    def set_failure_callback(self, callback):
        pass

    def shutdown(self):
        self._tokens.clear()


def vector_of(ids, size=VECTOR_SIZE):
    """What the model makes of tokens: unlike for unlike ones, of length 1."""
    numbers = random.Random(str(list(ids)))
    found = np.array([numbers.gauss(0, 1) for _ in range(size)])
    return (found / np.linalg.norm(found)).astype(np.float32)


def logits_of(ids, labels):
    """What a classifier makes of tokens."""
    numbers = random.Random(str(list(ids)))
    return np.array([numbers.gauss(0, 1) for _ in range(labels)])


def probabilities(logits):
    if len(logits) == 1:
        return 1 / (1 + np.exp(-logits))
    return np.exp(logits) / np.exp(logits).sum()


def pool(request, labels):
    """The result of a pooling request."""
    wants = request.pooling
    if wants.task == "token_embed":
        found = np.stack([vector_of([one]) for one in request.prompt])
    elif wants.task == "classify":
        found = logits_of(request.prompt, labels)
        found = probabilities(found) if wants.use_activation else found
    else:
        found = vector_of(request.prompt)[: wants.dimensions]
        if wants.use_activation:
            found = found / np.linalg.norm(found)
    found = found.astype("<f4")
    return Pooled(found.shape, found.tobytes())


class Done:
    def __init__(self, result):
        self._result = result

    def wait(self):
        return self._result


def make_engine(executor, *, blocks=BLOCKS, seqs=64, depth=1, check=False, host=0):
    """host: blocks of the host tier; 0: there is none."""
    kv = KVCache(
        BlockPool(blocks), 4, (FullAttentionSpec(),), host=HostTier(host) if host else None
    )
    order, budget = FairQueue(Fifo), TokenBudget(256)
    limits = [
        FaultIsolationLimit(),
        AdmissionControl(most=256),
        TenantKVQuota(order, blocks, kv.max_blocks),
        *(budget, MaxSeqsLimit(seqs), ShortestPromptFirst(order, lambda: budget.left)),
        GrammarWait(executor.model.bound, MAX_LEN),
    ]
    scheduler = Scheduler(
        kv,
        order,
        **by_contract(limits),
        max_seqs=seqs,
        max_len=MAX_LEN,
        steps_in_flight=depth,
    )
    return EngineCore(scheduler, executor, steps_in_flight=depth, check=check)


class Server:
    """A running server, and the handles a test needs."""

    def __init__(
        self,
        tokenizer,
        *,
        options=None,
        defaults=None,
        step_s=0.0,
        services=None,
        transport=ThreadTransport,
        pooling=EMBEDS,
        generates=True,
        **engine,
    ):
        self.model = Reciter(tokenizer)
        self.tokenizer = tokenizer
        self.executor = Executor(self.model, step_s)
        if pooling is not None and pooling.labels:
            self.executor.labels = pooling.size
        self.engine = make_engine(self.executor, **engine)
        self.client = EngineClient(transport(self.engine))
        inputs = InputProcessor(tokenizer, max_model_len=MAX_LEN, vocab_size=self.model.vocab)
        self.services = AppState(
            EnginePool([self.client]),
            inputs,
            tokenizer,
            None,
            ("tiny", "alias"),
            MAX_LEN,
            options=options or ServerOptions(),
            defaults=defaults or {},
            root="tiny-root",
            pooling=pooling
            and PoolingInputProcessor(
                tokenizer,
                pooling,
                max_model_len=MAX_LEN,
                vocab_size=self.model.vocab,
                generates=generates,
            ),
            generates=generates,
            **(services or {}),
        )
        self.app = create_app(self.services)
        self.loop = None
        self.url = ""

    @contextmanager
    def running(self):
        config = uvicorn.Config(
            self.app,
            host="127.0.0.1",
            port=0,
            log_level="critical",
            http=http_protocol.build_http_protocol(self.services.options),
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        started = threading.Event()

        async def serve():
            self.loop = asyncio.get_running_loop()
            task = asyncio.create_task(server.serve())
            while not server.started and not task.done():
                await asyncio.sleep(0.005)
            started.set()
            await task

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        assert started.wait(60)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()

    def ask(self, coroutine):
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def stats(self):
        return self.ask(self.client.stats())

    def wait_idle(self):
        """Until nothing runs; then prove the books balance."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            stats = self.stats()
            if stats.running == stats.waiting == stats.held_blocks == 0:
                self.ask(self.client.check())
                return stats
            time.sleep(0.005)
        raise AssertionError(f"not idle: {stats}")

    def chat_ids(self, messages, **variables):
        text = self.tokenizer.template().render(messages, variables=variables)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def answer(self, messages, index=0, **variables):
        return self.model.text(self.chat_ids(messages, **variables), index)
