"""LLM.chat with tools and thoughts: read out of the text, forced, and kept short."""

from quire import LLM, SamplingParams

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def main() -> None:
    llm = LLM("embedded")
    params = SamplingParams(temperature=0, max_tokens=300)
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    other = [{"role": "user", "content": "What is the capital of Japan?"}]
    read = {"tools": [WEATHER], "tool_parser": "auto", "reasoning_parser": "auto"}

    for output in llm.chat([asked, other], params, use_tqdm=False, **read):
        answer = output.outputs[0]
        print(answer.reasoning, [call.function for call in answer.tool_calls], answer.text)

    # "required": one call or more, whatever was asked. Without a tool_parser it works too.
    answer = llm.chat(
        other, params, use_tqdm=False, tool_choice="required", parallel_tool_calls=False, **read
    )
    print(answer[0].outputs[0].tool_calls[0].function)

    brief = SamplingParams(temperature=0, max_tokens=300, thinking_token_budget=5)
    answer = llm.chat(asked, brief, use_tqdm=False, **read)
    print("after 5 tokens of thought:", answer[0].outputs[0].tool_calls[0].function)


if __name__ == "__main__":
    main()
