"""AsyncLLM over an engine that recites, in a thread; and once over the real one in its process."""

import asyncio
import contextlib
import subprocess
import sys

import psutil
import pytest

from quire import AsyncLLM, SamplingParams
from quire.config.engine_config import (
    CacheSection,
    DeviceSection,
    EngineConfig,
    LoadSection,
    ModelSection,
    ObserveSection,
    ParallelSection,
    SamplingSection,
    SchedulerSection,
)
from quire.core.params import LoRARequest, RequestOutputKind
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_pool import EnginePool
from quire.engine.client.thread_transport import ThreadTransport
from quire.errors import EngineDead, EngineError, RequestError, Unsupported
from tests.server.harness import MAX_LEN, Executor, Reciter, make_engine
from tests.server.running import wait_until

pytestmark = pytest.mark.slow("an engine in a process of its own imports torch")

PROMPT = "hello"


def config(vocab):
    model = ModelSection(
        name="tiny",
        model_type="none",
        tokenizer="tiny",
        tokenizer_mode="auto",
        skip_tokenizer_init=False,
        trust_remote_code=False,
        dtype="float32",
        seed=0,
        vocab=vocab,
        revision=None,
        tokenizer_revision=None,
        served_names=("tiny",),
        chat_template=None,
        max_logprobs=20,
        logprobs_mode="raw_logprobs",
        logits_processors=(),
        disable_sliding_window=False,
    )
    cache = CacheSection(
        block_size=4,
        num_blocks=1,
        num_host_blocks=0,
        prefix_caching=True,
        dtype="float32",
        layers=(),
        groups=(),
        block_bytes=1,
    )
    scheduler = SchedulerSection(
        max_num_batched_tokens=256,
        max_num_seqs=64,
        max_model_len=MAX_LEN,
        chunked_prefill=True,
        max_num_partial_prefills=0,
        max_long_partial_prefills=0,
        long_prefill_token_threshold=0,
        policy="fcfs",
        steps_in_flight=1,
        inter_token_target_s=0.0,
    )
    return EngineConfig(
        model=model,
        cache=cache,
        scheduler=scheduler,
        load=LoadSection(format="dummy", download_dir=None, hf_token=None, progress=False),
        device=DeviceSection(kind="cpu", attention_backend="auto", threads=1, captured_tokens=1024),
        parallel=ParallelSection(tensor=1),
        sampling=SamplingSection(defaults={}, eos_ids=()),
        observe=ObserveSection(log_stats=True, log_level=None),
    )


class Engine:
    """An AsyncLLM, and the parts behind it."""

    def __init__(self, tokenizer, step_s=0.0):
        self.model = Reciter(tokenizer)
        self.step_s = step_s
        self.threads = []
        self.llm = AsyncLLM(config(len(tokenizer)), tokenizer, self.connect)

    def connect(self):
        self.threads.append(
            ThreadTransport(make_engine(Executor(self.model, self.step_s), check=True))
        )
        return EnginePool([EngineClient(self.threads[-1])])

    def speech(self, prompt=PROMPT):
        return self.model.text(self.model.tokenizer.encode(prompt))


def greedy(kind, **more):
    return SamplingParams(temperature=0, max_tokens=400, output_kind=kind, **more)


def run(tokenizer, body, **how):
    engine = Engine(tokenizer, **how)

    async def main():
        try:
            await body(engine.llm, engine)
        finally:
            engine.llm.shutdown()

    asyncio.run(main())


async def idle(llm):
    for _ in range(1000):
        (stats,) = await llm._on_this_loop().stats()
        if stats.running == stats.waiting == stats.held_blocks == 0:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(stats)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_all_kinds_of_output_say_the_same(tokenizer, kind):
    async def body(llm, engine):
        outputs = [o async for o in llm.generate(PROMPT, greedy(kind), "mine")]
        assert {o.request_id for o in outputs} == {"mine"}
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        pieces = [o.outputs[0].text for o in outputs]
        text = "".join(pieces) if kind is RequestOutputKind.DELTA else pieces[-1]
        assert text == engine.speech()
        if kind is RequestOutputKind.FINAL_ONLY:
            assert len(outputs) == 1
        await idle(llm)

    run(tokenizer, body)


def test_requests_of_one_id_run_side_by_side(tokenizer):
    async def body(llm, engine):
        async def last(prompt):
            async for output in llm.generate(prompt, greedy(RequestOutputKind.CUMULATIVE), "same"):
                found = output
            return found.outputs[0].text

        prompts = [f"prompt {i}" for i in range(12)]
        texts = await asyncio.gather(*map(last, prompts))
        assert texts == [engine.speech(prompt) for prompt in prompts]

    run(tokenizer, body)


def test_leaving_the_loop_aborts_the_request(tokenizer):
    async def body(llm, engine):
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        async with contextlib.aclosing(llm.generate(PROMPT, params)) as outputs:
            async for _ in outputs:
                break
        await idle(llm)
        assert engine.threads[0].engine._executor.said < 200  # and not 400
        await llm.wait_for_requests_to_drain(1)

    run(tokenizer, body, step_s=0.001)


def test_an_aborted_request_gives_a_last_output(tokenizer):
    async def body(llm, engine):
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        outputs = llm.generate(PROMPT, params, "mine")
        await anext(outputs)
        await llm.abort(["mine", "nobody"])
        rest = [o async for o in outputs]
        assert rest[-1].finished
        assert rest[-1].outputs[0].finish_reason == "abort"
        await idle(llm)

    run(tokenizer, body, step_s=0.001)


