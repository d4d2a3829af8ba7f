"""Many requests at once. The server batches what is under way; the client need not group anything.

usage: many_requests.py [http://127.0.0.1:8000]
"""

import asyncio
import sys
import time

from openai import AsyncOpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
AT_ONCE = 16


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    seats = asyncio.Semaphore(AT_ONCE)

    async def ask(number: int) -> int:
        async with seats:
            answer = await client.completions.create(
                model="embedded", prompt=f"{number} + {number} =", max_tokens=8, temperature=0
            )
        return answer.usage.completion_tokens

    began = time.perf_counter()
    tokens = await asyncio.gather(*(ask(number) for number in range(64)))
    seconds = time.perf_counter() - began
    print(f"{len(tokens)} answers, {sum(tokens)} tokens in {seconds:.1f} s")
    await client.close()


if __name__ == "__main__":
    asyncio.run(main())
