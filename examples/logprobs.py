"""How sure the model is: of what it said, and of the prompt."""

import math

from quire import LLM, SamplingParams


def main() -> None:
    llm = LLM("embedded")
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=1)
    output = llm.generate("The capital of Italy is", params, use_tqdm=False)[0]
    print("prompt")
    for token, candidates in zip(output.prompt_token_ids, output.prompt_logprobs):
        if candidates is not None:  # the first token was not predicted from anything
            told = candidates[token]
            print(f"  {told.decoded_token!r:12} {math.exp(told.logprob):7.1%} rank {told.rank}")
    print("answer")
    for candidates in output.outputs[0].logprobs:
        best = ", ".join(
            f"{c.decoded_token!r} {math.exp(c.logprob):.1%}" for c in candidates.values()
        )
        print(f"  {best}")


if __name__ == "__main__":
    main()
