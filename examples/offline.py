"""Complete many prompts at once. The engine batches them; outputs keep the order of the prompts."""

from quire import LLM, SamplingParams


def main() -> None:
    llm = LLM("embedded")
    prompts = ["San Francisco is a", "The capital of France is", "Hello, my name is"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(temperature=0.0, max_tokens=24, stop=["."], include_stop_str_in_output=True),
        SamplingParams(temperature=0.8, top_p=0.95, seed=7, n=2, max_tokens=24),
    ]
    for output in llm.generate(prompts, params):
        for answer in output.outputs:
            print(f"{output.prompt!r} -> {answer.text!r} ({answer.finish_reason})")


if __name__ == "__main__":
    main()