def test_what_cannot_run_is_refused_before_it_does(tokenizer):
    async def body(llm, engine):
        for error, prompt, named in (
            (RequestError, "", {}),
            (RequestError, "x" * MAX_LEN, {}),
            (Unsupported, PROMPT, {"lora_request": LoRARequest("a", 1, "x")}),
            (RequestError, PROMPT, {"data_parallel_rank": 1}),
        ):
            with pytest.raises(error):
                await anext(llm.generate(prompt, SamplingParams(), **named))
        params = SamplingParams(logits_processors=[lambda ids, logits: logits])
        with pytest.raises(Unsupported, match="offline only"):
            await anext(llm.generate(PROMPT, params))
        with pytest.raises(Unsupported, match="pooling"):
            await anext(llm.encode(PROMPT))
        with pytest.raises(AttributeError, match="does not support weight transfer"):
            _ = llm.update_weights
        await idle(llm)

    run(tokenizer, body)


def test_a_paused_engine_lets_new_requests_wait(tokenizer):
    async def body(llm, engine):
        await llm.pause_generation()
        assert await llm.is_paused()
        outputs = llm.generate(PROMPT, greedy(RequestOutputKind.FINAL_ONLY))
        waiting = asyncio.create_task(anext(outputs))
        for _ in range(20):
            await llm.check_health()
        assert not waiting.done()
        await llm.resume_generation()
        assert (await waiting).outputs[0].text == engine.speech()

    run(tokenizer, body)


def test_its_end_reaches_who_waits_and_who_comes_later(tokenizer):
    async def body(llm, engine):
        outputs = llm.generate(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(outputs)
        assert llm.is_running
        llm.shutdown()
        with pytest.raises(EngineDead):
            async for _ in outputs:
                pass
        with pytest.raises(EngineDead):
            await llm.check_health()
        assert llm.is_stopped
        assert not llm.errored

    run(tokenizer, body, step_s=0.001)


def test_a_dead_engine_says_so(tokenizer, caplog):
    async def body(llm, engine):
        await llm.check_health()
        engine.threads[0].engine.step = lambda: 1 / 0
        with pytest.raises(EngineDead, match="ZeroDivisionError"):
            await anext(llm.generate(PROMPT, greedy(RequestOutputKind.FINAL_ONLY)))
        assert llm.errored
        assert "ZeroDivisionError" in str(llm.dead_error)

    run(tokenizer, body)


def test_it_moves_to_another_event_loop_when_the_first_is_closed(tokenizer):
    engine = Engine(tokenizer)

    async def ask():
        async for output in engine.llm.generate(PROMPT, greedy(RequestOutputKind.FINAL_ONLY)):
            return output.outputs[0].text

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(ask()) == engine.speech()
    with pytest.raises(EngineError, match="another event loop"):
        asyncio.run(ask())
    loop.close()
    assert asyncio.run(ask()) == engine.speech()
    engine.llm.shutdown()


SCRIPT = """
import asyncio, sys
import numpy
from quire import AsyncEngineArgs, AsyncLLMEngine, PoolingParams, RequestError, SamplingParams

args = AsyncEngineArgs(
    model="embedded",
    kv_cache_memory_bytes="64MiB",
    enable_prompt_embeds=True,
    data_parallel_size=2,
)
engine = AsyncLLMEngine.from_engine_args(args)
assert "torch" not in sys.modules

params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, logit_bias={3: -100})

async def ask(i):
    rank = None if i < 6 else i - 6
    prompt = "The capital of France is"
    async for output in engine.generate(prompt, params, str(i), data_parallel_rank=rank):
        last = output
    return last.outputs[0].text, len(last.outputs[0].logprobs[0])

async def main():
    found = await asyncio.gather(*map(ask, range(8)))
    assert len(set(found)) == 1, found
    queried = [one.prefix_query_tokens for one in await engine._on_this_loop().stats()]
    assert len(queried) == 2 and all(queried), queried
    async for output in engine.generate({"prompt_embeds": numpy.ones((5, 256))}, params):
        last = output
    assert len(last.outputs[0].token_ids) == 8 and len(last.prompt_token_ids) == 5
    async for output in engine.encode("Hello"):
        vector = output.outputs.data
    assert abs(float((vector * vector).sum()) - 1) < 1e-5
    try:
        await anext(engine.encode("Hello", PoolingParams(task="classify")))
        raise AssertionError
    except RequestError as error:
        assert "--convert classify" in str(error)
    print(found[0], await engine.get_supported_tasks())

asyncio.run(main())
asyncio.run(main())
pids = [one.process.pid for one in engine._end.peek()[1].__self__._group.children]
print(*pids, flush=True)
sys.stdin.readline()
"""


def test_the_real_one_has_a_process_which_ends_with_this_one():
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=pipe, stdout=pipe, text=True)
    first, second, pid = (process.stdout.readline() for _ in range(3))
    assert first == second != ""
    assert "Paris" in first
    assert "('generate', 'embed')" in first
    engines = [psutil.Process(int(one)) for one in pid.split()]
    assert len(engines) == 2
    process.kill()
    process.communicate()
    ended = lambda one: not one.is_running() or one.status() == psutil.STATUS_ZOMBIE  # noqa: E731
    assert wait_until(lambda: all(map(ended, engines)))
