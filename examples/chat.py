"""Chat with the embedded model: with a thought first, without, and with tools to choose from."""

from quire import LLM, SamplingParams

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}


def main() -> None:
    llm = LLM("embedded")
    params = SamplingParams(temperature=0.0, max_tokens=256)

    question = [{"role": "user", "content": "What is 27 + 48?"}]
    print(llm.chat(question, params, use_tqdm=False)[0].outputs[0].text)

    plain = {"enable_thinking": False}
    capital = [{"role": "user", "content": "What is the capital of Japan?"}]
    answer = llm.chat(capital, params, use_tqdm=False, chat_template_kwargs=plain)
    print(answer[0].outputs[0].text)

    weather = [{"role": "user", "content": "What is the weather in Oslo?"}]
    answer = llm.chat(weather, params, use_tqdm=False, tools=[WEATHER])
    print(answer[0].outputs[0].text)


if __name__ == "__main__":
    main()
