"""One model over several programs that torchrun starts: every program makes the same calls.

    torchrun --nproc-per-node 2 examples/external_launcher.py --device cpu

Each program is one rank, has all requests, and gets all answers: rank 0 prints them.
"""

import argparse
import os

from quire import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    llm = LLM(
        args.model,
        device=args.device,
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
    )
    params = SamplingParams(temperature=0, max_tokens=20)
    outputs = llm.generate(["The capital of France is", "1, 2, 3,"], params, use_tqdm=False)
    if os.environ["RANK"] == "0":
        for output in outputs:
            print(output.prompt + output.outputs[0].text, flush=True)


if __name__ == "__main__":
    main()
