"""The engine by hand: requests join while others run, one is aborted, and the rest never notice."""

from quire import LLM, SamplingParams


def main() -> None:
    engine = LLM("embedded").llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add_request("first", "Once upon a time", params)
    steps = 0
    while engine.has_unfinished_requests():
        steps += 1
        if steps == 5:
            engine.add_request("second", "The sea is", params)
            engine.add_request("third", "In the morning", params)
        if steps == 10:
            engine.abort_request("third")
        for output in engine.step():
            if output.finished:
                answer = output.outputs[0]
                print(
                    f"step {steps:2}: {output.request_id} {answer.finish_reason}: {answer.text!r}"
                )


if __name__ == "__main__":
    main()
