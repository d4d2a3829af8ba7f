"""The engine inside a program with an event loop: streams side by side, one of them left early.

The engine runs in a process of its own, so this one stays free. Leaving a loop aborts its request.
"""

import asyncio

from quire import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

DELTAS = SamplingParams(
    temperature=0.0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)


async def tell(engine: AsyncLLM, prompt: str) -> None:
    pieces = [out.outputs[0].text async for out in engine.generate(prompt, DELTAS)]
    print(f"{prompt} ... {''.join(pieces)!r}, in {len(pieces)} pieces")


async def first_sentence(engine: AsyncLLM, prompt: str) -> None:
    text = ""
    async for output in engine.generate(prompt, DELTAS, request_id="story"):
        text += output.outputs[0].text
        if "." in text:
            break  # the engine stops working on it
    print(f"{prompt} ... {text!r}, and no more")


async def main() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="embedded"))
    try:
        await asyncio.gather(
            tell(engine, "The sea is"),
            tell(engine, "In the morning"),
            first_sentence(engine, "Once upon a time"),
        )
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
